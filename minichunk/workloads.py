"""Request traces: who asks when, how long the prompt is, how long the answer.

Three ways to one list of `TraceRequest`:
    read(path)            a published file (Azure 2023, Mooncake, Sarathi-Serve and Vidur length files) or one we saved
    download(name, …)     fetches a published file first; nothing is fetched unless you call it
    sample(name, n, seed) draws lengths from data/length_quantiles.json, our own summary of those files, offline

and four ways to say when they arrive: `recorded`, `poisson`, `gamma`, `bursts`; `ClosedLoop` lets the answers decide.
All that is random takes a seed.
"""

from __future__ import annotations

import csv
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np

from minichunk.paths import data_path
from minichunk.record import BadRunFile, Run


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """arrival in seconds from the start; lengths in tokens. block_hashes: one id per `HASH_BLOCK` prompt tokens, equal
    ids mean an equal prefix (Mooncake)."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] | None = None


HASH_BLOCK = 512


class BadTrace(ValueError):
    """The file is not a trace that minichunk reads; the message names line and column."""


class DownloadFailed(RuntimeError):
    """The file could not be fetched; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """A published trace: where it is, under which licence, and what it holds."""

    name: str
    url: str
    licence: str
    origin: str
    arrivals: bool


_GITHUB = "https://raw.githubusercontent.com/"
_AZURE = "Azure/AzurePublicDataset, 2023 LLM inference trace (Patel et al., Splitwise, ISCA'24)"
_MOONCAKE = "kvcache-ai/Mooncake (Qin et al., FAST'25)"
SOURCES = {
    source.name: source
    for source in [
        Source("azure-conv", _GITHUB + "Azure/AzurePublicDataset/master/data/AzureLLMInferenceTrace_conv.csv", "CC-BY-4.0", _AZURE, True),
        Source("azure-code", _GITHUB + "Azure/AzurePublicDataset/master/data/AzureLLMInferenceTrace_code.csv", "CC-BY-4.0", _AZURE, True),
        Source("mooncake-conversation", _GITHUB + "kvcache-ai/Mooncake/main/FAST25-release/traces/conversation_trace.jsonl", "Apache-2.0", _MOONCAKE, True),
        Source("mooncake-synthetic", _GITHUB + "kvcache-ai/Mooncake/main/FAST25-release/traces/synthetic_trace.jsonl", "Apache-2.0", _MOONCAKE, True),
        Source("sharegpt-8k", _GITHUB + "microsoft/sarathi-serve/niyama_asplos2026/data/processed_traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv", "Apache-2.0", "microsoft/sarathi-serve, ShareGPT cut to 8,192 tokens (Agrawal et al., OSDI'24)", False),
        Source("arxiv-4k", _GITHUB + "microsoft/vidur/main/data/processed_traces/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv", "MIT", "microsoft/vidur, arXiv summarisation cut to 4,096 tokens (Agrawal et al., MLSys'24)", False),
    ]
}  # fmt: skip


def source_named(name: str) -> Source:
    if name not in SOURCES:
        raise ValueError(f"unknown workload {name!r}; there are {', '.join(SOURCES)}")
    return SOURCES[name]


# --- files --------------------------------------------------------------------------------------------------------------


def read(path: str | Path) -> list[TraceRequest]:
    """Reads a trace; the format is known from its header (csv) or its ending (.jsonl, .json, .json.gz: a saved Run).

    Files without arrivals get arrival 0 for all. Raises BadTrace with line and column, FileNotFoundError.
    """
    path = Path(path)
    if path.suffix == ".gz":
        return _read_run(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadTrace(f"{path}: not a text file ({error})") from error
    if path.suffix == ".jsonl":
        requests = _read_mooncake(path, text)
    elif path.suffix == ".json":
        requests = _read_triples(path, text)
    else:
        requests = _read_csv(path, text)
    if not requests:
        raise BadTrace(f"{path}: holds no request")
    late = next((i for i in range(1, len(requests)) if requests[i].arrival < requests[i - 1].arrival), None)
    if late is not None:
        raise BadTrace(f"{path}: request {late + 1} arrives before the one above it; sort the file by time")
    return requests


def save(requests: Sequence[TraceRequest], path: str | Path) -> Path:
    """Writes [[arrival, prompt tokens, output tokens], …] as JSON; `read` takes it back. Block hashes are not kept."""
    rows = ",\n ".join(json.dumps([r.arrival, r.prompt_tokens, r.output_tokens]) for r in requests)
    path = Path(path)
    path.write_text(f"[{rows}]\n", encoding="utf-8")
    return path


def _read_csv(path: Path, text: str) -> list[TraceRequest]:
    lines = csv.reader(text.splitlines())
    header = next(lines, [])
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(header):
        time, prompt, output = (header.index(n) for n in ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
    elif {"num_prefill_tokens", "num_decode_tokens"} <= set(header):
        time, prompt, output = None, header.index("num_prefill_tokens"), header.index("num_decode_tokens")
    else:
        raise BadTrace(
            f"{path}, line 1: the header {','.join(header)[:80]!r} is none that minichunk reads; it knows "
            "TIMESTAMP,ContextTokens,GeneratedTokens (Azure) and num_prefill_tokens,num_decode_tokens (Sarathi-Serve, Vidur)"
        )
    requests, first = [], None
    for row in lines:
        if not row:
            continue
        where = f"{path}, line {lines.line_num}"
        if len(row) != len(header):
            raise BadTrace(f"{where}: {len(row)} columns, the header has {len(header)}")
        arrival = 0.0
        if time is not None:
            stamp = _timestamp(row[time], f"{where}, column {time + 1} (TIMESTAMP)")
            first = first or stamp
            arrival = (stamp[0] - first[0]).total_seconds() + stamp[1] - first[1]
        lengths = [_count(row[c], f"{where}, column {c + 1} ({header[c]})") for c in (prompt, output)]
        requests.append(TraceRequest(arrival, *lengths))
    return requests


def _timestamp(text: str, where: str) -> tuple[datetime, float]:
    """Whole seconds and the fraction: Azure's stamps have seven digits, datetime keeps six."""
    whole, _, digits = text.strip().partition(".")
    try:
        return datetime.strptime(whole, "%Y-%m-%d %H:%M:%S"), float(f"0.{digits or 0}")
    except ValueError as error:
        raise BadTrace(f"{where}: {text!r} is no time like 2023-11-16 18:15:46.6805900") from error


def _count(value, where: str) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not number >= 1 or number != int(number):
        raise BadTrace(f"{where}: {value!r} is no whole number of at least 1")
    return int(number)


def _parse(text: str, where: str, line: int = 1):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadTrace(
            f"{where}, line {line + error.lineno - 1}, column {error.colno}: no JSON ({error.msg})"
        ) from error


def _read_mooncake(path: Path, text: str) -> list[TraceRequest]:
    requests = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        row, where = _parse(line, str(path), number), f"{path}, line {number}"
        missing = {"timestamp", "input_length", "output_length"} - (set(row) if isinstance(row, dict) else set())
        if missing:
            raise BadTrace(
                f"{where}: no {', '.join(sorted(missing))} (Mooncake's format has timestamp, input_length, output_length)"
            )
        prompt, output = (_count(row[n], f"{where}, column {n}") for n in ("input_length", "output_length"))
        if isinstance(row["timestamp"], bool) or not isinstance(row["timestamp"], (int, float)) or row["timestamp"] < 0:
            raise BadTrace(f"{where}, column timestamp: {row['timestamp']!r} is no number of milliseconds")
        hashes = row.get("hash_ids")
        if hashes is not None and (not isinstance(hashes, list) or len(hashes) != -(-prompt // HASH_BLOCK)):
            raise BadTrace(
                f"{where}, column hash_ids: {prompt} tokens need {-(-prompt // HASH_BLOCK)} ids of {HASH_BLOCK} tokens each"
            )
        requests.append(TraceRequest(row["timestamp"] / 1e3, prompt, output, None if hashes is None else tuple(hashes)))
    return requests


def _read_triples(path: Path, text: str) -> list[TraceRequest]:
    rows = _parse(text, str(path))
    if not isinstance(rows, list):
        raise BadTrace(f"{path}, line 1: expected [[arrival, prompt tokens, output tokens], …]")
    requests = []
    for i, row in enumerate(rows):
        where = f"{path}, row {i + 1}"
        if not isinstance(row, list) or len(row) != 3:
            raise BadTrace(f"{where}: {row!r} is no [arrival, prompt tokens, output tokens]")
        if isinstance(row[0], bool) or not isinstance(row[0], (int, float)) or not 0 <= row[0] < math.inf:
            raise BadTrace(f"{where}, column 1 (arrival): {row[0]!r} is no number of seconds")
        requests.append(
            TraceRequest(float(row[0]), *(_count(v, f"{where}, column {c}") for c, v in ((2, row[1]), (3, row[2]))))
        )
    return requests


def _read_run(path: Path) -> list[TraceRequest]:
    """The requests of a Run (record.py), from the first one's arrival on."""
    try:
        records = sorted(Run.load(path).requests.values(), key=lambda r: r.arrival)
    except BadRunFile as error:
        raise BadTrace(str(error)) from error
    if not records:
        raise BadTrace(f"{path}: holds no request")
    if not all(r.output_ids for r in records):
        raise BadTrace(f"{path}: holds a request without an answer, so its length is unknown")
    return [TraceRequest(r.arrival - records[0].arrival, len(r.prompt_ids), len(r.output_ids)) for r in records]


def download(name: str, folder: str | Path = ".", timeout: float = 30) -> Path:
    """Fetches the published file into `folder` and returns its path; one that is there already is kept.

    The file is read before it gets its name, so a broken download leaves nothing. Raises DownloadFailed.
    """
    source = source_named(name)
    path = Path(folder) / f"{name}{Path(source.url).suffix}"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{os.getpid()}.part{path.suffix}")
    try:
        with urllib.request.urlopen(source.url, timeout=timeout) as answer:
            part.write_bytes(answer.read())
        read(part)
        os.replace(part, path)
    except (urllib.error.URLError, TimeoutError, OSError, BadTrace) as error:
        raise DownloadFailed(
            f"{name} could not be fetched from {source.url} ({error}). Fetch the file another way and give its path, "
            f"or use the summary that comes with minichunk: sample({name!r}, n)"
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return path


# --- our own summary -----------------------------------------------------------------------------------------------------

QUANTILES = [*np.arange(0, 100, 0.5).tolist(), 99.9, 100.0]  # percent


def summarise(requests: str | Path | Iterable[TraceRequest]) -> dict:
    """Count, mean, quantiles of both lengths, their rank correlation, and the arrivals' rate and CV, of a trace."""
    requests = read(requests) if isinstance(requests, (str, Path)) else list(requests)
    lengths = {
        "prompt": np.array([r.prompt_tokens for r in requests]),
        "output": np.array([r.output_tokens for r in requests]),
    }
    out: dict = {"n": len(requests)}
    for name, values in lengths.items():
        out[name] = [round(q) for q in np.percentile(values, QUANTILES).tolist()]
        out[f"{name}_mean"] = round(float(values.mean()), 2)
    out["spearman"] = round(_spearman(lengths["prompt"], lengths["output"]), 4)
    gaps = np.diff([r.arrival for r in requests])
    if gaps.sum() > 0:
        out["rate"] = round(len(gaps) / float(gaps.sum()), 4)
        out["gap_cv"] = round(float(gaps.std() / gaps.mean()), 3)
    return out


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    def ranks(values):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        last = np.cumsum(counts)
        return (last - (counts - 1) / 2)[inverse]

    if len(set(a.tolist())) < 2 or len(set(b.tolist())) < 2:
        return 0.0
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


@cache
def summaries() -> dict[str, dict]:
    """data/length_quantiles.json: {name: what `summarise` says, with licence and origin}."""
    return json.loads(data_path("length_quantiles.json").read_text(encoding="utf-8"))["traces"]


def write_summaries(paths: dict[str, str | Path], out: str | Path) -> Path:
    """Computes data/length_quantiles.json anew from the published files, {name: path}."""
    lines = []
    for name, path in paths.items():
        source = source_named(name)
        body = {"licence": source.licence, "origin": source.origin, "url": source.url, **summarise(path)}
        lines.append(f"  {json.dumps(name)}: {json.dumps(body)}")
    about = (
        "Lengths in tokens at the quantiles q (percent) of public traces, computed by minichunk.workloads.write_summaries. "
        "No request of a trace is in this file. Each trace's licence and origin stand beside it."
    )
    text = (
        f'{{\n "about": {json.dumps(about)},\n "q": {json.dumps(QUANTILES)},\n "traces": {{\n'
        + ",\n".join(lines)
        + "\n }\n}\n"
    )
    Path(out).write_text(text, encoding="utf-8")
    summaries.cache_clear()
    return Path(out)


def sample(name: str, n: int, seed: int = 0, max_total: int | None = None) -> list[TraceRequest]:
    """`n` requests with lengths like those of the trace `name`, all at arrival 0: prompt and output from their own
    quantiles, joined so that their rank correlation is the trace's (a Gaussian copula).

    max_total: draws again until prompt + output is at most this (ValueError when that hardly ever happens).
    """
    source_named(name)
    summary, rng = summaries()[name], np.random.default_rng(seed)
    rho = 2 * math.sin(math.pi * summary["spearman"] / 6)
    phi = np.vectorize(NormalDist().cdf, otypes=[float])
    found: list[TraceRequest] = []
    for _ in range(100):
        a, b = rng.standard_normal((2, max(n, 1)))
        percent = 100 * phi(a), 100 * phi(rho * a + math.sqrt(1 - rho * rho) * b)
        prompt, output = (np.interp(p, QUANTILES, summary[side]) for p, side in zip(percent, ("prompt", "output")))
        for p, o in zip(prompt, output):
            request = TraceRequest(0.0, max(1, round(p)), max(1, round(o)))
            if max_total is None or request.prompt_tokens + request.output_tokens <= max_total:
                found.append(request)
        if len(found) >= n:
            return found[:n]
    raise ValueError(f"only {len(found)} of {100 * n} draws of {name} have at most {max_total} tokens; raise max_total")


def listing() -> list[dict]:
    """A row per workload: name, count, P50/P90/P99 of prompt and output, rate and gap CV (None without), licence, origin."""
    return [listing_row(name, summary) for name, summary in summaries().items()]


def listing_row(name: str, summary: dict) -> dict:
    row = {"name": name, "count": summary["n"]}
    for side in ("prompt", "output"):
        for percent in (50, 90, 99):
            row[f"{side}_p{percent}"] = summary[side][QUANTILES.index(percent)]
    return row | {key: summary.get(key) for key in ("rate", "gap_cv", "licence", "origin")}


def load(trace: str | Path, n: int | None = None, seed: int = 0) -> list[TraceRequest]:
    """The first `n` requests of a file, or `n` (default 2,000) drawn from the summary of that name, with Poisson
    arrivals at the trace's own rate (1 a second where it has none)."""
    if str(trace) not in SOURCES:
        return read(trace)[:n]
    requests = sample(str(trace), 2000 if n is None else n, seed)
    return poisson(requests, summaries()[str(trace)].get("rate", 1.0), seed)


# --- arrivals ------------------------------------------------------------------------------------------------------------


def recorded(requests: Sequence[TraceRequest], speed: float = 1.0) -> list[TraceRequest]:
    """The file's own arrivals from 0, `speed` times as fast."""
    if not speed > 0:
        raise ValueError(f"speed must be above 0, got {speed}")
    first = requests[0].arrival if requests else 0.0
    return [replace(r, arrival=(r.arrival - first) / speed) for r in requests]


def poisson(requests: Sequence[TraceRequest], rate: float, seed: int = 0) -> list[TraceRequest]:
    """Independent arrivals, `rate` a second: exponential gaps."""
    return gamma(requests, rate, 1.0, seed)


def gamma(requests: Sequence[TraceRequest], rate: float, cv: float, seed: int = 0) -> list[TraceRequest]:
    """Gamma-distributed gaps, mean 1/rate, coefficient of variation `cv`: below 1 even, 1 Poisson, above 1 bursty.

    The same seed gives the same gaps at every rate, only scaled, so that two rates are compared on one pattern.
    """
    if not (rate > 0 and cv > 0):
        raise ValueError(f"rate and cv must be above 0, got {rate} and {cv}")
    gaps = np.random.default_rng(seed).gamma(1 / cv**2, cv**2, len(requests)) / rate
    return [replace(r, arrival=t) for r, t in zip(requests, np.cumsum(gaps).tolist())]


def bursts(requests: Sequence[TraceRequest], size: int, every: float) -> list[TraceRequest]:
    """`size` requests at once, every `every` seconds."""
    if size < 1 or not every >= 0:
        raise ValueError(f"size must be at least 1 and every at least 0, got {size} and {every}")
    return [replace(r, arrival=i // size * every) for i, r in enumerate(requests)]


class ClosedLoop:
    """`users` people who each ask, wait for the answer, think, and ask again, until the requests run out.

    think: mean seconds of thinking (exponential, seeded); 0 asks again at once.
    """

    def __init__(self, requests: Sequence[TraceRequest], users: int, think: float = 0.0, seed: int = 0):
        if users < 1 or think < 0:
            raise ValueError(f"users must be at least 1 and think at least 0, got {users} and {think}")
        self.requests = list(requests)
        self._thinking = np.random.default_rng(seed).exponential(1.0, len(self.requests)) * think
        self._users, self._next = users, 0

    def start(self) -> list[TraceRequest]:
        """The users' first requests, all at time 0."""
        self._next = min(self._users, len(self.requests))
        return [replace(r, arrival=0.0) for r in self.requests[: self._next]]

    def finished(self, now: float) -> TraceRequest | None:
        """An answer ended at `now`: that user's next request, None when there is none left."""
        if self._next == len(self.requests):
            return None
        request = replace(self.requests[self._next], arrival=now + float(self._thinking[self._next]))
        self._next += 1
        return request


def prompt_ids(request: TraceRequest, number: int) -> list[int]:
    """Token ids for a request whose words are unknown: unlike any other's, except where block hashes say "equal".

    A prefix is compared from its first token on, so one telling token at the head of each hash block is enough.
    """
    if request.block_hashes is None:
        return [number, *[0] * (request.prompt_tokens - 1)]
    ids = [0] * request.prompt_tokens
    for i, block in enumerate(request.block_hashes):
        ids[i * HASH_BLOCK] = block
    return ids
