"""FlashInfer's contract in a few lines of float64, so that what the backend plans can be checked without a GPU.

Pages in compressed rows (indptr, indices, last_page_len), causal only when asked, float16 unless another dtype is named,
windows as "keys to the left", caps in both plan and run of BatchAttention: the traps of the real package.
"""

import types

import torch


def attend(query, cache, rows, pages, indices, lens, causal, scale, window_left, cap):
    out = torch.empty_like(query)
    keys, values = (c.double() for c in cache)
    for i, length in enumerate(lens):
        a, b = int(rows[i]), int(rows[i + 1])
        mine = indices[int(pages[i]) : int(pages[i + 1])].long()
        k, v = (x[mine].flatten(0, 1)[:length] for x in (keys, values))
        group = query.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", query[a:b].double(), k) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        at = torch.arange(length - (b - a), length)[:, None]
        key = torch.arange(length)[None]
        hidden = (key > at) & causal | (window_left >= 0) & (key < at - window_left)
        scores.masked_fill_(hidden, float("-inf"))
        out[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)
    return out


class Wrapper:
    def _keep(self, rows, pages, indices, lens, dtype, **rest):
        assert len(rows) == len(pages) == len(lens) + 1 and int(pages[-1]) == len(indices)
        assert all(t.dtype == torch.int32 for t in (rows, pages, indices))
        self.planned, self.dtype = dict(rows=rows, pages=pages, indices=indices, lens=lens, **rest), dtype

    def _run(self, query, cache, **more):
        assert query.is_contiguous() and query.dtype == self.dtype, f"planned for {self.dtype}, run with {query.dtype}"
        return attend(query, cache, **self.planned | more)


def lens_of(pages, last, page):
    return ((pages[1:] - pages[:-1] - 1) * page + last).tolist()


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(self, space, kv_layout="HND", backend="auto"):
        assert kv_layout == "NHD" and space.dtype == torch.uint8
        self.backend = backend

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size,
             causal=False, sm_scale=None, window_left=-1, logits_soft_cap=None, q_data_type=torch.float16, kv_data_type=None):  # fmt: skip
        self._keep(qo_indptr, paged_kv_indptr, paged_kv_indices, lens_of(paged_kv_indptr, last_page_len, page_size), q_data_type,
                   causal=causal, scale=sm_scale or head_dim_qk**-0.5, window_left=window_left, cap=logits_soft_cap)  # fmt: skip

    def run(self, query, cache):
        return self._run(query, cache)


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(self, space, kv_layout="HND", use_tensor_cores=False):
        assert kv_layout == "NHD" and use_tensor_cores

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, window_left=-1,
             logits_soft_cap=None, q_data_type=torch.float16, kv_data_type=None, sm_scale=None):  # fmt: skip
        rows = torch.arange(len(indptr), dtype=torch.int32)
        self._keep(rows, indptr, indices, lens_of(indptr, last_page_len, page_size), q_data_type, causal=False,
                   scale=sm_scale or head_dim**-0.5, window_left=window_left, cap=logits_soft_cap)  # fmt: skip

    def run(self, query, cache):
        return self._run(query, cache)


class BatchAttention(Wrapper):
    def __init__(self, kv_layout="HND", device="cuda"):
        assert kv_layout == "NHD"

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size,
             causal=False, sm_scale=None, logits_soft_cap=None, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16):  # fmt: skip
        self.cap = logits_soft_cap
        self._keep(qo_indptr, kv_indptr, kv_indices, kv_len_arr.tolist(), q_data_type, causal=causal,
                   scale=sm_scale or head_dim_qk**-0.5, window_left=-1)  # fmt: skip

    def run(self, query, cache, logits_soft_cap=0.0):
        assert not logits_soft_cap or self.cap
        return self._run(query, cache, cap=logits_soft_cap), None


def append_paged_kv_cache(key, value, batch_indices, positions, cache, indices, indptr, last_page_len, kv_layout="NHD"):
    page = cache[0].shape[1]
    for row, (seq, at) in enumerate(zip(batch_indices.tolist(), positions.tolist())):
        first, end = indptr[seq : seq + 2].tolist()
        assert at < (end - first - 1) * page + int(last_page_len[seq]), "the table must include the new tokens"
        for pool, new in zip(cache, (key, value)):
            pool[int(indices[first + at // page]), at % page] = new[row]


module = types.ModuleType("flashinfer")
for thing in (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchDecodeWithPagedKVCacheWrapper,
    BatchAttention,
    append_paged_kv_cache,
):
    setattr(module, thing.__name__, thing)
