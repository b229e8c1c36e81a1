# ruff: noqa: E402
# %% [markdown]
"""
# 40 · The mixed batch

*Decodes first, prompts fill the rest: my ten lines bound everyone's TBT (time between tokens).*

You will

- **write** the scheduler of a modern inference engine, and drive a real model with it;
- **compare** it with two older ones, in the same rush hour, token for token;
- **choose** the largest budget that keeps a promise on your machine, and say what it costs.

| | |
|---|---|
| Prerequisites | notebooks 00 and 20; 30 helps |
| Minutes | 50 |
| Hardware | a CPU is enough |
| Numbers | live: measured on your machine while you watch |
"""

# %%
from minichunk import lab
from minichunk.scheduler import POLICIES, RequestView

# %% [markdown]
"""
## The rule

There is no prefill phase and no decode phase. Each request has tokens; some of them are computed, and a step computes
some more. With a **budget** of tokens a step:

1. every decode gets its one token;
2. prompts that have been begun go on, in arrival order;
3. waiting prompts begin, in arrival order; the one that does not fit is *cut*.

Take a budget of 16. A is being answered (a decode). B has a prompt of 21 tokens, 9 of them computed. C is new, with a
prompt of 3.

    budget 16   A B B B B B B B B B B B B C C C
                1 12                      3          with a budget of 14, C would get 1 token now and 2 in the next step
"""

# %%
A = RequestView("A", num_tokens=8, num_computed=7, num_prompt_tokens=6, arrival=0.0)
B = RequestView("B", num_tokens=21, num_computed=9, num_prompt_tokens=21, arrival=1.0)
C = RequestView("C", num_tokens=3, num_computed=0, num_prompt_tokens=3, arrival=2.0)
for request in (A, B, C):
    print(request.id, "has", request.num_left, "left:", "a decode" if request.is_decode else "a prompt")

# %%
lab.predict("40a", "Budget 64. Six people read, and a document of 571 tokens arrives. How many steps hold a chunk of it?", "steps")

# %% [markdown]
"""
## Exercise 40.1 · The scheduler

*Difficulty: medium. Spend up to 20 minutes. This is the heart of the course.*

Before each step the engine calls `plan_step(running, waiting, budget, chunk_size)`.

- `running` and `waiting` are lists of requests, each in arrival order. You may only look at them: `.id`,
  `.num_tokens`, `.num_computed`, `.num_prompt_tokens`, `.arrival`, and from these `.num_left` (tokens it still has to
  compute) and `.is_decode`. A request that was thrown out of memory starts again at 0; then its answer tokens are left
  to compute, too. `.num_left` counts them.
- `budget` is the most tokens that the step may hold, everybody together. It is never smaller than the number of
  running requests.
- `chunk_size` is the most that a single request may get.

Return a list of `(request, length)` pairs that keeps the rule above: within the budget, every decode in, arrival order
among prompts, and nothing of the budget left while a prompt could use it.
"""

# %%
def plan_step(running, waiting, budget, chunk_size):
    # BEGIN SOLUTION 40.1
    decodes = [request for request in running if request.is_decode]
    unfinished = [request for request in running if not request.is_decode]
    plan = []
    for request in decodes + unfinished + list(waiting):
        length = min(request.num_left, chunk_size, budget)
        if length == 0:
            break
        plan.append((request, length))
        budget -= length
    return plan
    # END SOLUTION


# %%
plan_step = lab.exercise("40.1", plan_step)
for budget in (16, 14, 8):
    for name, plan in {"yours": plan_step, "the engine's": POLICIES["mixed"].plan_step}.items():
        pairs = plan([A, B], [C], budget, budget)
        print(f"budget {budget:>2}, {name:<12}", [(request.id, length) for request, length in pairs])

# %% [markdown]
"""
The engine's own policy `mixed` plans the same. Now let your function drive a real model. The engine checks each plan
before it runs it, and says in words what it refuses.
"""

# %%
mine = lab.rush_hour(lab.engine(policy=plan_step, max_batch_tokens=64))
print(f"{len(mine.steps)} steps for {mine.output_tokens} tokens")

# %%
steps_of_document = sum(any(chunk[0] == 6 and not chunk[4] for chunk in step.chunks) for step in mine.steps)
lab.reveal("40a", steps_of_document, lab.step_strip(mine), text="Each of these steps carries the readers' decodes, too.")

# %% [markdown]
"""
Step through it with the arrow keys. Watch the budget bar: it is full as long as the document (G) has tokens left, and
no reader ever misses a step.
"""

# %%
lab.scrub_at(6, mine)  # request 6 is G

# %% [markdown]
"""
## Three schedulers, one rush hour

| policy | a step holds | a prompt is |
|---|---|---|
| `prefill_first` | prompts alone, else decodes | whole |
| `whole_prompt` | decodes, then whole prompts | whole |
| `mixed`, yours | decodes, then prompts | cut to fit |

The last one is what Sarathi-Serve proposed and what vLLM's V1 engine does by default. You have just written it.
"""

# %%
lab.predict("40b", "The longest pause of a reader: how many times as long under prefill_first as under yours?", "times")

# %%
lab.predict("40c", "The document's TTFT (time to first token): how many times as long under yours as under prefill_first?", "times")

# %%
frozen = lab.rush_hour(lab.engine(policy="prefill_first", max_batch_tokens=1024))
whole = lab.rush_hour(lab.engine(policy="whole_prompt", max_batch_tokens=1024))
print(lab.same_answers([mine, frozen, whole]))

# %%
lab.reveal("40b", max(frozen.tbts) / max(mine.tbts), lab.stalls(frozen))

# %%
lab.reveal("40c", mine.requests[6].ttft / frozen.requests[6].ttft, lab.ttft_tbt([mine, frozen]))

# %%
for name, run in {"yours": mine, "prefill_first": frozen, "whole_prompt": whole}.items():
    print(f"{name:>14}: longest pause {max(run.tbts):.2f} s, the document's TTFT {run.requests[6].ttft:.2f} s")

# %% [markdown]
"""
The readers' pause is bounded by the budget, whatever arrives: that is what your lines bought. The document pays: ten
steps instead of one, shared with the readers, and each reads all the weights again. (The other way round here? Your
machine was busy: measure again.) Whoever says that chunked prefill makes everything faster saw only the readers.

Both, side by side:
"""

# %%
lab.scrub_at(6, mine, frozen)

# %% [markdown]
"""
## How large may the budget be?

You promise your readers a longest pause. A small budget keeps the promise with ease, but makes documents slow. So take
the *largest* that keeps it. Measure how long a step takes on this machine, by tokens in it: the median (P50), and the
time that 95 of 100 steps stay below (P95).
"""

# %%
sweep = lab.step_sweep()
for tokens, p50, p95 in sweep:
    print(f"{tokens:>4} tokens: P50 {p50:6.0f} ms, P95 {p95:6.0f} ms")

# %% [markdown]
"""
## Exercise 40.2 · The largest budget

*Difficulty: easy. Spend up to 10 minutes.*

`sweep` is such a list of `(tokens, p50_ms, p95_ms)`. `slo_ms` is the promise. In every step `decodes` readers take a
token each, and a prompt of `prompt` tokens gets the rest. Return `(budget, steps)`: the largest measured size whose P95
keeps the promise and that has room for a prompt beside the decodes, and the number of steps that the prompt then takes.
Return `None` if there is no such size.
"""

# %%
import math


def budget_for(sweep, slo_ms, decodes, prompt):
    # BEGIN SOLUTION 40.2
    feasible = [tokens for tokens, p50, p95 in sweep if p95 <= slo_ms and tokens > decodes]
    if not feasible:
        return None
    budget = max(feasible)
    return budget, math.ceil(prompt / (budget - decodes))
    # END SOLUTION


# %%
budget_for = lab.exercise("40.2", budget_for)
promise = 1.3 * sweep[3][2]  # one that this machine can keep
budget, steps = budget_for(sweep, promise, decodes=6, prompt=571)
print(f"to keep {promise:.0f} ms: budget {budget}, and the document takes {steps} steps")

# %%
lab.predict("40d", "With this budget and your scheduler: of 100 pauses, how many keep the promise?", "of 100")

# %%
kept = lab.rush_hour(lab.engine(policy=plan_step, max_batch_tokens=budget))
share = 100 * (1 - kept.stalls(promise / 1e3) / len(kept.tbts))
lab.reveal("40d", max(share, 1), lab.stalls(kept, promise / 1e3))

# %% [markdown]
"""
If it was not 100, find out why. The sweep measured prompt chunks alone, without history; readers bring a history to
read, a step also plans and samples, and your machine may have been busy. A budget promises for *typical* steps: measure
again under load.

## Exercise 40.3 · Which bug?

*Difficulty: medium. Spend up to 5 minutes.*

A classmate's scheduler runs below, with a budget of 64. All answers are right, and every reader has a token in every
step. Yet the check refuses it. Look at the budget in the steps with a chunk of the document (G), and count.
"""

# %%
theirs = lab.rush_hour(lab.engine(policy=lab.broken("40.3"), max_batch_tokens=64))
print(lab.same_answers([mine, theirs]), "·", len(theirs.steps), "steps against", len(mine.steps))
lab.scrub_at(6, theirs)

# %%
lab.which_bug("40.3")

# %% [markdown]
"""
## Recap

- Decodes first, prompts fill the rest, and the one that does not fit is cut. That is the whole scheduler.
- The budget bounds the step, so it bounds everyone's TBT, whatever arrives.
- The chunked request pays with its own TTFT: more steps, and each reads the weights again.
- The largest budget that keeps the promise is the right one, and only a measurement finds it.

**Three questions**

1. Why must the budget never be smaller than the number of running requests?
2. A hundred readers, budget 128: how many steps does a document of 571 tokens take?
3. What happens to your rule when a request is thrown out of memory and has to be computed again?

<details><summary>Answers</summary>

**1** All may be decodes, and each needs its token in every step. **2** 28 tokens a step are left for it: 21 steps.
**3** Nothing: it is a prompt again, and `.num_left` counts its answer tokens, too.

</details>

**What breaks next.** A plan is a list of pairs, but a GPU wants arrays. In notebook 50 you pack the batch, and one
wrong integer gives text that is fluent and wrong.
"""

# %%
print(lab.score())
