"""Traces: published formats read right, wrong files refused with line and column, arrivals with the promised statistics."""

import io
import json
import statistics
import urllib.error

import numpy as np
import pytest

from minichunk import workloads as w
from minichunk.workloads import BadTrace, ClosedLoop, DownloadFailed, TraceRequest

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:01.0000001,1,2
"""
LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n290.0,905.0,1195,0.32\n"
MOONCAKE = (
    '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3000, "input_length": 512, "output_length": 9, "hash_ids": [0]}\n'
)


def put(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_azure(tmp_path):
    requests = w.read(put(tmp_path, "trace.csv", AZURE))
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(374, 44), (396, 109), (1, 2)]
    assert [r.arrival for r in requests] == pytest.approx([0.0, 4.314579, 14.3194101], abs=1e-9)
    assert w.read(put(tmp_path, "dos.csv", AZURE.replace("\n", "\r\n"))) == requests


def test_length_files_and_mooncake(tmp_path):
    assert w.read(put(tmp_path, "lengths.csv", LENGTHS)) == [TraceRequest(0.0, 74, 918), TraceRequest(0.0, 290, 905)]
    first, second = w.read(put(tmp_path, "trace.jsonl", MOONCAKE))
    assert first == TraceRequest(0.0, 700, 5, (0, 1)) and second == TraceRequest(3.0, 512, 9, (0,))


def test_saved_and_read_back(tmp_path):
    requests = [TraceRequest(0.25, 10, 3), TraceRequest(1.5, 700, 1)]
    assert w.read(w.save(requests, tmp_path / "mine.json")) == requests


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.csv", "a,b\n1,2\n", r"line 1: the header 'a,b' is none"),
        ("a.csv", AZURE.replace("396", "many"), r"line 3, column 2 \(ContextTokens\): 'many' is no whole number"),
        ("a.csv", AZURE.replace(",44", ",0"), r"line 2, column 3 \(GeneratedTokens\): '0'"),
        ("a.csv", AZURE.replace("396", "3.5"), r"line 3, column 2"),
        ("a.csv", AZURE.replace("2023-11-16 18:15:50", "yesterday"), r"line 3, column 1 \(TIMESTAMP\): 'yesterday"),
        ("a.csv", AZURE.replace("396,", ""), r"line 3: 2 columns, the header has 3"),
        ("a.csv", AZURE.replace("18:15:50", "17:15:50"), r"request 2 arrives before the one above it"),
        ("a.csv", AZURE.splitlines()[0], "holds no request"),
        ("a.csv", LENGTHS.replace("918", "-1"), r"line 2, column 2 \(num_decode_tokens\)"),
        ("a.jsonl", MOONCAKE + '{"timestamp": 1,,}\n', r"line 3, column 17: no JSON"),
        ("a.jsonl", '{"input_length": 3}\n', r"line 1: no output_length, timestamp"),
        ("a.jsonl", MOONCAKE.replace("512", '"x"'), r"line 2, column input_length: 'x'"),
        ("a.jsonl", MOONCAKE.replace("[0, 1]", "[0]"), r"line 1, column hash_ids: 700 tokens need 2 ids"),
        ("a.jsonl", MOONCAKE.replace("3000", "true"), r"line 2, column timestamp"),
        ("a.json", "[[0, 1]]", r"row 1: \[0, 1\] is no"),
        ("a.json", '[[0, 1, 2], ["x", 1, 2]]', r"row 2, column 1 \(arrival\): 'x'"),
        ("a.json", "[[0, 1, null]]", r"row 1, column 3: None"),
        ("a.json", "{}", "expected"),
        ("a.json", "[[0,\n 1, 2],\n oops]", "line 3, column 2: no JSON"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_place(tmp_path, name, text, message):
    with pytest.raises(BadTrace, match=message):
        w.read(put(tmp_path, name, text))


def test_not_text(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(BadTrace, match="not a text file"):
        w.read(path)


# --- the summary ------------------------------------------------------------------------------------------------------------


def test_summary_quantiles_against_the_definition():
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 5000, (401, 2)).tolist()
    s = w.summarise([TraceRequest(i * 0.5, p, o) for i, (p, o) in enumerate(lengths)])
    ordered = sorted(p for p, _ in lengths)
    for percent in (0, 25, 50, 90, 100):  # 401 values: these quantiles are values themselves
        assert s["prompt"][w.QUANTILES.index(percent)] == ordered[percent * 4]
    assert s["rate"] == 2 and s["gap_cv"] == 0 and s["n"] == 401


def test_rank_correlation():
    up = [TraceRequest(0.0, i, i * i) for i in range(1, 50)]
    down = [TraceRequest(0.0, i, 1000 // i) for i in range(1, 50)]
    assert w.summarise(up)["spearman"] == 1 and w.summarise(down)["spearman"] == pytest.approx(-1, abs=0.01)
    assert w.summarise([TraceRequest(0.0, 5, i) for i in range(1, 9)])["spearman"] == 0


def test_shipped_summary_says_what_the_traces_are():
    """Counts and percentiles as computed from the published files by another program."""
    rows = {row["name"]: row for row in w.listing()}
    assert set(rows) == set(w.SOURCES)
    conv, code = rows["azure-conv"], rows["azure-code"]
    assert (conv["count"], code["count"]) == (19_366, 8_819)
    assert [conv[k] for k in ("prompt_p50", "prompt_p90", "prompt_p99")] == pytest.approx([1020, 2734.5, 4142], abs=0.6)
    assert [conv[k] for k in ("output_p50", "output_p90", "output_p99")] == pytest.approx([129, 424, 601], abs=0.6)
    assert conv["rate"] == pytest.approx(5.530, abs=1e-3) and code["gap_cv"] == pytest.approx(13.15, abs=0.01)
    assert rows["sharegpt-8k"]["rate"] is None
    for row in rows.values():
        assert row["licence"] in ("CC-BY-4.0", "Apache-2.0", "MIT") and row["origin"]


def test_samples_follow_the_summary_and_the_seed():
    requests = w.sample("azure-conv", 4000, seed=1)
    assert requests == w.sample("azure-conv", 4000, seed=1) != w.sample("azure-conv", 4000, seed=2)
    assert statistics.median(r.prompt_tokens for r in requests) == pytest.approx(1020, rel=0.05)
    assert statistics.mean(r.output_tokens for r in requests) == pytest.approx(211, rel=0.05)
    assert w.summarise(w.sample("mooncake-synthetic", 4000))["spearman"] == pytest.approx(-0.52, abs=0.04)
    capped = w.sample("sharegpt-8k", 300, max_total=4096)
    assert len(capped) == 300 and max(r.prompt_tokens + r.output_tokens for r in capped) <= 4096
    with pytest.raises(ValueError, match="raise max_total"):
        w.sample("sharegpt-8k", 300, max_total=2)
    with pytest.raises(ValueError, match="unknown workload 'bing'"):
        w.sample("bing", 1)


def test_write_summaries_makes_the_shipped_form(tmp_path):
    path = w.write_summaries({"azure-conv": put(tmp_path, "a.csv", AZURE)}, tmp_path / "out.json")
    body = json.loads(path.read_text())
    assert body["q"] == w.QUANTILES and body["traces"]["azure-conv"]["licence"] == "CC-BY-4.0"
    assert body["traces"]["azure-conv"]["n"] == 3


def test_load_takes_a_name_or_a_file(tmp_path):
    drawn = w.load("azure-conv", 1000)
    assert len(drawn) == 1000 and 1000 / drawn[-1].arrival == pytest.approx(5.53, rel=0.15)
    assert len(w.load(put(tmp_path, "a.csv", AZURE), 2)) == 2


# --- arrivals -----------------------------------------------------------------------------------------------------------------

MANY = [TraceRequest(0.0, 10, 5)] * 20_000


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gamma_gaps_have_the_rate_and_the_cv(cv):
    gaps = np.diff([r.arrival for r in w.gamma(MANY, 4.0, cv, seed=5)])
    assert 1 / gaps.mean() == pytest.approx(4.0, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_arrivals_are_seeded_and_scale_with_the_rate():
    a, b = w.poisson(MANY, 2.0, seed=1), w.poisson(MANY, 4.0, seed=1)
    assert [r.arrival for r in a] == pytest.approx([2 * r.arrival for r in b])
    assert a == w.poisson(MANY, 2.0, seed=1) != w.poisson(MANY, 2.0, seed=2)
    assert w.bursts(MANY[:5], 2, 10.0) == [TraceRequest(t, 10, 5) for t in (0.0, 0.0, 10.0, 10.0, 20.0)]
    late = [TraceRequest(5.0, 1, 1), TraceRequest(9.0, 1, 1)]
    assert [r.arrival for r in w.recorded(late, speed=2)] == [0.0, 2.0]
    for call in (lambda: w.poisson(MANY, 0), lambda: w.bursts(MANY, 0, 1), lambda: w.recorded(late, 0)):
        with pytest.raises(ValueError):
            call()


def test_closed_loop_asks_again_when_answered():
    requests = [TraceRequest(99.0, i, 1) for i in range(1, 6)]
    loop = ClosedLoop(requests, users=2)
    assert [(r.arrival, r.prompt_tokens) for r in loop.start()] == [(0.0, 1), (0.0, 2)]
    assert [loop.finished(t).arrival for t in (3.0, 3.0, 7.5)] == [3.0, 3.0, 7.5]
    assert loop.finished(9.0) is None
    thinking = ClosedLoop(requests, users=1, think=2.0, seed=1)
    thinking.start()
    assert thinking.finished(1.0).arrival > 1.0


def test_prompt_ids_share_what_the_hashes_share():
    a = w.prompt_ids(TraceRequest(0, 1100, 1, (7, 8, 9)), 0)
    b = w.prompt_ids(TraceRequest(0, 1500, 1, (7, 8, 10)), 1)
    assert (len(a), len(b)) == (1100, 1500)
    assert a[:1024] == b[:1024] and a[:1025] != b[:1025]
    plain = [w.prompt_ids(TraceRequest(0, 40, 1), n) for n in (1, 2)]
    assert plain[0][0] != plain[1][0] and len(plain[0]) == 40


# --- download -------------------------------------------------------------------------------------------------------------------


class Answer(io.BytesIO):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def test_download_reads_before_it_keeps(tmp_path, monkeypatch):
    asked = []

    def urlopen(url, timeout):
        asked.append(url)
        return Answer(AZURE.encode())

    monkeypatch.setattr(w.urllib.request, "urlopen", urlopen)
    path = w.download("azure-conv", tmp_path)
    assert len(w.read(path)) == 3 and asked == [w.SOURCES["azure-conv"].url]
    assert w.download("azure-conv", tmp_path) == path and len(asked) == 1  # there already

    monkeypatch.setattr(w.urllib.request, "urlopen", lambda url, timeout: Answer(b"<html>not found</html>"))
    with pytest.raises(DownloadFailed, match="azure-code could not be fetched.*line 1"):
        w.download("azure-code", tmp_path)

    def offline(url, timeout):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(w.urllib.request, "urlopen", offline)
    with pytest.raises(DownloadFailed, match=r"no network.*sample\('azure-code', n\)"):
        w.download("azure-code", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["azure-conv.csv"]
