# ruff: noqa: E402
# %% [markdown]
"""
# 60 · Blocks

*Contiguous in the table, scattered in memory: shuffle the blocks, same output.*

You will

- **write** the block table: where a token's keys lie, how a table grows, how blocks come home;
- **drive** the real engine with it, through a pool so small that requests are thrown out;
- **measure** what reserving memory wastes on real request lengths, and check a published number.

| | |
|---|---|
| Prerequisites | notebooks 40 and 50 |
| Minutes | 55 |
| Hardware | a CPU is enough |
| Numbers | live: computed on your machine while you watch |
"""

# %%
from numpy import percentile

from minichunk import lab
from minichunk.blocks import OutOfBlocks
from minichunk.packing import PackedBatch

# %% [markdown]
"""
## Memory in blocks

Keys and values of all requests lie in one big array. Nobody knows how long an answer will be: reserve too little and it
does not fit, too much and memory stands empty. So the array is cut into **blocks** of a few slots, a slot a token, and
a request takes blocks as it grows, any that are free. Its **table** lists them in order.

    B's table          7      0      3       9        1        4        blocks of 4 slots
    its positions    0…3    4…7   8…11   12…15    16…19       20
    position 13:  13 // 4 = 3 → block 9,   13 % 4 = 1 → slot 9 · 4 + 1 = 37

## Exercise 60.1 · Slots

*Difficulty: easy. Spend up to 10 minutes.*

A chunk of `length` tokens begins at position `start`. Return the slot of each of its tokens, as a list. The chunk may
begin inside a block.
"""


# %%
def slots(block_ids, start, length, block_size):
    # BEGIN SOLUTION 60.1
    positions = range(start, start + length)
    return [block_ids[p // block_size] * block_size + p % block_size for p in positions]
    # END SOLUTION


# %%
slots = lab.exercise("60.1", slots)
print("B's chunk goes to the slots", slots([7, 0, 3, 9, 1, 4], 9, 12, 4))

# %% [markdown]
"""
An attention kernel gets these integers. flash-attn's takes a table per request; that of FlashInfer, another library, one
flat list of all blocks, `kv_indptr` to cut it, and how full each last one is. (Both say *page*.) The running example:
"""

# %%
batch = PackedBatch.build(lab.running_example(), [[5, 2], [7, 0, 3, 9, 1, 4], [6]], block_size=4)
print("slot_mapping     ", batch.slot_mapping.tolist())
print("kv_indptr        ", batch.kv_indptr.tolist(), " kv_indices", batch.kv_indices.tolist())
print("kv_last_page_len ", batch.kv_last_page_len.tolist())

# %% [markdown]
"""
## Exercise 60.2 · Grow

*Difficulty: medium. Spend up to 10 minutes.*

`n` is how many tokens the table must hold afterwards, in total. Append just as many blocks to `table.block_ids` as are
missing. `pool.block_size` and `pool.num_free` are numbers; `pool.take()` gives you a free block. All or nothing: if the
free blocks do not suffice, `raise OutOfBlocks(…)` *before* you take any. The scheduler then makes room.
"""


# %%
def grow(table, pool, n):  # n: tokens in total, those that the table has included
    # BEGIN SOLUTION 60.2
    wanted = -(-n // pool.block_size) - len(table.block_ids)
    if wanted > pool.num_free:
        raise OutOfBlocks(f"{wanted} blocks wanted, {pool.num_free} free")
    for _ in range(wanted):
        table.block_ids.append(pool.take())
    # END SOLUTION


# %%
grow = lab.exercise("60.2", grow)

# %% [markdown]
"""
## Exercise 60.3 · Release

*Difficulty: easy to medium. Spend up to 10 minutes.*

A request is done, or thrown out. A block may be in *several* tables (you will see why below): `pool.ref_counts[block]`
counts them. Count down, `pool.give_back(block)` where nobody is left, and empty the table.
"""


# %%
def release(table, pool):
    # BEGIN SOLUTION 60.3
    for block in reversed(table.block_ids):
        pool.ref_counts[block] -= 1
        if pool.ref_counts[block] == 0:
            pool.give_back(block)
    table.block_ids.clear()
    # END SOLUTION


# %%
release = lab.exercise("60.3", release)

# %% [markdown]
"""
## Shuffle the memory

Your three functions now carry SmolLM2: three questions, 16 blocks of 16 slots. Once the pool hands out its blocks in
order, and once in random order.
"""

# %%
options = ["No token", "A few tokens", "Most tokens"]
question = "The blocks are handed out in random order. Which tokens of the answers change?"
lab.predict("60a", question, options=options)

# %%
tidy = lab.ask(lab.engine_on(lab.your_pool(grow, release, 16), slots))
shuffled = lab.ask(lab.engine_on(lab.your_pool(grow, release, 16, shuffle=7), slots))
said = lab.same_answers([tidy, shuffled])
lab.reveal("60a", options[0] if "yes" in said else options[1], lab.block_map(shuffled, 12), text=said)

# %% [markdown]
"""
In the tables each request is in one piece. In memory it lies anywhere.

## Two tables, one block

The scrubber also plays a list of operations; edit it and run the cell again. Click a token and follow it: position,
block, slot. With `("share", "A", "B")`, B comes in with a prompt that begins with all of A's tokens and has one more.
"""

# %%
operations = [("grow", "A", 10), ("share", "A", "B"), ("grow", "A", 3), ("grow", "B", 3)]
operations += [("free", "A"), ("grow", "C", 9)]
lab.explore_blocks(operations, num_blocks=12, block_size=4)

# %% [markdown]
"""
B shares A's two *full* blocks. The third, half full, it does not: B computes those tokens again, into a block of its
own. So nobody ever writes into a shared block, and no **copy-on-write** is needed. Two rules see to it: only whole
blocks are shared, and a hit stops at `num_tokens − 1`: the last token must be computed to get logits.

## A pool that is too small

The same three questions (37 tokens each, answers of 24) need 12 blocks in the end. Give them 10. When a table cannot
grow, the scheduler **preempts** the newest request: it gives up all its blocks, waits, and computes its tokens again.
"""

# %%
lab.predict("60b", "10 blocks instead of 16: how many tokens are computed a second time?", "tokens")

# %%
tight = lab.ask(lab.engine_on(lab.your_pool(grow, release, 10), slots))
again = sum(step.num_tokens for step in tight.steps) - sum(step.num_tokens for step in tidy.steps)
said = f"{lab.thrown_out(tight)}\n{lab.same_answers([tidy, tight])}"
lab.reveal("60b", again, lab.step_strip(tight), text=said)

# %%
lab.scrub(tight)

# %% [markdown]
"""
## What reserving wastes

Before blocks, servers reserved one contiguous piece a request: the longest possible, a power of two, or (if an oracle
told them) the exact final length. Fifty requests live at one moment, with prompts and answers as long as people's in
the ShareGPT trace, each somewhere in its answer. What share of the reserved slots holds no token? (The median of 40
draws; nine of ten lie between P5 and P95, the thin lines.)
"""

# %%
lab.predict("60c", "Each reserves the power of two that holds its final length. Wasted?", "percent")

# %%
lab.predict("60d", "Blocks of 16, taken as tokens come. Wasted?", "percent")

# %%
waste = lab.waste("sharegpt-8k", longest=8192)
lab.reveal("60c", waste["contiguous: a power of two"])

# %%
lab.reveal("60d", waste["blocks of 16"], lab.waste_by_policy(waste, "sharegpt-8k"))

# %% [markdown]
"""
A popular article says: with 50 requests, paging cuts fragmentation from 35% to under 3%. What does that hang on?
Compare the number of requests, the trace, and the block size:
"""

# %%
ways = ["contiguous: a power of two", "blocks of 256", "blocks of 16"]
print("percent wasted, median (P5…P95):", ", ".join(ways))
draws = [("sharegpt-8k", 8192, n) for n in (5, 50, 500)] + [("azure-conv", 16384, 50)]
for trace, longest, n in draws:
    found = lab.waste(trace, longest, n)
    ranges = [percentile(found[way], [5, 50, 95]) for way in ways]
    said = [f"{mid:4.1f} ({low:.1f}…{high:.1f})" for low, mid, high in ranges]
    print(f"{trace:>11}, {n:>3} requests: {said[0]:<19}{said[1]:<19}{said[2]}")

# %% [markdown]
"""
Not on the 50: more requests narrow the range and hardly move the median. It hangs on how the contiguous server reserves
(35% looks like powers of two), on the lengths, and on the block: a request wastes half a block on average, so large
blocks waste more than 3% again. (The vLLM paper, Figure 2, has 80, 73 and 62% for the three contiguous ways, 4% for
blocks: other lengths, and 9, 42 and 37 of those percent are gaps *between* the pieces, not counted here.)

## Exercise 60.4 · Which bug?

*Difficulty: medium. Spend up to 5 minutes.* A classmate's `grow`, chunks of up to 8 tokens, blocks of 4. When do the
wasted slots differ?
"""


# %%
def on_blocks_of_4(grow):
    return lab.ask(lab.engine_on(lab.your_pool(grow, release, 64, 4), chunk_size=8))


right, theirs = on_blocks_of_4(grow), on_blocks_of_4(lab.broken("60.4"))
print(lab.same_answers([right, theirs]))
print(lab.compare_waste(theirs, right))
lab.scrub(theirs)

# %%
lab.which_bug("60.4")

# %% [markdown]
"""
## Recap

- slot = `block_ids[p // B] · B + p % B`. The table is contiguous, memory need not be.
- A table grows by whole blocks, all or nothing; blocks are counted and come home.
- Only full blocks are shared, so nobody writes into a shared one.
- Blocks waste less than one block a request.

**Three questions**

1. Half a block of 16 is wasted. From which mean length on is that under 3%?
2. Which request would you preempt, and why not the oldest?
3. Two people ask about the same document at the same moment. Do they share blocks?

<details><summary>Answers</summary>

**1** From 243 tokens on: 7.5 / (243 + 7.5) < 3%. **2** The newest: the least work is lost, and the oldest gets done.
**3** Not in the same step: a block is found only when it is computed.

</details>

**What breaks next.** The keys of a row are scattered now. Attention must gather them without copying, and never hold a
whole row of scores: `minichunk/attention/`.
"""

# %%
print(lab.score())
