# ruff: noqa: E402
# %% [markdown]
"""
# 50 · Pack it

*A mixed batch is a flat array and a few integer lists; one wrong integer is fluent but wrong.*

You will

- **write** the packer that turns a plan into arrays, and drive a real model with it;
- **compute** attention for decodes and prompt chunks in one call, grouped heads included;
- **find** the wrong integer in a packer whose answers read quite well.

| | |
|---|---|
| Prerequisites | notebook 40; 30 helps |
| Minutes | 65 |
| Hardware | a CPU is enough |
| Numbers | live: computed on your machine while you watch |
"""

# %%
import torch

from minichunk import lab

# %% [markdown]
"""
## From a plan to arrays

The scheduler of notebook 40 says *who* gets *how many* tokens. Here is its plan for A, B and C with a budget of 16:

- A is being answered. It has 8 tokens, 7 of them are computed: a **decode**, 1 new token.
- B's prompt has 21 tokens, 9 of them are computed: a chunk of 12 more.
- C is new. Its prompt has 3 tokens.
"""

# %%
A, B, C = chunks = lab.running_example()
for chunk in chunks:
    print(chunk, "token_ids", chunk.token_ids)

# %% [markdown]
"""
Only attention looks from one token to others. So nobody needs a rectangle with padding behind the short requests: lay
all new tokens one after the other, with lists that say what is whose.

    packed row     0   1  2  3  …  11 12   13 14 15
    request        A   B  B  B  …   B  B    C  C  C
    positions      7   9 10 11  …  19 20    0  1  2
    cu_seqlens_q   0   1                   13         16

How much does that save? Take notebook 40's rush hour on a tiny model: six readers, a document, a budget of 64.
"""

# %%
question = "If each step were a rectangle, as wide as its longest chunk: how many times as many cells as tokens?"
lab.predict("50a", question, "times")

# %% [markdown]
"""
## Exercise 50.1 · The packer

*Difficulty: medium. Spend up to 15 minutes.*

A chunk has `.token_ids` (its new tokens), `.start` (how many tokens of its request are in the cache), `.length`, and
`.is_last` (it reaches the end of its request's tokens; of a decode always true). Return five lists:

- `token_ids`: all new tokens, chunk after chunk;
- `positions`: each token's place in its own request;
- `cu_seqlens_q`: 0, then where the rows of each chunk end ("cu" is for cumulative);
- `seq_lens_k`: how many keys each request has after this step;
- `logits_rows`: the last row of each chunk that `is_last`. Only there a token is sampled.
"""


# %%
def pack_tokens(chunks):
    token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows = [], [], [0], [], []
    # BEGIN SOLUTION 50.1
    for chunk in chunks:
        token_ids += chunk.token_ids
        positions += range(chunk.start, chunk.start + chunk.length)
        cu_seqlens_q.append(len(token_ids))
        seq_lens_k.append(chunk.start + chunk.length)
        if chunk.is_last:
            logits_rows.append(len(token_ids) - 1)
    return token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows
    # END SOLUTION


# %%
pack_tokens = lab.exercise("50.1", pack_tokens)
for budget in (16, 14):
    _, positions, cu_seqlens_q, seq_lens_k, logits_rows = pack_tokens(lab.running_example(budget))
    print(f"budget {budget}: cu_seqlens_q {cu_seqlens_q} seq_lens_k {seq_lens_k} logits_rows {logits_rows}")

# %% [markdown]
"""
With a budget of 14, C gets one token of its three. Its row is computed, but nothing is sampled: its prompt is not over.
Now your packer drives the rush hour.
"""

# %%
rush = lab.rush_hour(lab.engine_packing(pack_tokens, "tiny", max_batch_tokens=64, num_blocks=400))
cells = sum(len(step.chunks) * max(chunk[2] for chunk in step.chunks) for step in rush.steps)
tokens = sum(step.num_tokens for step in rush.steps)
padding = f"{1 - tokens / cells:.0%} of the rectangles' cells would be padding."
lab.reveal("50a", cells / tokens, lab.step_strip(rush), padding)

# %% [markdown]
"""
## Equality first

SmolLM2 computes the 16 rows in one step with your integers, transformers each request alone, without cache. Compare the
log-probabilities of each row:
"""

# %%
errors = lab.row_errors(pack_tokens, chunks)
lab.row_error_bars(chunks, errors)

# %% [markdown]
"""
What is left are rounding errors of float32. So a row is the same row, whoever lies beside it.

## Who sees what

`cu_seqlens_q` and `seq_lens_k` are all that attention needs. B's 12 rows are the *last* 12 of its 21 tokens, so the last
row sees all 21 keys, the one above it 20, and so on: the mask is aligned **bottom-right**.
"""

# %%
question = "B has 12 rows and 21 keys. How many pairs of a row and a key does the causal mask let through?"
lab.predict("50b", question, "pairs")

# %%
pairs = sum(position + 1 for position in range(B.start, B.start + B.length))
lab.reveal("50b", pairs, lab.packed_mask(chunks, pack_tokens(chunks)))

# %% [markdown]
"""
PyTorch's `is_causal=True` aligns the mask **top-left**: row 0 sees key 0 alone. That is right for C, which has no
history:
"""

# %%
lab.packed_mask(chunks, pack_tokens(chunks), align="top-left")

# %% [markdown]
"""
## Exercise 50.2 · Attention over a packed batch

*Difficulty: medium to hard. Spend up to 20 minutes.*

`q` is the packed queries, `[rows, heads, head_size]`. `ks[n]` and `vs[n]` are *all* keys and values of request `n`,
history included: `[keys, kv_heads, head_size]`. `cu_q` is `cu_seqlens_q`. Return a tensor like `q`.

For each request: scores are `q · k / sqrt(head_size)`; a row must not see what comes after it; softmax; the weighted
mean of the values. Heads come in groups: with 6 heads and 3 kv heads, heads 0 and 1 share kv head 0, and so on.
`torch.einsum("ihd,jhd->hij", q, k)` gives the scores of all heads at once; `.tril(diagonal)` cuts a mask.
"""


# %%
def varlen_attention(q, ks, vs, cu_q):
    # BEGIN SOLUTION 50.2
    out = torch.empty_like(q)
    for n, (k, v) in enumerate(zip(ks, vs)):
        mine = q[cu_q[n] : cu_q[n + 1]]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", mine, k) / q.shape[2] ** 0.5
        sees = torch.ones(len(mine), len(k), dtype=torch.bool).tril(len(k) - len(mine))
        scores = scores.masked_fill(~sees, -torch.inf)
        out[cu_q[n] : cu_q[n + 1]] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
    return out
    # END SOLUTION


# %%
varlen_attention = lab.exercise("50.2", varlen_attention)

# %% [markdown]
"""
You have written what `flash_attn_varlen_func` computes, in the flash-attn library, whose kernels most engines call. It
also has `flash_attn_varlen_qkvpacked_func`, which looks handier: q, k and v of the packed rows in one tensor, with one
`cu_seqlens` for all of them. So the only keys it knows are those of the *new* tokens.
"""

# %%
options = ["Zeros", "Its own value vector v", "The mean of its eight v", "An error message"]
lab.predict("50c", "Mixed batch, qkvpacked call: what does A's decode get?", options=options)

# %%
q, new, cu_q = torch.randn(16, 6, 4), [1, 12, 3], [0, 1, 13, 16]
ks, vs = ([torch.randn(keys, 3, 4) for keys in (8, 21, 3)] for _ in range(2))
right = varlen_attention(q, ks, vs, cu_q)
new_ks, new_vs = ([x[-n:] for x, n in zip(xs, new)] for xs in (ks, vs))
packed = varlen_attention(q, new_ks, new_vs, cu_q)
own = torch.allclose(packed[0], vs[0][-1].repeat_interleave(2, dim=0))
errors = (packed - right).abs().amax((1, 2)).tolist()
figure = lab.row_error_bars(chunks, errors, "the right attention")
lab.reveal("50c", options[1] if own else options[2], figure)

# %% [markdown]
"""
The softmax of one number is 1. No error message, no NaN: the decode has forgotten everything but its last token. Only C
is right. That call is made for training, where all keys are new.

## Break one integer

Change one, guess which rows go wrong, press **Run**. Try `seq_lens_k` of A, then `positions`, then `cu_seqlens_q`;
leave the rest for 60.
"""

# %%
w = lab.packer(budget=16, block_size=4)
w

# %% [markdown]
"""
## Fluent but wrong

Back to your packer. In the next run one integer is off: each decode's `seq_lens_k` is one too small.
"""

# %%
options = ["An error message", "Nonsense", "Fluent text, other answers", "The same answers"]
question = "Each decode's seq_lens_k is one too small. What do six readers get from SmolLM2?"
lab.predict("50d", question, options=options)


# %%
def one_short(chunks):
    token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows = pack_tokens(chunks)
    seq_lens_k = [k - c.is_decode for k, c in zip(seq_lens_k, chunks)]
    return token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows


def serve(pack):
    engine = lab.engine_packing(pack, max_batch_tokens=64)
    return lab.rush_hour(engine, documents=0, max_tokens=16)


mine, short = serve(pack_tokens), serve(one_short)
same = "yes" in lab.same_answers([mine, short])
lab.reveal("50d", options[3] if same else options[2], text=lab.compare_answers(short, mine))

# %% [markdown]
"""
Nothing crashes, nothing looks broken. That is why this course compares tokens, not impressions.

## Exercise 50.3 · Which bug?

*Difficulty: medium. Spend up to 5 minutes.*

A classmate's packer serves the same six questions. Which answers are other ones, and how did *their* prompts run? Look
at who was cut into chunks in the first steps. (The columns show the plan, not what this packer sent.)
"""

# %%
theirs = serve(lab.broken("50.3"))
print(lab.compare_answers(theirs, mine))
lab.scrub(theirs)

# %%
lab.which_bug("50.3")

# %% [markdown]
"""
## Recap

- New tokens lie flat, one after the other. Five lists say whose they are, where they stand, and which rows count.
- Queries are cut by `cu_seqlens_q`, keys are not: they include the history, and the mask is bottom-right.
- A wrong integer raises no error. Compare with an independent answer, row by row.

**Three questions**

1. C comes first in the batch: what are `cu_seqlens_q` and `logits_rows` now?
2. A prompt of 21 tokens runs in chunks of 9 and 12. Why are the 9 keys not recomputed?
3. Why may two rows of one batch have the same position?

<details><summary>Answers</summary>

**1** [0, 3, 4, 16] and [2, 3, 15]. **2** They are in the cache, and no later token changes them. **3** Each is a place
in its own request.

</details>

**What breaks next.** Here each request's keys lay in a tensor of their own. Real memory is one array, and nobody knows
how long an answer will be: notebook 60.
"""

# %%
print(lab.score())
