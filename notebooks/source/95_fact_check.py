# ruff: noqa: E402
# %% [markdown]
"""
# 95 · Fact check

*Which claims survive?*

This course began with a public article about running prompts and decodes in one batch. It makes 66 claims that can be told
apart. You will

- **name** what you believe of twelve of them, before you see anything;
- **compute** three of the numbers yourself, and run code for the others;
- **compare** your votes with what a cost model, a simulator and an attention of ten lines say.

| | |
|---|---|
| Prerequisites | notebooks 40 and 50; 60 helps |
| Minutes | 45 |
| Hardware | a CPU is enough |
| Numbers | live arithmetic and runs on your machine; capacities are simulated, what papers printed is typed in |
"""

# %% [markdown]
"""
## Vote first

Each claim is in our words. Vote on all twelve, then go on: a claim's evidence shows when its vote is locked. A guess is
fine, and it is the only way to find out what you would have believed. They were picked because each can be worked out in
a few minutes; their verdicts are mixed about as in all 66.

- *Holds under conditions*: true, and the missing condition is one that you can name.
- *Cannot be told*: a number whose model, load or comparison is missing, so that it could be anything.
"""

# %%
from minichunk import claims, lab

lab.vote()

# %% [markdown]
r"""
## Counting

The article's batch has two prompt chunks of 512 tokens and 30 decodes. It is judged by a "compute density": with $P$ the
sum of the chunks' squared lengths and $D$ the sum of the decodes' cached lengths, $(P + D) / \max(P, D)$.

## Exercise 95.1 · Count the batch

*Difficulty: easy. Spend up to 10 minutes.*

`chunks` holds the lengths of the prompt chunks, `cached` the number of cached tokens of each decode. Return
`(tokens, ratio)`: how many tokens the step computes, and the ratio above. An empty batch has no ratio: `(0, None)`.

    chunks [512, 512]    cached [1024, 1024, … 30 of them]
           |__ P = 2 × 512²         |__ D = 30 × 1024
"""


# %%
def count_batch(chunks, cached):
    # BEGIN SOLUTION 95.1
    tokens = sum(chunks) + len(cached)
    prompts = sum(length**2 for length in chunks)
    decodes = sum(cached)
    if tokens == 0:
        return 0, None
    return tokens, (prompts + decodes) / max(prompts, decodes)
    # END SOLUTION


# %%
count_batch = lab.exercise("95.1", count_batch)
for chunks, cached in [([512, 512], [1024] * 30), ([512, 512], []), ([], [1024] * 30)]:
    tokens, ratio = count_batch(chunks, cached)
    print(f"{len(chunks)} chunks, {len(cached)} decodes: {tokens} tokens, ratio {ratio:.4f}")

# %%
lab.verdict(22)

# %% [markdown]
"""
Prompts alone and decodes alone have the same ratio. Is the ratio any good, then? The true balance is compute time over
memory time, from FLOPs and bytes, on an A100 that does its best (at its *roof*). Draw both for 500 random batches.
"""

# %%
lab.verdict(24)

# %% [markdown]
"""
## One call for the batch

The running example: A decodes at length 8, B brings 12 tokens after 9, C is a new prompt of 3. The article hands such a
batch to a function that takes Q, K and V packed, with *one* list of offsets, and no cache.
"""

# %%
lab.predict("95a", "Of the 16 packed rows, how many come out wrong?", "rows")

# %%
rows = claims.qkvpacked_rows()
wrong = [name for name, error, _, _ in rows if error > 1e-6]
print("own value row instead of attention:", [name for name, error, _, own in rows if own and error > 1e-6])
lab.reveal("95a", len(wrong), text="Every row with a history. C's are right: a new prompt has none.")

# %%
lab.verdict(32)

# %% [markdown]
"""
## Memory

Keys and values lie in blocks. The last block of a request is rarely full; that is all that is lost.

## Exercise 95.2 · What is lost

*Difficulty: easy. Spend up to 5 minutes.*

`lengths` are the tokens that each request holds (one at least). Each takes whole blocks of `block_size`. Return the share
of all taken slots, from 0 to 1, that holds no token.
"""


# %%
def fragmentation(lengths, block_size):
    # BEGIN SOLUTION 95.2
    held = sum(-(-length // block_size) * block_size for length in lengths)
    return 1 - sum(lengths) / held
    # END SOLUTION


# %%
fragmentation = lab.exercise("95.2", fragmentation)
question = "50 people chat, some thousand tokens each (ShareGPT). Blocks of 256: what percent of the slots is empty?"
lab.predict("95b", question, "%")

# %%
people = claims.drawn("sharegpt-8k", 50)
lengths = [person.prompt_tokens + person.output_tokens // 2 for person in people]
for size in (16, 64, 256):
    print(f"blocks of {size:>3}: {fragmentation(lengths, size):.2%}")
lab.reveal("95b", 100 * fragmentation(lengths, 256))

# %%
lab.verdict(48)

# %% [markdown]
"""
## Exercise 95.3 · Who meets whom

*Difficulty: easy. Spend up to 5 minutes.*

A step writes its tokens' keys and values to `slots`, a list of numbers in packed order. Atomic operations would be needed
where two tokens meet. Return the slots that occur more than once, sorted, each once.
"""


# %%
def written_twice(slots):
    # BEGIN SOLUTION 95.3
    seen, twice = set(), set()
    for slot in slots:
        (twice if slot in seen else seen).add(slot)
    return sorted(twice)
    # END SOLUTION


# %%
lab.verdict(46)

# %%
written_twice = lab.exercise("95.3", written_twice)
batch, slots = claims.mixed_slots()
print(batch.num_seqs, "requests,", batch.num_tokens, "tokens; written twice:", written_twice(slots.tolist()))
lab.verdict(47)

# %% [markdown]
"""
## Bounds

Two claims in which a number stands for a machine. Before each, ask: at most how much *could* it be? Peak FLOP/s,
bandwidth and memory of the GPU give a bound, and a claim above its bound is finished.
"""

# %%
lab.verdict(34)

# %%
lab.verdict(61)

# %% [markdown]
"""
## Conditions

Two claims that every text about this repeats. For which batch, for which prompt do they hold?
"""

# %%
lab.verdict(5)

# %%
lab.verdict(15)

# %% [markdown]
"""
## Serving

What is chunked prefill worth? It does not do less work: all prompts must be computed, all tokens generated. So ask for
three numbers. How long do readers stand still? With everything there at once, how many tokens a second? And with a
promise, how many requests a second?
"""

# %%
lab.verdict(16)

# %%
lab.predict(
    "95c", "P99 TBT ≤ 100 ms: how many times the requests of a prompts-first server does a mixed one carry?", "times"
)

# %%
lab.reveal("95c", claims.find(11)["expect"]["gain_100_ms"], text="Simulated: Mistral-7B on one A100.")

# %%
lab.verdict(11)

# %% [markdown]
"""
## Recap

- A quarter of the 66 are wrong, a fifth cannot be told. Most of the rest is true *of something*, and nobody says of what:
  which model, which GPU, which load, which latency, compared with what.
- A bound takes a line. Peak divided by FLOPs, bandwidth by bytes, memory by bytes a token.
- A ratio without bytes in it cannot speak about memory, whatever its name.
- Chunked prefill buys capacity at a promise, hardly any raw throughput.

The other 54 claims fold out below, with reasons and sources. The same table is in `docs/fact-check.md`, and each number
in it is computed again by a test.

**Three questions**

1. A post says "40% faster". Which five things do you ask for?
2. Which of your votes went wrong because the *number* was off, which because the number had no owner?
3. A GPU is "92% busy". What do you know about its FLOP/s?

<details><summary>Answers</summary>

**1** Which model, on which GPU, under which load, which figure (and which percentile), compared with what. **2** Only you
know. **3** Nothing: some kernel ran in 92% of the moments at which somebody looked. See claim 63.

</details>

**What breaks next.** Your own numbers. Measure a step on your machine, fit the cost model to it, and see which verdicts
move.
"""

# %%
print(lab.score())
lab.other_claims()
