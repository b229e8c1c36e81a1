# ruff: noqa: E402
# %% [markdown]
"""
# 00 · Start here

*My question rode in the same steps as your document; the budget changed the wait, not the answer.*

You will

- **run** a real language model in this notebook, and read what each of its steps computed;
- **tell** a mixed step from any other, and compute the two waits that users feel;
- **change** one number, the budget, and explain who waits less and who waits more.

| | |
|---|---|
| Prerequisites | Python. Nothing about inference engines |
| Minutes | 20 |
| Hardware | a CPU is enough |
| Numbers | live: measured on your machine while you watch |
"""

# %% [markdown]
"""
One line first. If it ends with *all well*, go on; if not, unfold it and run the command that it names.
"""

# %%
from tqdm.auto import tqdm

from minichunk import SamplingParams, doctor, lab

doctor.summary()

# %% [markdown]
"""
## Ask something

A model reads and writes **tokens**: words, pieces of words, punctuation. An engine calls the model in **steps**, and
each step computes a handful of tokens, the **batch**. Your question is the *prompt*; here it has 37 tokens, since a
chat adds a few of its own. The answer then grows one token at a time, because each new token depends on all the
tokens before it.

In this course you guess before you measure. Nobody grades the guesses; only your first one counts.
"""

# %%
lab.predict("00a", "A prompt of 37 tokens, an answer of 8 tokens (the last one says: stop). How many steps?", "steps")

# %%
engine = lab.engine(max_batch_tokens=256)
answer = engine.chat("What is the capital of France?", SamplingParams(max_tokens=24))
print(answer.text)

# %%
lab.reveal("00a", len(engine.run.steps), text="The step that finishes the prompt gives the first token already.")

# %% [markdown]
"""
## Look at the steps

`engine.run` remembers everything. In the first step the request brought 37 tokens, a **prompt chunk**. In every
later step it brought one token, the one that it had just written: a **decode**. `0[0:37]` means request 0, tokens 0
to 36.
"""

# %%
for step in engine.run.steps[:4]:
    print(step)
engine.close()

# %% [markdown]
"""
Look at the times. The first step computed 37 times as many tokens, and yet it took only a few times as long. A step
must read all the weights of the model, however few tokens it carries. So a good engine puts the tokens of many people
into one step.

## A rush hour

Six people ask short questions. While they read their answers, a seventh person sends a document of 571 tokens. The
**budget** says how many tokens a step may hold at most, everybody together:

- decodes come first, one token for each person who is reading;
- what is left of the budget goes to prompts, and a prompt that does not fit is cut into chunks.

A step that holds a decode *and* a prompt chunk is a **mixed** batch. That is the idea of this whole course.
"""

# %%
def serve(budget):
    engine = lab.engine(max_batch_tokens=budget)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for question in lab.QUESTIONS:
        engine.add(engine.chat_ids(question), params)
    for _ in range(8):  # eight steps later, six people read their answers …
        engine.step()
    engine.add(engine.chat_ids(lab.document()), params)  # … and the document comes in
    while engine.has_work:
        engine.step()
    engine.close()
    return engine.run


# %% [markdown]
"""
Three budgets: 64, 256 and 1024 tokens a step. With 1024 the whole document fits into one step.
"""

# %%
lab.predict(
    "00b",
    "Do the answers depend on the budget?",
    options=["All answers stay the same", "A few tokens change", "Most answers change"],
)

# %%
lab.predict("00c", "The longest pause of a reader: how many times as long with 1024 as with 64?", "times")

# %%
runs = {budget: serve(budget) for budget in tqdm([64, 256, 1024], desc="three rush hours")}
said = lab.same_answers(list(runs.values()))

# %%
lab.reveal("00b", "All answers stay the same" if "yes" in said else "A few tokens change", text=said)

# %% [markdown]
"""
A request never sees who else is in its step. Its tokens are computed from the same history, with the same weights, and
float32 is exact enough that the likeliest next token stays the same. (In bfloat16, where numbers are coarser, another
budget flips a token now and then.)

So the schedule is free to choose. Here is one run, step by step: height is the number of tokens, each request has its
own colour, hatch and letter. The document is G.
"""

# %%
lab.step_strip(runs[64])

# %%
lab.steps_table(runs[64])

# %% [markdown]
"""
## Exercise 00.1 · Is it mixed?

*Difficulty: easy. Spend up to 5 minutes.*

`chunks` lists what one step carries. Each chunk has `.id`, `.num_prompt_tokens` (how long that request's prompt is),
`.start` (how many of the request's tokens were computed before this step) and `.length`. Return `True` when the step
holds both a decode and a prompt chunk.

    prompt of 20:   0 ▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪▪ 20 ▫▫▫▫          ▪ prompt   ▫ answer
                    start 12, length 7: a prompt chunk
                    start 22, length 1: a decode

The last piece of a prompt may be one token long. It is no decode.

Stuck, here or later? Put `raise NotImplementedError` in the place of your lines: the reference takes over. Solutions
lie in `notebooks/solutions/`.
"""

# %%
def is_mixed(chunks):
    # BEGIN SOLUTION 00.1
    decodes = [chunk.start >= chunk.num_prompt_tokens for chunk in chunks]
    return any(decodes) and not all(decodes)
    # END SOLUTION


# %%
is_mixed = lab.exercise("00.1", is_mixed)
for budget, run in runs.items():
    mixed = sum(is_mixed(lab.pieces(run, step)) for step in run.steps)
    print(f"budget {budget:>4}: {mixed} of {len(run.steps)} steps are mixed")

# %% [markdown]
"""
## Exercise 00.2 · Two waits

*Difficulty: easy. Spend up to 10 minutes.*

Users feel two things:

- **TTFT**, time to first token: from the moment the request *arrived* until its first token came;
- **TBT**, time between tokens: the pause between one token and the next.

`arrival` is when the request came in, `scheduled` when its first step began, `times` when each of its tokens came, all
in seconds. Return TTFT and the *mean* TBT. With a single token there is no pause: return `None` for it.
"""

# %%
def ttft_and_tbt(arrival, scheduled, times):
    # BEGIN SOLUTION 00.2
    ttft = times[0] - arrival
    if len(times) == 1:
        return ttft, None
    return ttft, (times[-1] - times[0]) / (len(times) - 1)
    # END SOLUTION


# %%
ttft_and_tbt = lab.exercise("00.2", ttft_and_tbt)
for budget, run in runs.items():
    document = list(run.requests.values())[-1]
    ttft, tbt = ttft_and_tbt(document.arrival, document.first_scheduled, document.token_times)
    print(f"budget {budget:>4}: the document's TTFT {ttft:.2f} s, its mean TBT {tbt * 1e3:.0f} ms")

# %% [markdown]
"""
## Who waits less, who waits more?

(On a busy machine two neighbouring budgets may swap places, here and below: compare the ends.)

A mean hides a pause. For the readers, look at the *longest* one.
"""

# %%
longest = {budget: max(run.tbts) for budget, run in runs.items()}
lab.reveal("00c", longest[1024] / longest[64], lab.budget_latency(list(runs.values())))

# %% [markdown]
"""
Move the slider with the mouse or the arrow keys; it switches between runs that are done. The button runs a new budget
on your machine, which takes some seconds. Try 32, then 600.
"""

# %%
lab.budget_selector(runs, lab.timeline, serve)

# %% [markdown]
"""
A large budget computes the document in one long step, and everybody who rides in that step waits for it. A small
budget spreads the document over many short steps: nobody stands still, but the document's owner waits for more steps,
and each of them reads the weights again.

**What this shows, and what not.** A model of 135 million parameters on a CPU shows the *shape* of these curves, not
their size. A large model on a GPU takes milliseconds, and its best budget is another one.
"""

# %% [markdown]
"""
## Recap

- An engine works in steps. A request brings a chunk of its prompt, or one decode.
- A mixed step holds both. Requests share steps, but never answers.
- The budget bounds the step, and so everybody's TBT. It moves the wait; the answers stay.

**Three questions**

1. A step holds 6 decodes and a chunk of 58 tokens. How many new tokens will users see after it?
2. Why does an answer of 8 tokens take 8 steps and not 9?
3. Your budget is 32 and six people read. In how many steps is a prompt of 260 tokens done?

<details><summary>Answers</summary>

**1** 6; 7 if the chunk ends its prompt. **2** The step that ends the prompt gives the first. **3** 10, of 26 tokens.

</details>

**What breaks next.** We were kind: decodes came first. Notebook 20 shows what one long prompt does to everybody when
they do not.
"""

# %%
print(lab.score())
