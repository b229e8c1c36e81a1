# %% [markdown]
"""
# 30 · Split the prompt

*The pieces add up to exactly the same work, yet the last costs more than the first.*

You will

- **write** the mask that lets a chunk of a prompt see its history, and drive a real model with it;
- **count** the work of every chunk, and show that cutting adds no arithmetic;
- **measure** what cutting does cost, and find the chunk size at which it hurts.

| | |
|---|---|
| Prerequisites | notebooks 00, 10 and 20 |
| Minutes | 40 |
| Hardware | a CPU is enough |
| Numbers | live: measured on your machine |
"""

# %%
import torch

from minichunk import costmodel, lab

# %% [markdown]
"""
## Why cut at all

One long prompt in one long step freezes everybody who reads: that was notebook 20. If the prompt could be computed in
pieces, the others could go on between them. Can it? In a causal model a token looks back only:

    token 0   ■ · · · · ·        ■ a pair that is computed: the row's token sees the column's token
    token 1   ■ ■ · · · ·
    token 2   ■ ■ ■ · · ·        So tokens 0…2 can be computed first, their keys and values put aside,
    ─────────────────────        and tokens 3…5 later. Nothing before the line needs anything after it.
    token 3   ■ ■ ■ ■ · ·
    token 4   ■ ■ ■ ■ ■ ·
    token 5   ■ ■ ■ ■ ■ ■

Cut like this, each **chunk** is a band of the triangle. The number of ■ is the work of attention.
"""

# %%
lab.predict("30a", "512 tokens in chunks of 64. The last chunk has how many times the ■ of the first?", "times")

# %% [markdown]
"""
## Exercise 30.1 · The mask of a chunk

*Difficulty: easy. Spend up to 10 minutes.*

A chunk brings `length` new tokens after `start` that are cached. Return its mask: an array of True and False with a row
for each new token and a column for each token so far, the cached ones first, so [length, start + length]. True where
the row's token may see the column's. For `start` 3 and `length` 3, the band below the line:

    ■ ■ ■ ■ · ·
    ■ ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■ ■

`torch.arange(a, b)` counts from a to b − 1, and `[:, None]` turns it into a column.
"""

# %%
def chunk_mask(start, length):
    # BEGIN SOLUTION 30.1
    rows = torch.arange(start, start + length)[:, None]
    return torch.arange(start + length) <= rows
    # END SOLUTION


# %%
chunk_mask = lab.exercise("30.1", chunk_mask)
QUESTION = "Why does ice float on water?"
whole = lab.answer_in_chunks(chunk_mask, QUESTION, chunk=1000)  # more than the prompt has: a single chunk
pieces = lab.answer_in_chunks(chunk_mask, QUESTION, chunk=16)
print(lab.decode(pieces))
print("the same tokens as in one piece:", pieces == whole)

# %% [markdown]
"""
The triangle sits in the **bottom-right** corner of your mask: the last row sees the last column. Some code puts it into
the top-left corner instead; PyTorch's own `is_causal=True` does. For a whole prompt, a square, the two are the same.
For a chunk with a history they are not: its first token would see the first key alone.

    bottom-right   ■ ■ ■ ■ · ·        top-left   ■ · · · · ·
                   ■ ■ ■ ■ ■ ·                   ■ ■ · · · ·
                   ■ ■ ■ ■ ■ ■                   ■ ■ ■ · · ·
"""

# %%
lab.predict(
    "30b",
    "The same question in chunks of 16, with the top-left mask. What happens?",
    options=["The same answer", "Another answer, and no error", "An error"],
)

# %%
def top_left(start, length):
    return torch.ones(length, start + length, dtype=torch.bool).tril()


wrong = lab.answer_in_chunks(top_left, QUESTION, chunk=16)

# %%
said = "The same answer" if wrong == whole else "Another answer, and no error"
lab.reveal("30b", said, text=f"It wrote: {lab.decode(wrong)}")

# %% [markdown]
"""
## Exercise 30.2 · Count the pairs

*Difficulty: easy. Spend up to 10 minutes.*

Return a list with the number of ■ of every chunk, when a prompt of `prompt` tokens is cut into chunks of `chunk`; the
last one may be shorter. Each token of a chunk sees all tokens before the chunk, and inside a triangle. Prompt 7, chunk
3: the chunks start at 0, 3 and 6, so [6, 15, 7].
"""

# %%
def chunk_pairs(prompt, chunk):
    # BEGIN SOLUTION 30.2
    pairs = []
    for start in range(0, prompt, chunk):
        length = min(chunk, prompt - start)
        pairs.append(length * start + length * (length + 1) // 2)
    return pairs
    # END SOLUTION


# %%
chunk_pairs = lab.exercise("30.2", chunk_pairs)
for chunk in (512, 64, 50, 1):
    pairs = chunk_pairs(512, chunk)
    print(f"chunks of {chunk:>3}: there are {len(pairs):>3}, with {sum(pairs):,} pairs in all")

# %%
pairs, shape = chunk_pairs(512, 64), lab.model_shape()
lab.reveal("30a", pairs[-1] / pairs[0], lab.chunk_plan(512, 64, shape))

# %% [markdown]
"""
Look at the middle plot above. Attention grows from chunk to chunk, but here most of the work is in the **linear
layers** (the products with weights of notebook 10), which treat every token alike. So the last chunk costs more, but
not as much more as the pairs alone would say. In the right plot: pairs and FLOPs of all chunks are exactly those of the
whole. Count it for all operators:
"""

# %%
once = costmodel.flops(shape, [(0, 512)])["total"]
for chunk in (256, 64, 16):
    cut = sum(costmodel.flops(shape, [part])["total"] for part in costmodel.split(512, chunk))
    print(f"chunks of {chunk:>3}: {cut:,} FLOP, the whole: {once:,}, equal: {cut == once}")

# %% [markdown]
"""
## What is not the same

Each chunk also reads

- the keys and values of its whole history again: *keys read* in the picture;
- all the weights, as every step does: *weights read*;

and each is one more **launch**, a step with its own planning, packing and calls.
"""

# %%
lab.predict("30c", "Chunks of 64, measured: the step of the last chunk takes how many times as long as the first?", "times")

# %%
lab.predict("30d", "Chunks of 16 instead of all 512 tokens at once: the total time, how many times as long?", "times")

# %%
machine = lab.roof()
times = lab.split_times([16, 64, 128, 512], prompt=512)

# %%
lab.reveal("30c", [steps[-1] / steps[0] for steps in times[64]], text="Most of a chunk is linear layers, equal for all.")

# %%
total = {chunk: [sum(steps) for steps in repeats] for chunk, repeats in times.items()}
ratios, figure = [a / b for a, b in zip(total[16], total[512])], lab.chunk_time(times, 512, shape, machine)
lab.reveal("30d", ratios, figure, text="On a busy machine two neighbouring sizes may swap places: compare the ends.")

# %% [markdown]
"""
The dotted line is the arithmetic, the same for all. The dashed one is reading the weights, once a launch: it doubles
whenever the chunk is halved. While it lies well below the other, cutting is nearly free, because the processor
computes for longer than it reads. Small chunks pay: below the **knee** of notebook 10 a
step hardly gets shorter with fewer tokens, and each launch adds its fixed part.

In a long prompt the history weighs more: the last chunk has 1.59 times the first one's FLOPs, 1.15 here. Cut these 512
tokens with the slider, then 16,384 for a model of 8 billion parameters (the second line), and compare the middle.
"""

# %%
lab.split_prompt(512, 64, shape)  # the linear part of the last chunk holds the logits, too
# lab.split_prompt(16384, 512, shape="llama-3-8b")

# %% [markdown]
"""
## The same answer?

The pieces compute the same sums, but not always in the same order: a matrix product over 16 rows may add up in another
order than one over 512. In float32 the difference is in the last digits, and the likeliest token stays the likeliest.
In bfloat16, with two to three digits, a close race between two tokens can end the other way. Six questions under two
budgets:
"""

# %%
for dtype in ("float32", "bfloat16"):
    print(lab.flips(dtype))

# %% [markdown]
"""
Where an answer parts, everything after it differs, since the next token continues another text. Neither is
wrong: both are roundings of the same sums. So a promise "chunking never changes the output" holds for the mathematics,
was seen in float32, and must not be made for bfloat16. How many part depends on the machine.
"""

# %% [markdown]
"""
## Recap

- A causal prompt can be cut anywhere. A chunk's mask is a band of the triangle, aligned bottom-right.
- The pieces add up to exactly the same arithmetic, yet the last costs more than the first: it has more history.
- What cutting adds is reading: the history again, the weights once a launch. Below the knee, these and the fixed part
  of each launch are most of the time.

**Three questions**

1. A prompt of P tokens in chunks of one token: how many pairs, and how often are the weights read?
2. Why is the top-left mask never noticed in tests whose prompts fit into one chunk?
3. Which part of a chunk's cost depends on where in the prompt it lies, and which does not?

<details><summary>Answers</summary>

**1** P(P + 1)/2; P times. **2** With start 0 the two masks are equal. **3** Attention does; linear layers, weights
and the fixed part do not.

</details>

**What breaks next.** Between two chunks there is time for others, and inside a step there is room. Notebook 40 puts
chunks and decodes into one step: the mixed batch.
"""

# %%
print(lab.score())
