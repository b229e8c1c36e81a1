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
| Minutes | 35 |
| Hardware | a CPU is enough |
| Numbers | live: computed on your machine while you watch |
"""

# %%
from statistics import median

from minichunk import lab
from minichunk.blocks import OutOfBlocks
from minichunk.packing import PackedBatch

# %% [markdown]
"""
## Memory in blocks

Keys and values of all requests lie in one big array. When a request comes in, nobody knows how long its answer will be:
reserve too little and it does not fit, too much and memory stands empty. So the array is cut into **blocks** of a few
slots, a slot a token, and a request takes blocks as it grows, any that are free. Its **table** lists them in order.

    B's table          7      0      3       9        1        4        blocks of 4 slots
    its positions    0…3    4…7   8…11   12…15    16…19       20
    position 13:  13 // 4 = 3 → block 9,   13 % 4 = 1 → slot 9 · 4 + 1 = 37

## Exercise 60.1 · Slots

*Difficulty: easy. Spend up to 10 minutes.*

A chunk of `length` tokens begins at position `start`. Return the slot of each of its tokens, as a list. The chunk may
begin in the middle of a block.
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
A kernel gets these integers. FlashAttention takes a table per request. FlashInfer takes all tables in one flat list,
`kv_indptr` to cut it, and how full each last block is. (Both libraries say *page* for a block.) The running example:
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

`n` is the number of tokens that the table must hold afterwards. Append just as many blocks to `table.block_ids` as are
missing. `pool.block_size` and `pool.num_free` are numbers; `pool.take()` gives you a free block. All or nothing: if the
free blocks do not suffice, `raise OutOfBlocks(…)` *before* you take any. The scheduler then makes room.
"""

# %%
def grow(table, pool, n):
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
lab.predict("60a", "The blocks are handed out in random order. Which tokens of the answers change?", options=options)

# %%
tidy = lab.ask(lab.engine_on(lab.your_pool(grow, release, 16), slots))
shuffled = lab.ask(lab.engine_on(lab.your_pool(grow, release, 16, shuffle=7), slots))
said = lab.same_answers([tidy, shuffled])
lab.reveal("60a", options[0] if "yes" in said else options[1], lab.block_map(shuffled, 12), text=said)

# %% [markdown]
"""
In the tables each request is in one piece. In memory it lies anywhere, and no other request notices.

## Two tables, one block

The scrubber also plays a list of operations. Edit the list and run the cell again. Press the arrow keys; click a token
and follow it: position, block, slot. With `("share", "A", "B")`, B comes in with a prompt that begins with all of A's
tokens and has one more. (`"free"` shows as *aborted*: A leaves before a step runs.)
"""

# %%
operations = [("grow", "A", 10), ("share", "A", "B"), ("grow", "A", 3), ("grow", "B", 3), ("free", "A"), ("grow", "C", 9)]
lab.explore_blocks(operations, num_blocks=12, block_size=4)

# %% [markdown]
"""
B shares A's two *full* blocks. The third, half full, it does not: B computes those tokens again, into a block of its
own. So nobody ever writes into a shared block, and no **copy-on-write** is needed. Two rules see to it: only whole
blocks are shared, and a hit stops at `num_tokens − 1`, because the last token must be computed to get logits.

## A pool that is too small

The same three questions (37 tokens each, answers of 24) need 12 blocks in the end. Give them 10. When a table cannot
grow, the scheduler **preempts** the newest request: it gives up all its blocks, waits, and computes its tokens again.
"""

# %%
lab.predict("60b", "10 blocks instead of 16: how many tokens are computed a second time?", "tokens")

# %%
tight = lab.ask(lab.engine_on(lab.your_pool(grow, release, 10), slots))
again = sum(step.num_tokens for step in tight.steps) - sum(step.num_tokens for step in tidy.steps)
lab.reveal("60b", again, lab.step_strip(tight), text=lab.same_answers([tidy, tight]))

# %%
lab.scrub(tight)

# %% [markdown]
"""
## What reserving wastes

Before blocks, servers reserved one contiguous piece a request: the longest possible, a power of two, or (if an oracle
told them) the exact final length. Fifty requests live at one moment, with prompts and answers as long as people's in the
ShareGPT trace, each somewhere in its answer. What share of the reserved slots holds no token?
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
draws = [("sharegpt-8k", 8192, 5), ("sharegpt-8k", 8192, 50), ("sharegpt-8k", 8192, 500), ("azure-conv", 16384, 50)]
for trace, longest, n in draws:
    found = lab.waste(trace, longest, n)
    ways = ["contiguous: a power of two", "blocks of 256", "blocks of 16"]
    print(f"{trace:>11}, {n:>3} requests:", "  ".join(f"{way} {median(found[way]):.1f}%" for way in ways))

# %% [markdown]
"""
Not on the 50: more requests only make the number steadier. It hangs on how the contiguous server reserves (35% looks
like powers of two), on the lengths, and on the block: a request wastes half a block on average, so large blocks waste
more than 3% again. (The vLLM paper, Figure 2, has 80, 73 and 62% for the three contiguous ways, 4% for blocks.)

## Exercise 60.4 · Which bug?

*Difficulty: medium. Spend up to 5 minutes.* A classmate's `grow`, blocks of 4. Watch the tables and the wasted slots.
"""

# %%
theirs = lab.ask(lab.engine_on(lab.your_pool(lab.broken("60.4"), release, 64, 4)))
print(lab.same_answers([tidy, theirs]))
lab.scrub(theirs)

# %%
lab.which_bug("60.4")

# %% [markdown]
"""
## Recap

- slot = `block_ids[p // B] · B + p % B`. The table is contiguous, memory need not be.
- A table grows by whole blocks, all or nothing; blocks are counted and come home.
- Only full blocks are shared, so nobody writes into a shared one.
- Blocks waste less than one block a request. Reserving wastes what it does not know.

**Three questions**

1. Half a block of 16 is wasted. From which mean length on is that under 3%?
2. Which request would you preempt, and why not the oldest?
3. Two people ask about the same document at the same moment. Do they share blocks?

**What breaks next.** The keys of a row are scattered now. Attention must gather them without copying, and never hold a
whole row of scores: FlashAttention over blocks, notebook 70.
"""

# %%
print(lab.score())
