"""The packer's integers and the attention on them, on the CPU, in Triton's interpreter and on a GPU; no widget is imported.

`pytest --noconftest -m gpu tests/test_packer_batch.py` needs torch, triton and numpy alone.
"""

import os
import random
import sys

import numpy as np
import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from minichunk.attention import StepMeta, make_backend  # noqa: E402
from minichunk.lab import packer_batch as packer  # noqa: E402

EXAMPLE = {  # COURSE's own numbers, and blocks 5 2, 7 0 3 9 1 4, 6
    "positions": [7, *range(9, 21), 0, 1, 2],
    "slot_mapping": [11, 13, 14, 15, 36, 37, 38, 39, 4, 5, 6, 7, 16, 24, 25, 26],
    "logits_rows": [0, 12, 15],
    "cu_seqlens_q": [0, 1, 13, 16],
    "seq_lens_k": [8, 21, 3],
    "block_tables": [[5, 2], [7, 0, 3, 9, 1, 4], [6]],
    "qo_indptr": [0, 1, 13, 16],
    "kv_indptr": [0, 2, 8, 9],
    "kv_indices": [5, 2, 7, 0, 3, 9, 1, 4, 6],
    "kv_last_page_len": [4, 1, 3],
}
CHUNKS = packer.with_blocks(packer.example(16), 4)


@pytest.fixture(params=["torch", "triton", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    """(backend, device): torch on the CPU, triton in its interpreter, what a GPU runs."""
    if request.param == "cuda":
        return packer.backend_on("auto", 4)[:2]
    if request.param == "triton":
        triton = pytest.importorskip("minichunk.attention.triton_backend")
        if not triton.INTERPRETED:
            pytest.skip("triton is there for the GPU, not as an interpreter")
    return make_backend(request.param, torch.device("cpu")), torch.device("cpu")


def with_edits(*edits):
    """The example's integers with "seq_lens_k[1]=12", … in them."""
    return packer.edited(EXAMPLE, {key: int(value) for key, value in (edit.split("=") for edit in edits)})


def errors_of(ints, form, where):
    return packer.row_errors(packer.attend(CHUNKS, ints, 4, form, *where), packer.reference(CHUNKS))


def wrong_rows(errors):
    return [row for row, e in enumerate(errors) if packer.is_wrong(e)]


def test_the_integers_of_the_running_example():
    assert packer.integers(CHUNKS, 4) == EXAMPLE and packer.mistakes(CHUNKS, EXAMPLE, EXAMPLE, 4) == []


@pytest.mark.parametrize("form", packer.FORMS)
def test_right_integers_give_the_dense_result(form, where):
    errors = errors_of(EXAMPLE, form, where)
    assert len(errors) == 16 and max(errors) < 5e-6


def test_the_reference_is_attention_row_by_row():
    """Against a loop over heads and keys that shares nothing with it but the random numbers."""
    q, k, v = (x.numpy() for x in packer._numbers())
    turn = lambda x, p: np.concatenate([  # noqa: E731
        x[:8] * np.cos(p * 100.0 ** -(np.arange(8) / 8)) - x[8:] * np.sin(p * 100.0 ** -(np.arange(8) / 8)),
        x[8:] * np.cos(p * 100.0 ** -(np.arange(8) / 8)) + x[:8] * np.sin(p * 100.0 ** -(np.arange(8) / 8)),
    ])  # fmt: skip
    got = packer.reference(CHUNKS)
    for row, (r, p) in {0: (0, 7), 1: (1, 9), 12: (1, 20), 13: (2, 0), 15: (2, 2)}.items():
        for head in range(6):
            scores = np.array([turn(k[r, j, head // 2], j) @ turn(q[r, p, head], p) for j in range(p + 1)]) / 4
            weights = np.exp(scores - scores.max())
            assert got[row, head].numpy() == pytest.approx(weights @ v[r, : p + 1, head // 2] / weights.sum())


# --- one wrong integer -----------------------------------------------------------------------------------------------
B = list(range(1, 13))
CASES = {  # integer, value: wrong rows in FlashAttention's form, in FlashInfer's, what the check says
    "seq_lens_k[1]=12": (B, [], "B has 9 tokens of history and 12 new, so it must be 21: the history is not counted, and rows 1…12 each see 9 keys too few"),
    "seq_lens_k[0]=7": ([0], [], "must be 8: the new ones are not counted, and row 0 sees 1 key too few"),
    "seq_lens_k[2]=4": ([13, 14, 15], [], "must be 3: rows 13…15 each see 1 key too many"),
    "positions[3]=2": (B[2:], B[2:], "row 3 is B's token 11, so it must be 11"),
    "positions[0]=5": ([0], [0], "must be 7: its query is rotated to the wrong place, and its key, which the request's later tokens will read."),
    "positions[11]=0": (B[10:], B[10:], "must be 19: its query is rotated to the wrong place, and its key, which its request's next rows read."),
    "slot_mapping[12]=17": ([12], [12], "row 12 is B's token 20, whose slot is 16 = block 4 · 4 + 0. Its key goes to 17 = block 4 · 4 + 1 (empty, B's)"),
    "slot_mapping[13]=8": ([0, 13, 14, 15], [0, 13, 14, 15], "Its key goes to 8 = block 2 · 4 + 0 (A's token 4)"),
    "cu_seqlens_q[1]=5": ([0, 1, 2, 3, 4], [], "A has row 0, so it must be 1: rows 1…4 go to A's keys, and A's own row sees 4 keys too few"),
    "cu_seqlens_q[2]=12": (B, [], "must be 13: row 12 goes to C's keys, and B's own rows each see 1 key too many"),
    "qo_indptr[2]=12": ([], B, "qo_indptr[2] is 12: B has rows 1…12"),
    "block_tables[1][0]=3": (B, [], "B's tokens 0…3 lie in block 7, so it must be 7. Block 3 holds B's tokens 8…11."),
    "block_tables[1][5]=8": ([12], [], "B's token 20 lies in block 4, so it must be 4. Block 8 holds nothing of this batch."),
    "kv_indices[8]=5": ([], [13, 14, 15], "C's tokens 0…2 lie in block 6, so it must be 6. Block 5 holds A's tokens 0…3."),
    "kv_indptr[2]=7": ([], [*B, 13, 14, 15], "its 21 tokens fill 6 of 4, so it must be 8: page 7 goes to C"),
    "kv_last_page_len[0]=2": ([], [0], "A's 8 tokens are 1 full page of 4 and 4 in the last, so it must be 4: its rows see 2 keys too few"),
    "logits_rows[1]=13": ([], [], "B's last row is 12, so it must be 12: the next token would be chosen after C's token 0"),
}  # fmt: skip


@pytest.mark.parametrize("edit", CASES)
def test_a_wrong_integer_is_named_and_its_rows_are_wrong(edit, where):
    flash_attention, flashinfer, said = CASES[edit]
    ints = with_edits(edit)
    (sentence,) = packer.mistakes(CHUNKS, EXAMPLE, ints, 4)
    assert sentence.startswith(edit.replace("=", " is ") + ": ") and said in sentence
    for form, wanted in {"flash_attention": flash_attention, "flashinfer": flashinfer}.items():
        assert wrong_rows(errors_of(ints, form, where)) == wanted, form


def test_rows_that_see_no_key_have_no_number(where):
    """B's 12 rows and 5 keys: bottom-right, its first seven see none of them."""
    errors = errors_of(with_edits("seq_lens_k[1]=5"), "flash_attention", where)
    assert errors[1:8] == [None] * 7 and None not in errors[:1] + errors[8:]


# --- nothing reads or writes outside ---------------------------------------------------------------------------------
REFUSED = [
        ("seq_lens_k[1]=25", "flash_attention", "seq_lens_k must lie in 1..24"),
        ("block_tables[0][0]=130", "flash_attention", r"block_tables must lie in 0..129, the pool, got 130"),
        ("kv_indices[0]=-1", "flashinfer", r"kv_indices must lie in 0..129, the pool, got -1"),
        ("cu_seqlens_q[3]=17", "flash_attention", r"cu_seqlens_q must rise from 0 to 16"),
        ("kv_indptr[3]=10", "flashinfer", r"kv_indptr must rise from 0 to 9"),
        ("kv_indptr[1]=0", "flashinfer", r"kv_indptr must rise from 0 to 9, at least a page a request"),
        ("kv_last_page_len[2]=5", "flashinfer", r"kv_last_page_len must lie in 1..4"),
        ("slot_mapping[0]=520", "both", r"slot_mapping must lie in 0..519"),
        ("positions[0]=-1", "both", r"must not be negative"),
        ("logits_rows[2]=16", "both", r"logits_rows must lie in 0..15"),
]  # fmt: skip


class Spy:
    """In a backend's place: holds every integer it is given against the arrays that a kernel would index with it."""

    def __init__(self):
        self.calls = 0

    def plan(self, meta: StepMeta):
        self.meta = meta

    def append_kv(self, key, value, key_cache, value_cache, meta):
        slots = meta.slot_mapping.tolist()
        assert len(slots) == len(key) == len(value) and 0 <= min(slots)
        assert max(slots) < key_cache.shape[0] * key_cache.shape[1] and key_cache.shape == value_cache.shape

    def attend(self, query, key_cache, value_cache, meta, layer):
        cu, lens, tables = meta.cu_seqlens_q.tolist(), meta.seq_lens_k.tolist(), meta.block_tables.tolist()
        assert cu[0] == 0 and cu[-1] == len(query) and cu == sorted(cu) and len(cu) == len(lens) + 1 == len(tables) + 1
        for length, table in zip(lens, tables):
            assert 1 <= length <= len(table) * key_cache.shape[1]
            assert all(0 <= b < key_cache.shape[0] for b in table)
        self.calls += 1
        return torch.zeros(len(query), packer.HEADS, packer.HEAD_DIM)


@pytest.mark.parametrize("edit, form, why", REFUSED)
def test_an_integer_that_reaches_outside_never_comes_to_a_backend(edit, form, why):
    """That form is refused, the other one is run."""
    spy, ints = Spy(), with_edits(edit)
    for name in packer.FORMS:
        if form in (name, "both"):
            with pytest.raises(ValueError, match=why):
                packer.attend(CHUNKS, ints, 4, name, spy, torch.device("cpu"))
        else:
            packer.attend(CHUNKS, ints, 4, name, spy, torch.device("cpu"))
    assert spy.calls == 2 - (2 if form == "both" else 1)


def any_edits(rng):
    """One to three integers of the example, each one anything at all or near what it should be."""
    out = {}
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(EXAMPLE))
        at = rng.randrange(len(EXAMPLE[name]))
        row = EXAMPLE[name][at]
        key = f"{name}[{at}]" + (f"[{rng.randrange(len(row))}]" if isinstance(row, list) else "")
        out[key] = rng.choice([rng.randint(-9999, 9999), rng.randint(-2, 30), rng.randint(0, 520)])
    return out


def test_whatever_is_typed_nothing_reaches_outside():
    rng, spy, asked = random.Random(1), Spy(), 0
    for _ in range(600):
        ints = packer.edited(EXAMPLE, any_edits(rng))
        for form in packer.FORMS:
            asked += 1
            try:
                packer.attend(CHUNKS, ints, 4, form, spy, torch.device("cpu"))
            except ValueError:
                pass
    assert 100 < spy.calls < asked - 100


@pytest.mark.gpu
def test_a_gpu_lives_through_whatever_is_typed_and_says_what_the_cpu_says():
    """Where two rows share a slot either may win, so those are run and not compared."""
    rng, compared, backends = random.Random(2), 0, [packer.backend_on(device, 4)[:2] for device in ("cpu", "auto")]
    assert [on.type for _, on in backends] == ["cpu", "cuda"]
    for _ in range(200):
        edits = any_edits(rng)
        ints = packer.edited(EXAMPLE, edits)
        for form in packer.FORMS:
            try:
                ours, theirs = (errors_of(ints, form, where) for where in backends)
            except ValueError:
                continue
            if len(set(ints["slot_mapping"])) == 16:
                compared += 1
                assert wrong_rows(theirs) == wrong_rows(ours), (edits, form)
                assert [e is None for e in theirs] == [e is None for e in ours], (edits, form)
    assert compared > 30 and max(errors_of(EXAMPLE, "flashinfer", backends[1])) < 5e-6


# --- what a run says -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["cpu", pytest.param("auto", marks=pytest.mark.gpu)])
def test_a_run_says_which_backend_ran_and_where(device):
    name = "torch on the CPU" if device == "cpu" else f"triton on {torch.cuda.get_device_name()}"
    errors, line = packer.run(CHUNKS, EXAMPLE, 4, device)
    assert set(errors) == {"flash_attention", "flashinfer", "sampled"} and len(errors["sampled"]) == 3
    assert line.startswith("FlashAttention's form: all 16 rows agree with float64 to ")
    assert line.endswith(f" · {name}, float32")
    errors, line = packer.run(CHUNKS, with_edits("kv_indices[0]=-1"), 4, device)
    assert errors["flashinfer"] is None and line.startswith("error: FlashAttention's form: all 16 rows agree")
    assert "FlashInfer's form was refused, not run: kv_indices must lie in 0..129" in line and line.endswith("float32")


def test_two_forms_refused_for_two_reasons():
    errors, line = packer.run(CHUNKS, with_edits("kv_indices[0]=130", "block_tables[0][0]=131"), 4, "cpu")
    assert errors == {"flash_attention": None, "flashinfer": None, "sampled": None}
    assert line.startswith(
        "error: both forms were refused, nothing was run: block_tables must lie in 0..129, the pool, got 131"
    )
    assert line.endswith(" · kv_indices must lie in 0..129, the pool, got 130")
