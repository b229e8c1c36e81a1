"""The GPU's sampling kernels against the plain PyTorch way. On a CPU in Triton's interpreter."""

import os
import sys

import numpy as np
import pytest
import torch

from minichunk import SamplingParams
from minichunk.sampling import _draw

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton", reason="the triton package is not installed")

from minichunk.sampling_kernel import pick  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu" and not type(triton.language.cdiv).__name__.startswith("Interpreted"):
    pytest.skip("triton was imported before its interpreter was asked for", allow_module_level=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("vocab", [300, 9000])
def test_greedy_and_drawn_rows_are_those_of_pytorch(vocab):
    rng, rows = np.random.default_rng(0), 300
    logits = torch.from_numpy(rng.standard_normal((rows, vocab)).astype(np.float32)).to(DEVICE) * 2
    logits[:, 5], logits[:, 200:260] = -torch.inf, -torch.inf  # tokens that must never come
    logits[3:9, 4096:8192] = -torch.inf  # a whole tile
    logits[9, 7] = logits[9, 290] = 50.0  # a tie: the first
    logits[0, 3], logits[1], logits[2, 7] = torch.nan, -torch.inf, torch.inf
    temperature, u = rng.choice([0.0, 0.6, 1.3], rows), rng.random(rows)
    temperature[9], temperature[10:12], u[10:12] = 0, 1, (0, 1 - 2**-53)
    found = pick(logits, torch.from_numpy(np.stack([temperature, u])).to(DEVICE)).cpu()
    assert found[:3].tolist() == [-1, -1, -1]
    assert found[9] == 7 and found[10] == 0 and found[11] == vocab - 1
    greedy = [i for i in range(3, rows) if temperature[i] == 0]
    drawn = [i for i in range(3, rows) if temperature[i] > 0]
    assert torch.equal(found[greedy], logits[greedy].argmax(-1).cpu())
    params = [SamplingParams(temperature=temperature[i]) for i in drawn]
    wanted = _draw(logits[drawn], params, [u[i] for i in drawn]).cpu()
    assert (found[drawn] != wanted).sum() <= 1  # a point on a border may fall to either side
    probability = (logits[drawn].cpu() / torch.tensor([p.temperature for p in params])[:, None].float()).softmax(-1)
    assert (probability.gather(1, found[drawn][:, None]) > 0).all()


def test_a_draw_inverts_the_cumulative_distribution():
    """Against float64 sums over the whole row, by numpy."""
    rng, vocab = np.random.default_rng(1), 500
    logits = rng.standard_normal(vocab).astype(np.float32)
    weights = np.exp(logits.astype(np.float64) / 0.7)
    u = rng.random(3000)
    wanted = np.searchsorted(np.cumsum(weights) / weights.sum(), u, side="right")
    params = [SamplingParams(temperature=0.7)] * len(u)
    found = _draw(torch.from_numpy(logits).expand(len(u), vocab), params, u.tolist())
    assert (found.numpy() != wanted).sum() <= 1
