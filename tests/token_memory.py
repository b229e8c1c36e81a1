"""An engine whose model is a memory of tokens: thousands of steps a second, and nothing wrong stays unseen.

A slot remembers a checksum of the whole text up to its token, as keys and values do. A step that reads a slot that was
never written, was overwritten, or was written after another text raises, and its requests end with "error".
The next token hangs on the checksum alone, so `expected` can be computed without any engine.
"""

import random
import zlib
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minichunk import Engine
from minichunk.models import load
from minichunk.overlap import UNKNOWN
from minichunk.runner import ModelRunner

VOCAB, EOS = 16, 15


def checksums(tokens):
    """One number a position, of the text that ends there."""
    found, last = [], 0
    for token in tokens:
        last = zlib.crc32(bytes([token]), last)
        found.append(last)
    return found


def scores(checksum):
    """float32 [VOCAB] logits."""
    return np.random.default_rng(checksum).standard_normal(VOCAB).astype(np.float32)


def expected(prompt, max_tokens, ignore_eos=False):
    """The greedy output of the memory."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(int(scores(checksums(tokens)[-1]).argmax()))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


class TokenMemory:
    """Stands where a ModelRunner stood. on_run(batch) is called first in each forward, and may raise."""

    launch = ModelRunner.launch

    def __init__(self, runner, overlap):
        self._runner, self.overlap = runner, overlap
        self.slots = [None] * (runner.num_blocks * runner.block_size)
        self.on_run = None
        self.nan_rows = ()  # rows of the next logits that come out as NaN

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def run(self, batch):
        if self.on_run:
            self.on_run(batch)
        rows, texts = [], []
        for i, chunk in enumerate(batch.chunks):
            a, b = batch.cu_seqlens_q[i : i + 2]
            given, own = batch.token_ids[a:b].tolist(), chunk.token_ids
            texts.append(checksums(chunk.request.token_ids[: chunk.start] + given))
            unknown = self.overlap and chunk.is_last and own[-1] == UNKNOWN  # the step before is choosing it
            if given[: len(own) - unknown] != own[: len(own) - unknown]:
                raise RuntimeError(f"wrong tokens for {chunk}")
            for slot, position in zip(batch.slot_mapping[a:b], batch.positions[a:b]):
                self.slots[slot] = texts[-1][position]
        for i, (chunk, sums) in enumerate(zip(batch.chunks, texts)):
            blocks, size = batch.block_tables[i], self.block_size
            read = [self.slots[blocks[p // size] * size + p % size] for p in range(batch.seq_lens_k[i])]
            if read != sums:
                raise RuntimeError(f"{chunk} read {read}, the text up to there has {sums}")
            if chunk.is_last:
                rows.append(scores(sums[-1]))
        logits = torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, VOCAB)
        for row in self.nan_rows:
            if row < len(logits):
                logits[row, 3] = float("nan")
        self.nan_rows = ()
        return logits


@cache
def _loaded():
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=EOS, pad_token_id=None,
    )  # fmt: skip
    return load(LlamaForCausalLM(config).eval())


def memory_engine(**options):
    """An Engine over a TokenMemory; max_model_len 64, check on. The model beneath was loaded and verified once."""
    with (
        patch("minichunk.engine.load", lambda *_, tokenizer, **__: replace(_loaded(), tokenizer=tokenizer)),
        patch("minichunk.families.verify", lambda *_: 0.0),
    ):
        engine = Engine("a memory of tokens", **{"check": True, **options})
    engine.runner = TokenMemory(engine.runner, options.get("overlap", False))
    return engine


# --- policies of a learner -------------------------------------------------------------------------------------------
def newest_first(running, waiting, budget, chunk_size):
    """The worst order for the oldest: legal, and must still finish."""
    plan = []
    for request in [*reversed(running), *waiting]:
        length = min(request.num_left, budget, chunk_size or budget)
        if length:
            plan.append((request, length))
            budget -= length
    return plan


def random_legal(seed):
    """plan_step that proposes anything the rules allow, in any order."""
    rng = random.Random(seed)

    def plan_step(running, waiting, budget, chunk_size):
        here, queue, plan = list(running), list(waiting), []
        rng.shuffle(here)
        while budget and (here or queue):
            request = queue.pop(0) if queue and (not here or rng.random() < 0.4) else here.pop()
            length = rng.randint(1, min(budget, request.num_left, chunk_size or budget))
            plan.append((request.id if rng.random() < 0.3 else request, length))
            budget -= length
            if rng.random() < 0.15:
                break
        return plan

    return plan_step
