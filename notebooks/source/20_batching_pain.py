# ruff: noqa: E402
# %% [markdown]
"""
# 20 · Batching pain

*One long prompt freezes everybody, and the average hides it.*

You will

- **build** static batching on a real engine in one line, and count what continuous batching saves;
- **measure** the pause that one long prompt causes, and explain why a mean does not show it;
- **write** the function that names who delayed a token.

| | |
|---|---|
| Prerequisites | notebook 00 |
| Minutes | 40 |
| Hardware | a CPU is enough |
| Numbers | live: measured on your machine while you watch |
"""

# %%
from statistics import mean, median

from minichunk import SamplingParams, lab

# %% [markdown]
"""
## The bus that waits for its last passenger

The oldest way to share a model is **static batching**: take four requests, run them together, and take the next four
when *all* of them are done. In this engine a policy is a function: it sees who runs and who waits, and says how many
tokens each gets in the next step. Static batching is one line: whoever runs goes on; if nobody does, four enter.
"""

# %%
def static_batching(running, waiting, budget, chunk_size):
    return [(request, request.num_left) for request in running or waiting[:4]]


# %% [markdown]
"""
Twelve people ask. Some want a word, some want a page: these are the lengths of the answers, in tokens. The engine has
four **slots**: seats for requests, so at most four run together.
"""

# %%
OUT_LENS = [3, 30, 5, 8, 4, 24, 2, 6, 18, 3, 9, 4]


def serve(policy):
    engine = lab.engine(policy=policy, max_batch_tokens=1024, max_requests=4)
    for n, length in enumerate(OUT_LENS):
        prompt = engine.chat_ids(f"Tell me about the number {n}.")
        engine.add(prompt, SamplingParams(max_tokens=length, ignore_eos=True))
    return lab.finish(engine, tokens=sum(OUT_LENS))


# %%
static = serve(static_batching)
print(f"static batching: {len(static.steps)} steps for {static.output_tokens} tokens")
lab.step_strip(static)

# %% [markdown]
"""
See the tail of each group: one long answer runs alone, and three slots stand empty. **Continuous batching** looks at
the queue in *every* step: a slot that became free takes the next request at once.
"""

# %%
lab.predict("20a", f"Answers of {OUT_LENS} tokens, four slots. Static takes {len(static.steps)} steps. Continuous?", "steps")

# %% [markdown]
"""
## Exercise 20.1 · Count the steps

*Difficulty: easy to medium. Spend up to 10 minutes.*

`out_lens[i]` is the number of tokens that answer `i` needs. Requests enter in this order. A request that runs gets one
token a step (its first step computes the prompt and gives its first token, too). Return the number of steps until all
are done, when each of the `slots` is refilled in the step after it became free.

    slots = 2, out_lens = [5, 1, 1]        step   1 2 3 4 5
                                           slot 0 A A A A A
                                           slot 1 B C · · ·        5 steps
"""

# %%
def continuous_steps(out_lens, slots):
    # BEGIN SOLUTION 20.1
    waiting, running, steps = list(out_lens), [], 0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        running = [left - 1 for left in running if left > 1]
        steps += 1
    return steps
    # END SOLUTION


# %%
continuous_steps = lab.exercise("20.1", continuous_steps)
continuous = serve("whole_prompt")  # decodes go on, and a whole prompt enters as soon as a slot is free

# %%
counted = continuous_steps(list(OUT_LENS), 4)
said = f"Counted: {counted} steps; the engine took {len(continuous.steps)}."
lab.reveal("20a", counted, lab.step_strip(continuous), text=said)

# %% [markdown]
"""
## One long prompt

The prompts were short so far. Now the rush hour of notebook 00: six people read their answers when a document of 571
tokens comes in. The policy `prefill_first` serves a new prompt at once, whole, and alone in its step; vLLM did so for
years. It sounds fair: no newcomer waits.
"""

# %%
lab.predict("20b", "The longest pause of a reader: how many times the median pause?", "times")

# %%
lab.predict("20c", "The mean of all pauses: how many times the median pause?", "times")

# %%
frozen = lab.rush_hour(lab.engine(policy="prefill_first", max_batch_tokens=1024))
usual = median(frozen.tbts)
print(len(frozen.tbts), "pauses between two tokens, in", len(frozen.steps), "steps")

# %%
lab.reveal("20b", max(frozen.tbts) / usual, lab.timeline(frozen))

# %% [markdown]
"""
One row for each request, one mark for each token. Look for the hole: six people, one hole, the same moment.
"""

# %%
lab.reveal("20c", mean(frozen.tbts) / usual, lab.ttft_tbt(frozen))

# %% [markdown]
"""
Each reader got 19 pauses (TBT, time between tokens), and 18 of them should have been fine. The mean spreads the bad one over all of them; in an answer ten
times as long it would hide ten times as well. But people do not feel a mean. They feel the moment at which the text
stops. So engines are judged by the tail:

- **P99**: 99 of 100 pauses are shorter;
- a **stall**: a pause longer than what was promised, the *service level objective* (SLO).

More stalls than six? Then your machine was busy, too.
"""

# %%
slo = 3 * usual
print(f"promise {slo * 1e3:.0f} ms: {frozen.stalls(slo)} stalls among {len(frozen.tbts)} pauses")
lab.stalls(frozen, slo)

# %% [markdown]
"""
## Exercise 20.2 · Who delayed my token?

*Difficulty: medium. Spend up to 15 minutes.*

Take the pause between two tokens of a request apart. `run.requests[request].token_times` says when its tokens came;
gap 0 lies between its first and its second token. The steps of the gap are those that *began* inside it. Each step has
`.start`, `.end` (seconds), `.num_tokens`, and `.chunks`, here as plain tuples, not the objects of 00.1:
`(id, start, length, is_last, is_decode)`.

    token k                                    token k+1
       │◀──────────────── gap ─────────────────▶│
       │  step 9   │      step 10      │ step 11 │

Return `(culprit, parts)`. `parts` is `{id: seconds}`: the time from one step's end to the next one's end (for the first
step: from the gap's beginning; for the last: until the gap's end) belongs to that step, and is shared among its chunks
by their length. So the parts sum to the gap. The culprit is the id with the largest part.

Sharing by length is a convention; it is right where a step's time grows with its tokens.
"""

# %%
def blame(run, request, gap):
    # BEGIN SOLUTION 20.2
    previous, end = run.requests[request].token_times[gap : gap + 2]
    parts = {}
    for step in run.steps:
        if previous <= step.start < end:
            until = min(step.end, end)
            for id, _start, length, _is_last, _is_decode in step.chunks:
                parts[id] = parts.get(id, 0) + (until - previous) * length / step.num_tokens
            previous = until
    return max(parts, key=parts.get), parts
    # END SOLUTION


# %%
blame = lab.exercise("20.2", blame)

# %% [markdown]
"""
Ask it about the longest pause of request 0:
"""

# %%
gaps = frozen.requests[0].tbt
worst = gaps.index(max(gaps))
culprit, parts = blame(frozen, 0, worst)
print(f"request 0 waited {gaps[worst] * 1e3:.0f} ms for its token {worst + 1}; the culprit is request {culprit}")
for id, seconds in sorted(parts.items(), key=lambda part: -part[1]):
    print(f"    request {id}: {seconds * 1e3:6.0f} ms")

# %% [markdown]
"""
The scrubber shows the same run, a step at a time. Step with the arrow keys, or click a long gap in the time line: it
points to the chunk that caused it. It opens where the document (request 6, G in figures) is computed. Today read only
the budget bar and the time line; the arrays are notebook 50, the blocks notebook 60, and "slots" there are places for
tokens, not seats. (It shares a step's time a little differently: an ordinary step of decodes would
have happened anyway; only the rest belongs to the prompt.)
"""

# %%
lab.scrub_at(6, frozen)

# %% [markdown]
"""
## Would riding along help?

Perhaps the fault is that the readers had to sit the step out. `whole_prompt`, which you used above, lets them ride along:
the document is still computed whole, in one step, but everybody who reads has a token in it.
"""

# %%
lab.predict("20d", "With whole_prompt, the longest pause is …", options=["more than half as long", "half as long or less"])

# %%
riding = lab.rush_hour(lab.engine(policy="whole_prompt", max_batch_tokens=1024))
ratio = max(riding.tbts) / max(frozen.tbts)
print(lab.same_answers([frozen, riding]))

# %%
lab.reveal(
    "20d",
    "half as long or less" if ratio <= 0.5 else "more than half as long",
    lab.timeline(riding),
    text=f"Measured: {ratio:.2f} times as long. The step is as long as the document, whoever rides in it.",
)

# %% [markdown]
"""
## Recap

- Static batching waits for the longest answer of a group. Continuous batching refills a slot at once.
- A whole prompt in one step makes that step long, and everybody waits for it, left out or riding along.
- The mean hides it. Look at the longest gap, at P99, or count stalls.

**Three questions**

1. Twelve equal answers, four slots: how many steps does continuous batching save?
2. A reader got 100 pauses of 50 ms and one of 2 s. What is the mean, and what is P99?
3. Why do the parts of a gap have to sum to the gap?

<details><summary>Answers</summary>

**1** None: the four of a group end together. **2** 69 ms and 50 ms: with one bad pause among 101 even P99 looks fine. Count
stalls. **3** Otherwise somebody's time is missing, or counted twice.

</details>

**What breaks next.** The step is too long because the prompt is whole. So cut the prompt. Does the answer survive?
Does the work stay the same? Notebook 30 cuts; notebook 40 writes the scheduler.
"""

# %%
print(lab.score())
