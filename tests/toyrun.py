"""A toy scheduler on a made-up clock: consistent Runs for tests of the views, without a model.

It knows budget, chunks, blocks, shared prefixes and preemption; its step time is fixed cost + tokens × rate.
"""

import random

from minichunk.record import RequestRecord, Run, StepRecord

WORDS = " the| quick| brown| fox| jumps| over| a| lazy| dog|.|\n| and| then| it| ran|ning| home| to| its| den".split(
    "|"
)


class Pool:
    """Blocks with owners; a block given up is kept as "cached" when it was full, and reused last."""

    def __init__(self, num_blocks):
        self.owners = {b: 0 for b in range(num_blocks)}
        self.empty, self.cached = list(range(num_blocks)), []
        self.changes = {}

    def take(self):
        block = self.empty.pop(0) if self.empty else self.cached.pop(0)
        self.owners[block] = 1
        self.changes.pop(block, None)
        return block

    def release(self, table, num_full):
        for n, block in reversed(list(enumerate(table))):
            self.owners[block] -= 1
            if not self.owners[block]:
                (self.cached if n < num_full else self.empty).append(block)
                self.changes[block] = "cached" if n < num_full else "empty"

    @property
    def num_free(self):
        return len(self.empty) + len(self.cached)


def toy_run(
    prompts=(9, 40, 17, 3, 300, 25, 60, 210), outputs=16, budget=128, block_size=16, num_blocks=96, policy="mixed",
    max_requests=64, gap=0.02, seed=0, vocab=200, shared=0, per_token=0.0006, base=0.02,
):  # fmt: skip
    """policy: "mixed" (decodes, then chunks) or "prefill_first" (whole prompts alone, else decodes).

    shared: the first two prompts begin with this many same tokens, whose whole blocks the second one shares.
    """
    rng = random.Random(seed)
    head = [rng.randrange(vocab) for _ in range(shared)]
    run = Run(
        meta={
            "model": "toy", "policy": policy, "max_batch_tokens": budget, "block_size": block_size,
            "num_blocks": num_blocks, "source": "SIMULATED toy", "threads": 1,
        },
        vocab={i: WORDS[i % len(WORDS)] for i in range(vocab)},
    )  # fmt: skip
    for n, length in enumerate(prompts):
        ids = [rng.randrange(vocab) for _ in range(length)]
        if n < 2:
            ids = head + ids[shared:]
        run.requests[n] = RequestRecord(n, ids, [], arrival=n * gap)
    pool, clock = Pool(num_blocks), 0.0
    tables, computed, waiting, running, todo = {}, {}, [], [], list(run.requests)
    total = lambda r: len(run.requests[r].prompt_ids) + len(run.requests[r].output_ids)  # noqa: E731
    while todo or waiting or running:
        if not waiting and not running:
            clock = max(clock, run.requests[todo[0]].arrival)
        step = StepRecord(len(run.steps), clock, clock, budget, [])
        pool.changes = {}
        while todo and run.requests[todo[0]].arrival <= clock:
            step.arrived.append(todo.pop(0))
        waiting += step.arrived

        def grow(r, upto):
            """Takes blocks for r; preempts the newest other request when there are none."""
            while len(tables[r]) * block_size < upto:
                if not pool.num_free:
                    victim = next((v for v in reversed(running) if v != r), None)
                    if victim is None:
                        raise RuntimeError("the toy pool is too small for one request")
                    pool.release(tables.pop(victim), computed[victim] // block_size)
                    step.grown.pop(victim, None)
                    step.chunks[:] = [c for c in step.chunks if c[0] != victim]
                    running.remove(victim)
                    waiting.insert(0, victim)
                    computed[victim] = 0
                    step.preempted.append(victim)
                    continue
                block = pool.take()
                tables[r].append(block)
                step.grown.setdefault(r, []).append(block)

        def add(r, most):
            length = min(total(r) - computed[r], most, budget - sum(c[2] for c in step.chunks))
            if length < 1:
                return
            grow(r, computed[r] + length)
            last = computed[r] + length == total(r)
            decode = last and length == 1 and computed[r] >= len(run.requests[r].prompt_ids)
            step.chunks.append((r, computed[r], length, last, decode))

        decoding = [r for r in running if total(r) - computed[r] == 1 and run.requests[r].output_ids]
        if policy == "mixed" or not (waiting and len(running) < max_requests):
            for r in decoding:
                if r in running:
                    add(r, 1)
        for r in list(running):
            if r not in decoding and r in running:
                add(r, budget)
        while (
            waiting and len(running) < max_requests and not step.preempted and sum(c[2] for c in step.chunks) < budget
        ):
            r = waiting[0]
            if pool.num_free < -(-total(r) // block_size):
                break
            if policy == "prefill_first" and total(r) > budget - sum(c[2] for c in step.chunks):
                break
            running.append(waiting.pop(0))
            step.admitted.append(r)
            tables[r], computed[r] = [], 0
            if r == 1 and 0 in tables:
                hit = min(shared, computed[0]) // block_size
                tables[r] = tables[0][:hit]
                for block in tables[r]:
                    pool.owners[block] += 1
                if hit:
                    step.grown[r], step.hits[r], computed[r] = list(tables[r]), hit * block_size, hit * block_size
            add(r, budget)
        if policy == "prefill_first" and not step.chunks:
            for r in decoding:
                if r in running:
                    add(r, 1)
        for r, _, length, last, _ in step.chunks:
            request = run.requests[r]
            if request.first_scheduled is None:
                request.first_scheduled = clock
        clock += base + per_token * step.num_tokens
        step.end = clock
        for r, _, length, last, _ in step.chunks:
            computed[r] += length
            request = run.requests[r]
            if last:
                request.output_ids.append(rng.randrange(vocab))
                request.token_times.append(clock)
        step.wasted_slots = sum(len(t) * block_size - computed[r] for r, t in tables.items())
        for r in list(running):
            request = run.requests[r]
            if len(request.output_ids) == outputs:
                running.remove(r)
                pool.release(tables.pop(r), computed[r] // block_size)
                request.finish_reason, request.finished = "length", clock
                step.finished.append(r)
        step.empty, step.cached = len(pool.empty), len(pool.cached)
        step.used = num_blocks - step.empty - step.cached
        step.block_states = dict(pool.changes)
        forward = 0.8 * step.duration
        step.times = {"plan": 0.02 * step.duration, "forward": forward, "sample": 0.18 * step.duration}
        run.steps.append(step)
        clock += 0.001
    return run
