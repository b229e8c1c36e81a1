# %% [markdown]
"""
# 10 · One request, two characters

*A step reads all the weights whether it carries 1 token or 50.*

You will

- **write** the loop that turns a model into an answer, and feed each token only once;
- **count** what a step computes and what it reads, and explain why one token costs nearly as much as several;
- **measure** the two limits of your machine, and find the place of a batch under them.

| | |
|---|---|
| Prerequisites | notebook 00 |
| Minutes | 25 |
| Hardware | a CPU is enough |
| Numbers | live: measured on your machine while you watch; one figure has curves recorded on an H200 |
"""

# %%
import torch

from minichunk import costmodel, lab

# %% [markdown]
"""
## From a model to an answer

A language model is a function. You feed it tokens, and for each of them it gives a row of **logits**: a number for
every token of the vocabulary. The largest number in the *last* row names the token that follows.
"""

# %%
model, tokenizer = lab.plain_model()
ids = lab.chat_ids("Why does ice float on water?")
logits = model(torch.tensor([ids])).logits
print(f"{len(ids)} tokens in, logits of shape {list(logits.shape)}; next: {tokenizer.decode(logits[0, -1].argmax())!r}")

# %% [markdown]
"""
Append that token, feed everything again, and you get the next one. But each round computes the whole text anew, though
nothing before the last token has changed: a token only looks back. So a model can hand you its **cache**: the keys and
values that it has computed, all that later tokens need of earlier ones.
"""

# %%
lab.predict("10a", f"A prompt of {len(ids)} tokens, an answer of 24, no cache: how many are computed in all?", "tokens")

# %% [markdown]
"""
## Exercise 10.1 · Feed each token once

*Difficulty: easy to medium. Spend up to 15 minutes.*

`ids` is the prompt, a list of P token ids. Return a list of `n` new ones; each is the likeliest, as above.

- `result = model(torch.tensor([new]), cache=cache)` feeds the tokens of the list `new`.
- `result.logits` has the shape [1, length of `new`, vocabulary].
- `result.cache` is the cache that now holds these tokens, too; pass it to the next call. In the first call it is `None`.

The check compares your tokens with those of transformers' own `generate`, and counts what you feed: the prompt once,
then one token a call, and the last new token not at all. That makes P + n − 1.

    call 0   [37 tokens of the prompt]  →  A
    call 1   [A]                        →  B
    call 2   [B]                        →  C        n = 3 tokens, 37 + 3 − 1 fed
"""

# %%
def generate_cached(model, ids, n):
    # BEGIN SOLUTION 10.1
    output, new, cache = [], ids, None
    for _ in range(n):
        result = model(torch.tensor([new]), cache=cache)
        cache = result.cache
        token = int(result.logits[0, -1].argmax())
        output.append(token)
        new = [token]
    return output
    # END SOLUTION


# %%
generate_cached = lab.exercise("10.1", generate_cached)
model, tokenizer = lab.plain_model()  # its counter starts at 0
answer = generate_cached(model, ids, 24)
print(tokenizer.decode(answer))
print(model.tokens_fed, "tokens fed; the tokens of transformers:", answer == lab.transformers_answer(ids, 24))

# %%
computed = sum(len(ids) + i for i in range(24))
lab.reveal("10a", computed, lab.tokens_fed(len(ids), 24), text=f"{computed:,} without, {model.tokens_fed} with.")

# %% [markdown]
"""
## Two characters

The cache gives a request two very different lives. Its first call brings the whole prompt, many tokens at once: the
**prefill**. Every later call brings a single token: the **decode**. Prefill is one call, decode is hundreds, so most of
a user's waiting is calls with a single token in them.

How much cheaper is a call with a single token? Now with the engine and its steps.
"""

# %%
lab.predict("10b", "A step with 50 tokens: how many times as long as a step with 1 token?", "times")

# %% [markdown]
"""
First the two limits of your machine, its **roof**, measured in two seconds: how many operations on numbers (FLOP) it
does in a second, and how many bytes it reads from memory in a second. Then steps of 1 to 128 tokens.
"""

# %%
machine = lab.roof()
print(f"{machine.name}: {machine.peak / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s")
live = lab.measure_lunch(machine)

# %%
one, fifty = (live.times[live.sizes.index(tokens)] for tokens in (1, 50))
lab.reveal("10b", [b / a for a, b in zip(one, fifty)], text="Fifty times the work, but not fifty times the wait.")

# %% [markdown]
"""
## Exercise 10.2 · What a step computes, what it reads

*Difficulty: easy. Spend up to 5 minutes.*

Nearly all of a step is products of two matrices: a row for each of its `N` tokens, times a matrix of weights. Let the
matrices together hold `W` weights of `b` bytes each. Every token meets every weight: a multiplication, and an addition
to a sum. Every weight comes from memory once, and waits in the processor for all `N` tokens.

Return `(flops, nbytes)`. Look at the weights alone; the tokens' own numbers are few.
"""

# %%
def flops_and_bytes(N, W, b):
    # BEGIN SOLUTION 10.2
    flops = 2 * N * W
    nbytes = W * b
    return flops, nbytes
    # END SOLUTION


# %%
flops_and_bytes = lab.exercise("10.2", flops_and_bytes)
shape = lab.model_shape()
W = shape.layers * shape.layer_weights
for N in (1, 50):
    flops, nbytes = flops_and_bytes(N, W, b=4)
    ms = flops / machine.peak * 1e3, nbytes / machine.bandwidth * 1e3
    print(f"{N:>2} tokens: {flops / 1e9:5.2f} GFLOP take {ms[0]:5.1f} ms, {nbytes / 1e6:.0f} MB take {ms[1]:5.1f} ms")

# %% [markdown]
"""
The bytes are the same in both lines: a step reads all the weights whether it carries 1 token or 50. With a single token
the processor does two operations for each weight and then waits for the next one. More tokens give it more to do with a
weight that is there anyway.

Divide one by the other: 2N / b FLOP per byte, the **arithmetic intensity**, and W is gone. It says which limit counts.
In the picture the roof rises with the memory (on the left) and is flat at the arithmetic (on the right). The filled
marks count everything that a step reads, keys and values included; the open ones are your measurements.
"""

# %%
batches = {f"{N} token{'s' * (N > 1)}": [(0, N)] for N in (1, 50, 128)}
measured = {label: live.at(chunks[0][1]) for label, chunks in batches.items()}
lab.roofline(shape, machine, batches, measured)

# %% [markdown]
"""
Real steps stay below the roof: small operators, attention, Python between them. But the shape holds. On the left
another token costs next to nothing; past the **ridge** each one costs its arithmetic.

A GPU computes far faster than it reads, so its ridge lies further to the right. The data sheet:
"""

# %%
h200 = costmodel.gpu_named("h200")
print(f"{h200.name}: {h200.peak / 1e12:.0f} TFLOP/s, {h200.bandwidth / 1e12:.1f} TB/s, in bfloat16: 2 bytes a weight")

# %%
lab.predict("10c", "With how many tokens in a step does its arithmetic take as long as reading the weights?", "tokens")

# %%
def arithmetic_catches_up(N, b=2):
    flops, nbytes = flops_and_bytes(N, W, b)
    return flops / h200.peak >= nbytes / h200.bandwidth


tokens = next(N for N in range(1, 10_000) if arithmetic_catches_up(N))
lab.reveal("10c", tokens, text="On this card a decode alone leaves nearly all of the arithmetic unused.")

# %% [markdown]
"""
## The free lunch

So a step with a few decodes has room: tokens that ride along for nothing, until the **knee**. That is what a mixed
batch lives on. On the left an H200 with a model of Llama-3-8B's shape, recorded; on the right your machine. The same
form, another knee. Move the slider; a band is where a knee was fitted, with the uncertainty of the measurement.
"""

# %%
lab.free_lunch(*lab.recorded_lunch(), live)

# %% [markdown]
"""
Beware of the grey curve. It is the same card, run *eagerly*: the CPU launches a step's many small kernels one by one,
and the card waits. That curve is flat (and bumpy) for another reason; it says nothing about weights. The others were recorded with
a CUDA graph for each size, which launches a whole step at once.
"""

# %% [markdown]
"""
## Recap

- One request, two characters: a prefill of many tokens, bound by arithmetic, and decodes of one token, bound by memory.
- A step reads all the weights whether it carries 1 token or 50. With a cache, each token is fed once.
- FLOP per byte are 2N / b. Up to the ridge, further tokens are nearly free; where it lies depends on the machine.

**Three questions**

1. Quantised weights take 1 byte each. Does the ridge come at more tokens or at fewer, if the arithmetic stays as fast?
2. A model ten times as large: what changes in the intensity of a decode?
3. Which of the two characters gains from a machine with twice the bandwidth?

**What breaks next.** If tokens ride along for nothing, put many people into one step! Notebook 20 does, and then one
long prompt arrives.
"""

# %%
print(lab.score())
