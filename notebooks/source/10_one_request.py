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
| Minutes | 35 |
| Hardware | a CPU is enough |
| Numbers | live: measured on your machine; one figure has curves recorded on an H200 |
"""

# %%
import torch

from minichunk import costmodel, lab

# %% [markdown]
"""
## From a model to an answer

A language model is a function. You feed it tokens, and for each of them it gives a row of **logits**: a number for
every token of the vocabulary. The largest in the *last* row names the next token.
"""

# %%
model, tokenizer = lab.plain_model()
ids = lab.chat_ids("Why does ice float on water?")
logits = model(torch.tensor([ids])).logits
print(f"{len(ids)} tokens in, logits of shape {list(logits.shape)}; next: {tokenizer.decode(logits[0, -1].argmax())!r}")

# %% [markdown]
"""
Append that token, feed everything again, and you get the next one. But each round computes the whole text anew, though
a token only looks back. So a model can hand you its **cache**: for each token and layer two rows of numbers, its *keys*
and *values*, all that later tokens need of it.
"""

# %%
lab.predict("10a", f"A prompt of {len(ids)} tokens, an answer of 24, no cache: how many are computed in all?", "tokens")

# %% [markdown]
"""
## Exercise 10.1 · Feed each token once

*Difficulty: easy to medium. Spend up to 15 minutes.*

`ids` is the prompt, a list of P token ids. Return a list of exactly `n` new ones, also past an end token; each is the
likeliest, as above.

- `result = model(torch.tensor([new]), cache=cache)` feeds the tokens of the list `new`.
- `result.logits` has the shape [1, length of `new`, vocabulary].
- `result.cache` is the cache that now holds these tokens, too; pass it to the next call. In the first call it is
  `None`.

The check compares your tokens with those of transformers' own `generate`, and counts what you feed: the prompt in one
call, then one token a call, the last one not at all: P + n − 1.

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

With the cache a request has two lives. Its first call brings the whole prompt: the **prefill**. Every later one brings
a single token: a **decode**. There are hundreds of these, so most of a user's waiting is calls with a single token.

How much cheaper are they? Now with the engine.
"""

# %%
lab.predict("10b", "A step with 50 tokens: how many times as long as a step with 1 token?", "times")

# %% [markdown]
"""
First the two limits of your machine, its **roof**: how many operations on numbers (FLOP) it does in a second, and how
many bytes it reads from memory. Then steps of 1 to 128 tokens. Together some ten seconds.
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
W = shape.layers * shape.layer_weights  # the 30 layers, without the output matrix
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
In the picture the roof rises with the memory and is flat at the arithmetic. The filled marks count everything that a
step reads, keys and values included; the open ones are your measurements.
"""

# %%
# one request each: (tokens cached before, tokens new)
batches = {"1 token": [(0, 1)], "50 tokens": [(0, 50)], "128 tokens": [(0, 128)]}
measured = {label: live.at(new) for label, [(cached, new)] in batches.items()}
lab.roofline(shape, machine, batches, measured)

# %% [markdown]
"""
Real steps stay below the roof: small operators, attention, Python between them. If your open mark for 1 token lies far
below the filled one, most of your flat part is this fixed cost of a step. Past the **ridge**, where the roof bends,
each token costs its arithmetic.

A GPU computes far faster than it reads, so its ridge lies further right. The data sheet:
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

So a step with a few decodes has room: tokens ride along for nothing, up to the **knee**, where the measured curve
leaves its floor. A mixed batch lives on that. A fixed cost moves the knee to the right of the ridge. On the left an
H200 with a model of Llama-3-8B's shape, recorded; on the right your machine. Move the slider; a band is a fitted knee
with its uncertainty.
"""

# %%
lab.free_lunch(*lab.recorded_lunch(), live)

# %% [markdown]
"""
Beware of the grey curve: the same card, run *eagerly*. The CPU starts a step's many **kernels** (the card's programs)
one by one, and the card waits: flat for another reason. The others are the clean case: a **CUDA graph** starts a whole
step at once.
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

<details><summary>Answers</summary>

**1** At half as many as with 2 bytes. **2** Nothing: W is gone. **3** The decodes.

</details>

**What breaks next.** If tokens ride along for nothing, put many people into one step! Notebook 20 does, and then one
long prompt arrives.
"""

# %%
print(lab.score())
