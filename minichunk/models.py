"""Names → model and tokenizer.

    smollm2         SmolLM2-135M-Instruct, the default: the same weights on every machine, fetched once
    tiny            two layers, random, for tests: no download (tiny:mha, tiny:gemma2, … are its variants)
    random:NAME     a published shape with random weights, for timing
    hub id, folder  safetensors or GGUF
    model object    a transformers model, run as a twin

Whatever comes in is checked and probed (families.py) before anybody computes with it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from minichunk.attention.base import LayerSpec
from minichunk.families import check_family, probe, text_config, twin
from minichunk.shapes import RANDOM, TINY, random_model, tiny_model, tiny_tokenizer
from minichunk.smollm2 import ModelError, ensure, is_ready

__all__ = ["Loaded", "ModelError", "ensure", "is_ready", "load"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready for the engine.

    model: the twin, on its device and in its dtype, in eval mode · tokenizer: None where nobody gave one ·
    eos_token_ids: where transformers' generate would stop · max_model_len: None where the config names no limit ·
    layers: what each attention layer asked for, in order.
    """

    model: PreTrainedModel
    tokenizer: Any
    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int | None
    layers: list[LayerSpec]


def load(
    model: str | os.PathLike | PreTrainedModel,
    *,
    tokenizer: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Loaded:
    """Loads, checks and probes the model of a name (see the top of this file), or the model object that it is given.

    tokenizer: used instead of the model's own. device, dtype: None means CPU and float32 for a name, the object's own
    for a model object, which is never moved or cast. seed: of the random weights of tiny and random:…
    Raises ModelError when it cannot be loaded, families.UnsupportedModel when it would come out wrong.
    """
    if not isinstance(model, (str, os.PathLike)):
        return _finish(_checked_object(model, device, dtype), tokenizer, type(model).__name__)
    device, dtype = torch.device(device or "cpu"), dtype or torch.float32
    name, own_tokenizer = os.fspath(model), None
    kind, _, variant = name.partition(":")
    if kind == "tiny":
        own, own_tokenizer = tiny_model(variant or "llama", seed, device, dtype), tiny_tokenizer()
    elif kind == "random":
        own = random_model(variant, seed, device, dtype)
    else:
        own, own_tokenizer = _from_folder(*_locate(name), device, dtype, tokenizer is None)
    return _finish(own, tokenizer if tokenizer is not None else own_tokenizer, name)


def _checked_object(model: Any, device: torch.device | str | None, dtype: torch.dtype | None) -> PreTrainedModel:
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"a model must be a name, a folder or a transformers model, got {type(model).__name__} "
            "(an adapter must be merged into its model first: model.merge_and_unload())"
        )
    if model.training:
        raise ModelError("the model is in training mode, where dropout changes its answers: call model.eval() first")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or torch.device("meta") in devices:
        raise ModelError(f"the model must lie on one device, its weights lie on {', '.join(sorted(map(str, devices)))}")
    here = devices.pop()
    if device is not None and not _same_device(torch.device(device), here):
        raise ModelError(
            f"the model lies on {here}, but device={device} was asked for: move it with model.to('{device}')"
        )
    if dtype is not None and dtype is not model.dtype:
        raise ModelError(
            f"the model is in {model.dtype}, but dtype={dtype} was asked for: cast it with model.to({dtype})"
        )
    return model


def _same_device(wanted: torch.device, here: torch.device) -> bool:
    return wanted.type == here.type and wanted.index in (None, here.index)


def _finish(own: PreTrainedModel, tokenizer: Any, name: str) -> Loaded:
    check_family(own)
    copied = twin(own)
    text = text_config(own)
    return Loaded(
        model=copied,
        tokenizer=tokenizer,
        name=name,
        vocab_size=own.get_output_embeddings().weight.shape[0],
        eos_token_ids=_eos_token_ids(own, tokenizer),
        max_model_len=getattr(text, "max_position_embeddings", None),
        layers=probe(copied),
    )


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """generate stops at its generation_config's ids alone; the next places speak only where that one is silent."""
    generation = getattr(model, "generation_config", None)
    for holder in (generation, model.config, text_config(model), tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


# ---- a folder, or a repository of the hub ------------------------------------------------------------------------------

_NAMES = f"smollm2, tiny, {', '.join(f'tiny:{v}' for v in TINY)}, {', '.join(f'random:{v}' for v in RANDOM)}"
_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]  # what a repository is asked for
_HUB_SECONDS = 5.0


def _locate(name: str) -> tuple[Path, str | None]:
    """(folder, GGUF file in it or None) of a model that is not made here."""
    if name == "smollm2":
        return ensure(name), None
    path = Path(name).expanduser()
    if path.is_dir():
        return path, None
    if path.suffix == ".gguf" and path.is_file():
        return path.parent, path.name
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _from_hub(name, _FILES), None
    if match := re.fullmatch(r"([\w.-]+/[\w.-]+)/([\w./-]+\.gguf)", name):
        repository, file = match.groups()
        return _from_hub(repository, [file]), file
    raise ModelError(
        f"no model {name!r}. There are {_NAMES}; a folder with safetensors, a .gguf file, a hub id (owner/name, or "
        "owner/name/file.gguf), or a transformers model object"
    )


def _from_hub(repository: str, patterns: list[str]) -> Path:
    """The repository's folder in the hub's cache, brought up to date if the hub answers within seconds."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        # Asked once with a time limit of its own, before the download that would try again and again.
        revision = HfApi().model_info(repository, timeout=_HUB_SECONDS).sha
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=patterns, etag_timeout=_HUB_SECONDS)
        )
    except Exception as error:  # the hub's client changes its network library and so the exceptions' class
        try:
            return Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=True))
        except FileNotFoundError:
            raise ModelError(
                f"{repository} is not on this machine and the Hugging Face hub did not give it ({_first_line(error)}). Check "
                "the name, the network and, where the model is gated, `hf auth login`; or pass a folder that holds it"
            ) from error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers shows no bar inside, and afterwards what it showed before; downloads have their own bars.

    A hook, since transformers' disable_progress_bar also switches the hub's bars, for the whole process.
    """
    before = transformers_logging.set_tqdm_hook(lambda factory, args, kwargs: transformers_logging.EmptyTqdm(*args))
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def _from_folder(
    folder: Path, gguf: str | None, device: torch.device, dtype: torch.dtype, with_tokenizer: bool
) -> tuple[PreTrainedModel, Any]:
    names = {path.name for path in folder.iterdir()}
    if gguf is None and not any(name.endswith(".safetensors") for name in names):
        ggufs = sorted(name for name in names if name.endswith(".gguf"))
        if len(ggufs) != 1:
            raise ModelError(
                f"{folder} holds no .safetensors file and {len(ggufs)} .gguf files: pass a folder of safetensors, or the path "
                "of one .gguf file. Pickled weights (.bin, .pt) are never loaded, since they can run code: convert them with "
                "save_pretrained"
            )
        gguf = ggufs[0]
    asked = dict(local_files_only=True, trust_remote_code=False)
    weights = {}
    if gguf:  # unpacked at once: the engine computes with dense weights
        asked["gguf_file"], weights["quantization_config"] = gguf, GgufConfig(dequantize=True)
    try:
        with _no_progress_bar():
            own, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **weights, **asked
            )
        tokenizer = None
        if with_tokenizer and (
            gguf or names & {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"}
        ):
            tokenizer = AutoTokenizer.from_pretrained(folder, **asked)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise ModelError(f"transformers cannot load {folder / (gguf or '')}: {_first_line(error)}") from error
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info.get("mismatched_keys", ()))
    if absent:
        raise ModelError(
            f"{folder} lacks weights, which would be random: {', '.join(absent[:5])} ({len(absent)} in all)"
        )
    return own.to(device).eval(), tokenizer
