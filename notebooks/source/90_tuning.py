# ruff: noqa: E402
# %% [markdown]
"""
# 90 · Tuning

*There is no best budget, only a front.*

You will

- **choose** a policy and a budget by hand, against a promise;
- **compute** which requests got what was promised, and which settings nothing beats;
- **compare** your own scheduler from notebook 40 with four others, under the same load.

| | |
|---|---|
| Prerequisites | notebook 40; 20 and 60 help |
| Minutes | 45 |
| Hardware | a CPU is enough |
| Numbers | live simulation: the engine's Scheduler and block pool, with a cost model in the GPU's place; then a recorded run on an H200 |
"""

# %%
from minichunk import lab

# %% [markdown]
"""
## One server, one load

Llama-3-8B on one A100. 200 requests with the lengths of Azure's conversations come in, six a second. Two sorts of people
wait, and they want different things:

- **readers** have their first token. They suffer from the longest gaps: P99 TBT.
- **newcomers** wait for their first token: median TTFT.

`lab.serve(policy, budget)` simulates it and returns a Run, like the engine's. A step takes as long as the cost model says,
which is an estimate. It depends on no clock, so everybody gets the same numbers.
"""

# %%
run = lab.serve("mixed", 512)
tbt, ttft = lab.waits(run)
print(f"{len(run.steps)} steps, {run.summary()['mixed_share']:.0%} of them mixed")
print(f"readers: P99 TBT {1e3 * tbt:.0f} ms · newcomers: median TTFT {1e3 * ttft:.0f} ms")

# %% [markdown]
"""
## Only the budget

Before you turn it, say what it does. The budget goes from 256 to 2,048 tokens a step.
"""

# %%
lab.predict("90a", "Readers: P99 TBT with a budget of 2,048 over that with 256?", "times")

# %%
lab.predict("90b", "Newcomers: median TTFT with 256 over that with 2,048?", "times")

# %%
sweep = {budget: lab.serve("mixed", budget) for budget in (256, 512, 1024, 2048, 4096)}
waits = {budget: lab.waits(run) for budget, run in sweep.items()}
lab.reveal("90a", waits[2048][0] / waits[256][0], lab.budget_latency(list(sweep.values())))

# %%
lab.reveal("90b", waits[256][1] / waits[2048][1], text="What one sort of people gains, the other pays.")

# %%
for budget, run in sweep.items():
    print(f"budget {budget:>4}: {run.summary()['output_tokens_per_s']:.0f} tokens a second")

# %% [markdown]
"""
The tokens a second hardly move: six requests a second come in, and six go out. As long as the server keeps up, the load
sets throughput. A benchmark that reports throughput alone cannot tell these settings apart.

## Exercise 90.1 · Promises kept

*Difficulty: easy. Spend up to 10 minutes.*

A percentile hides who was hit. Count people instead. `requests` is a list of `(ttft, gaps)`, in seconds. A request got
what was promised when its TTFT is at most `ttft_slo` and *every* gap is at most `tbt_slo`. Return the share of such
requests.
"""


# %%
def kept_promises(requests, ttft_slo, tbt_slo):
    # BEGIN SOLUTION 90.1
    kept = 0
    for ttft, gaps in requests:
        if ttft <= ttft_slo and all(gap <= tbt_slo for gap in gaps):
            kept += 1
    return kept / len(requests)
    # END SOLUTION


# %%
kept_promises = lab.exercise("90.1", kept_promises)
for budget, run in sweep.items():
    share = kept_promises(lab.pairs(run), ttft_slo=1.0, tbt_slo=0.1)  # pairs: (TTFT, gaps) of each request
    long = run.stalls(0.1) / len(run.tbts)  # stalls: how many gaps are longer
    print(
        f"budget {budget:>4}: {long:4.0%} of the gaps above 100 ms, 1 s and 100 ms kept for {share:4.0%} of the requests"
    )

# %% [markdown]
"""
A few long gaps in a hundred sound harmless. An answer has some hundred gaps, so with a budget of 2,048 hardly anybody was
spared. A promise for each *request* is much harder than one for each *gap*.

## Search by hand

Now two knobs. Policies: `mixed`; `share(0.7)` and `share(0.3)`, where prompts get at most that share of the budget; and
`leftover`: prompts first, cut to the budget, decodes in what is left. Your own scheduler takes part, too, as you wrote it
in notebook 40.

The promise is P99 TBT ≤ 100 ms: over all gaps, so one in a hundred may be longer. Make newcomers wait as little as you
can. Six tries should do.
"""

# %%
plan_step = lab.solved("40.1")
slo = 0.1
tuner = lab.tuner(slo, ["mixed", "share(0.7)", "share(0.3)", "leftover", plan_step])
tuner

# %% [markdown]
"""
With your best try in mind, look at all of them at once. A setting is *beaten* when another one is at least as good for
both sorts of people, and better for one. Those that nobody beats are the **front**.

## Exercise 90.2 · The front

*Difficulty: medium. Spend up to 15 minutes.*

`points` are pairs of waits, `(p99_tbt, ttft)`: smaller is better in both. Return the points that no other beats, sorted,
each once.

    ttft  |  a
          |     c          c is beaten by b
          |   b
          |         d      the front: a, b, d
          +------------ tbt
"""


# %%
def front(points):
    # BEGIN SOLUTION 90.2
    found = []
    for point in sorted(set(points)):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found
    # END SOLUTION


# %%
front = lab.exercise("90.2", front)

# %%
lab.predict("90c", "Five budgets for each of four policies: of the 20 settings, how many are on the front?", "settings")

# %%
policies, budgets = ["mixed", "share(0.7)", "share(0.3)", "leftover"], (256, 512, 1024, 2048, 4096)
runs = [lab.serve(policy, budget) for policy in policies for budget in budgets]
best = front([lab.waits(run) for run in runs])
lab.reveal("90c", len(best), lab.tuning_map([*runs, lab.serve(plan_step, 512)], slo))

# %% [markdown]
"""
Read it from the left. A share below one makes chunks smaller at the same budget: it moves a setting left, along nearly
the same curve. (`share(0.7)` at 1,024 even beats `mixed` at 1,024. That is no golden rule: `mixed` at 750 lies in the
same place, and among 200 requests a median wobbles by some ms.) `leftover` lies far to the right: nothing bounds a
reader's gap while prompts keep coming. The ring is 40.1's scheduler, exactly on `mixed` at 512.

Which point of the front is right? Nothing in the picture says. The promise does.
"""

# %%
kept = [run for run in runs if lab.waits(run)[0] <= slo]
winner = min(kept, key=lambda run: lab.waits(run)[1])
print(f"of these, within {1e3 * slo:.0f} ms: {winner.meta['policy']}, budget {winner.meta['max_batch_tokens']}")
print("by hand:", tuner.summary())

# %% [markdown]
"""
## The knob that does nothing here

The block size. In this simulator attention costs the same whatever the blocks, and memory is plenty. What it costs is
slots: the last block of each request. With a pool that is nearly full, those are requests that cannot come in.
"""

# %%
for block_size in (16, 256):
    run = lab.serve("mixed", 512, block_size=block_size)
    print(
        f"blocks of {block_size:>3}: P99 TBT {1e3 * lab.waits(run)[0]:.0f} ms, {run.summary()['waste']:.1%} of the slots empty"
    )

# %% [markdown]
"""
## On a card, with a clock

All this was computed. The engine itself served the same sort of people on an H200: 480 of Azure's conversations, 17 a
second, Llama-3-8B's shape (docs/serving.md). TBT goes the same way. TTFT gains from 512 to 1,024 and no more: at 8,192
both sorts of people wait longer, so that point is beaten. `prefill_first` runs whole prompts, in steps of their own.
"""

# %%
for row in lab.measured():
    print(
        f"{row['run']:>18}: P99 TBT {row['tbt_p99_ms']:5.1f} ms, TTFT median {row['ttft_p50_ms']:3.0f}, P99 {row['ttft_p99_ms']:3.0f} ms"
    )

# %%
lab.predict("90d", "prefill_first kept 99% of the gaps below 166 ms. How many prompts ran in the longest?", "prompts")

# %%
run = lab.recorded_run("prefill_first 8192")
lab.reveal("90d", lab.prompts_in_longest_gap(run), text=f"That gap took {1e3 * max(run.tbts):.0f} ms.")

# %% [markdown]
"""
They came in a burst: eight steps of prompts in a row, before anybody's next token. The scrubber opens on the first of
them. Step on with the arrow keys.
"""

# %%
lab.scrub_at(449, run)  # request 449 is the first of the burst: step 2084

# %% [markdown]
"""
## Recap

- Under a load that the server can carry, the budget moves waiting from one sort of people to another. Throughput stays.
- A setting can be bad, because another beats it in both. It cannot be best without a promise.
- A share is a smaller budget for prompts. Prompts first is on no front here, at six a second.
- P99 of gaps, and requests without a long gap, are two promises.

**Three questions**

1. The load doubles. Which way does the front move?
2. Why is the front steep on its left side? Look at what a small budget does to a queue.
3. Your readers are programs that read whole answers. What would you promise them instead?

<details><summary>Answers</summary>

**1** Mostly up. The budget bounds TBT, which hardly changes; median TTFT goes from tenths of a second to seconds, since no
budget carries twelve a second. Small ones stay on the front, but nobody wants them. **2** Each step reads all the weights
for few prompt tokens. When they leave no faster than they arrive, the queue never empties. **3** The time to the last token, or tokens a second: nobody looks at the gaps.

</details>

**What breaks next.** A simulated step costs what a formula says. Notebook 95 asks which published numbers survive such
formulas, and where only a measurement would do.
"""

# %%
print(lab.score())
