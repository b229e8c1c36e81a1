"""A mixed batch as integers: each number against the definition, and what must not get through the door."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minichunk import BlockTable, Chunk, PackedBatch, Request, pack_tokens, place

SIZE = 4
NAMES = ("token_ids", "positions", "cu_seqlens_q", "seq_lens_k", "logits_rows")


def chunk(id, start, length, prompt=None, total=None):
    total = total or start + length
    request = Request(id, [1000 * id + i for i in range(total)], prompt or total, num_computed=start)
    return Chunk.of(request, length)


# The batch that the module's docstring draws: A decodes at length 8, B brings 12 tokens after 9, C is a new prompt of 3.
A, B, C = chunk(1, 7, 1, prompt=4), chunk(2, 9, 12, total=30), chunk(3, 0, 3)
TABLES = [BlockTable(SIZE, [5, 2]), BlockTable(SIZE, [9, 0, 7, 1, 3, 4]), BlockTable(SIZE, [8])]


def test_the_batch_of_the_docstring():
    token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows = pack_tokens([A, B, C])
    assert token_ids == [1007, *range(2009, 2021), 3000, 3001, 3002]
    assert positions == [7, *range(9, 21), 0, 1, 2]
    assert (cu_seqlens_q, seq_lens_k) == ([0, 1, 13, 16], [8, 21, 3])
    assert logits_rows == [0, 15]  # B's chunk is not its last: no row of it is sampled
    batch = PackedBatch.build([A, B, C], TABLES, SIZE)
    assert batch.block_tables.tolist() == [[5, 2, 0, 0, 0, 0], [9, 0, 7, 1, 3, 4], [8, 0, 0, 0, 0, 0]]
    assert batch.slot_mapping.tolist()[:4] == [2 * 4 + 3, 7 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3]
    assert batch.kv_indptr.tolist() == [0, 2, 8, 9] and batch.kv_last_page_len.tolist() == [4, 1, 3]
    assert batch.kv_indices.tolist() == [5, 2, 9, 0, 7, 1, 3, 4, 8]
    assert (batch.num_tokens, batch.num_seqs, batch.query_lens.tolist()) == (16, 3, [1, 12, 3])


def test_every_array_has_the_type_that_kernels_expect():
    batch = PackedBatch.build([A, B, C], TABLES, SIZE)
    for name in ("token_ids", "positions", "slot_mapping", "logits_rows"):
        assert getattr(batch, name).dtype == np.int64, name
    for name in ("cu_seqlens_q", "seq_lens_k", "block_tables", "kv_indptr", "kv_indices", "kv_last_page_len"):
        assert getattr(batch, name).dtype == np.int32, name


@st.composite
def batches(draw):
    size = draw(st.integers(1, 32))
    shapes = draw(
        st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40), st.integers(0, 5)), min_size=1, max_size=6)
    )
    chunks = [chunk(i, start, n, total=start + n + more) for i, (start, n, more) in enumerate(shapes)]
    needed = [-(-c.end // size) + draw(st.integers(0, 2)) for c in chunks]  # a table may be longer than the chunk needs
    ids = draw(st.permutations(range(sum(needed))))
    tables, at = [], 0
    for n in needed:
        tables.append(BlockTable(size, ids[at : at + n]))
        at += n
    return size, chunks, tables


@settings(max_examples=100, deadline=None)
@given(batches())
def test_any_batch_token_by_token_against_the_definitions(drawn):
    size, chunks, tables = drawn
    batch = PackedBatch.build(chunks, tables, size)
    rows = [(c, p, t) for c, t in zip(chunks, tables) for p in range(c.start, c.start + c.length)]
    assert batch.token_ids.tolist() == [c.request.token_ids[p] for c, p, _ in rows]
    assert batch.positions.tolist() == [p for _, p, _ in rows]
    assert batch.slot_mapping.tolist() == [t.block_ids[p // size] * size + p % size for _, p, t in rows]
    assert len(set(batch.slot_mapping.tolist())) == batch.num_tokens
    assert [rows[r][1] + 1 for r in batch.logits_rows] == [c.request.num_tokens for c in chunks if c.is_last]
    assert batch.seq_lens_k.tolist() == [c.start + c.length for c in chunks]
    for i, (c, t) in enumerate(zip(chunks, tables)):
        used = -(-c.end // size)
        assert batch.block_tables[i, :used].tolist() == t.block_ids[:used]
        assert (batch.block_tables[i, used:] == 0).all()
        a, b = batch.kv_indptr[i : i + 2]
        assert batch.kv_indices[a:b].tolist() == t.block_ids[:used]
        assert (b - a - 1) * size + batch.kv_last_page_len[i] == c.end


@settings(max_examples=60, deadline=None)
@given(batches())
def test_whole_arrays_and_the_functions_that_a_learner_replaces_give_the_same_integers(drawn):
    size, chunks, tables = drawn
    fast = PackedBatch.build(chunks, tables, size)
    plain = PackedBatch.build(chunks, tables, size, lambda c: pack_tokens(c), lambda *a: place(*a))
    for name in (*NAMES, "block_tables", "slot_mapping"):
        a, b = getattr(fast, name), getattr(plain, name)
        assert a.tolist() == b.tolist() and a.dtype == b.dtype, name


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 6), st.booleans())
def test_what_is_taken_over_from_the_last_batch_changes_no_integer(drawn, steps, leave):
    """The same requests go on, a few tokens a step; one may leave."""
    size, chunks, tables = drawn
    requests, before = [c.request for c in chunks], None
    spare = iter(range(10_000, 20_000))
    for number in range(steps):
        if leave and number == steps - 1 and len(requests) > 1:
            requests, tables = requests[1:], tables[1:]
        for r, t in zip(requests, tables):
            r.token_ids += [3] * max(0, r.num_computed + 2 - r.num_tokens)
            while len(t) * size < r.num_tokens:
                t.block_ids.append(next(spare))
        now = [Chunk.of(r, 1 + (number + i) % 2) for i, r in enumerate(requests)]
        batch, fresh = (
            PackedBatch.build(now, list(tables), size, before=before),
            PackedBatch.build(now, list(tables), size),
        )
        for name in (*NAMES, "block_tables", "slot_mapping"):
            assert getattr(batch, name).tolist() == getattr(fresh, name).tolist(), name
        for c in now:
            c.request.num_computed = c.end
        before = batch


def test_a_step_after_a_broken_off_one_may_be_shorter():
    request, table = Request(0, list(range(12)), 12), BlockTable(SIZE, [3, 1, 2])
    before = PackedBatch.build([Chunk.of(request, 12)], [table], SIZE)
    batch = PackedBatch.build([Chunk.of(request, 5)], [table], SIZE, before=before)
    assert batch.block_tables.tolist() == [[3, 1]] and batch.slot_mapping.tolist() == [12, 13, 14, 15, 4]


# --- a learner's packer ----------------------------------------------------------------------------------------------
def changed(name, change):
    def pack(chunks):
        parts = dict(zip(NAMES, pack_tokens(chunks)))
        parts[name] = change(list(parts[name]))
        return tuple(parts.values())

    return pack


@pytest.mark.parametrize(
    "name, change, says",
    [
        ("token_ids", lambda v: v[:-1], "token_ids has shape"),
        ("token_ids", lambda v: [-1, *v[1:]], "negative"),
        ("positions", lambda v: [*v, 0], "positions has shape"),
        ("positions", lambda v: [-7, *v[1:]], "negative"),
        ("positions", lambda v: [24, *v[1:]], "positions must lie below 24"),
        ("cu_seqlens_q", lambda v: v[1:], "cu_seqlens_q has shape"),
        ("cu_seqlens_q", lambda v: [1, *v[1:]], "rise from 0 to 16"),
        ("cu_seqlens_q", lambda v: [0, 13, 1, 16], "rise from 0 to 16"),
        ("cu_seqlens_q", lambda v: [0, 1, 13, 17], "rise from 0 to 16"),
        ("seq_lens_k", lambda v: [0, *v[1:]], "seq_lens_k must lie in 1..24"),
        ("seq_lens_k", lambda v: [25, *v[1:]], "seq_lens_k must lie in 1..24"),
        ("seq_lens_k", lambda v: [v], "seq_lens_k has shape"),
        ("logits_rows", lambda v: [*v, 3], "3 rows, but 2 chunks"),
        ("logits_rows", lambda v: v[:1], "1 rows, but 2 chunks"),
        ("logits_rows", lambda v: [0, 16], "logits_rows must lie in 0..15"),
        ("logits_rows", lambda v: [-1, 3], "logits_rows must lie in 0..15"),
    ],
)
def test_arrays_that_reach_outside_are_refused(name, change, says):
    with pytest.raises(ValueError, match=says):
        PackedBatch.build([A, B, C], TABLES, SIZE, pack=changed(name, change))


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda t, s: (t[:-1], s), "block_tables has shape"),
        (lambda t, s: (t, s[1:]), "slot_mapping has shape"),
        (lambda t, s: (t, [-1, *s[1:]]), "negative"),
        (lambda t, s: ([r[:2] for r in t], s), "seq_lens_k must lie in 1..8"),
        (lambda t, s: (np.zeros(3), s), "block_tables"),
    ],
)
def test_places_that_reach_outside_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        PackedBatch.build([A, B, C], TABLES, SIZE, place=lambda *args: change(*place(*args)))


def test_numpy_arrays_from_a_packer_will_do():
    def pack(chunks):
        return tuple(np.array(x) for x in pack_tokens(chunks))

    def put(chunks, tables, size):
        return np.array([[5, 2, 0, 0, 0, 0], [9, 0, 7, 1, 3, 4], [8, 0, 0, 0, 0, 0]]), np.array(
            place(chunks, tables, size)[1]
        )

    a, b = PackedBatch.build([A, B, C], TABLES, SIZE), PackedBatch.build([A, B, C], TABLES, SIZE, pack, put)
    for name in (*NAMES, "block_tables", "slot_mapping"):
        assert (getattr(a, name) == getattr(b, name)).all() and getattr(a, name).dtype == getattr(b, name).dtype


def test_the_picture_of_a_batch_names_each_request_its_rows_and_its_slots():
    html = PackedBatch.build([A, B, C], TABLES, SIZE)._repr_html_()
    assert "1…12" in html and "16 tokens, 3 sequences" in html and "decode" in html and "9 0 7 1 3 4" in html
