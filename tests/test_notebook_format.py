"""The form of every notebook: made from its source, clean, and as long as a lesson should be."""

import ast
import importlib.util
import json
import re
from pathlib import Path
from statistics import median

import pytest

from minichunk.lab.checks import Exercise, exercises

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "notebooks" / "source").glob("[0-9][0-9]_*.py"))
VERBS = "build choose compare compute count change drive explain find follow measure name predict read run say show tell trace use write".split()
FORBIDDEN = {
    r"%%capture": "hides errors",
    r"^\s*[!%]\s*pip": "an install that fails does not stop the notebook",
    r"\binteract(ive)?\(": "swallows exceptions",
    r"\bOutput\(": "swallows exceptions",
    r"\binput\(": "stops Run All",
    r"base64": "no inlined pictures",
    r"/root/|/home/|/work/|/tmp/|C:\\": "a path of one machine",
}


def builder():
    spec = importlib.util.spec_from_file_location("build_notebooks", ROOT / "tools" / "build_notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))


def cells(notebook, kind):
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == kind]


def learners(source):
    return ROOT / "notebooks" / source.with_suffix(".ipynb").name


def solutions(source):
    return ROOT / "notebooks" / "solutions" / source.with_suffix(".ipynb").name


each = pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
every = pytest.mark.parametrize("path", [f(s) for s in SOURCES for f in (learners, solutions)], ids=lambda p: f"{p.parent.name}/{p.stem}")  # fmt: skip


def test_there_are_sources():
    assert SOURCES


def test_notebooks_are_what_the_sources_give():
    """`make notebooks` would change nothing, and no notebook lies there without a source."""
    wanted = builder().targets()
    for path, text in wanted.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale: run make notebooks"
    there = {p for folder in ("notebooks", "notebooks/solutions") for p in (ROOT / folder).glob("*.ipynb")}
    assert there == set(wanted)


@every
def test_file_is_canonical_and_clean(path):
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert text == json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    assert len(text) < 100_000
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}, "no widget state"
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [c["id"] for c in notebook["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", i) for i in ids)
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


@every
def test_code_cells_are_short_and_plain(path):
    code = cells(load(path), "code")
    for cell in code:
        assert len(cell.splitlines()) <= 25, cell
        for pattern, why in FORBIDDEN.items():
            assert not re.search(pattern, cell, re.MULTILINE), f"{pattern}: {why}\n{cell}"
        ast.parse(cell)
    assert median(len(c.splitlines()) for c in code) <= 6


@every
def test_length_of_a_lesson(path):
    notebook = load(path)
    words = sum(len(re.findall(r"\w+", c)) for c in cells(notebook, "markdown"))
    assert 20 <= len(notebook["cells"]) <= 35, len(notebook["cells"])
    assert 600 <= words <= 1000, words


@every
def test_title_and_recap(path):
    text = cells(load(path), "markdown")
    title, recap = text[0], text[-1]
    assert title.startswith(f"# {path.name[:2]} · ")
    objectives = re.findall(r"^- \*\*(\w+)\*\*", title, re.MULTILINE)
    assert len(objectives) == 3 and all(verb in VERBS for verb in objectives), objectives
    for row in ("Prerequisites", "Minutes", "Hardware", "Numbers"):
        assert re.search(rf"^\| {row} \| .+ \|$", title, re.MULTILINE), row
    assert re.search(r"\| Numbers \| (live|recorded)", title)
    assert recap.startswith("## Recap") and "**What breaks next.**" in recap
    questions = recap.split("**Three questions**")[1].split("**What breaks next.**")[0]
    assert len(re.findall(r"^\d\. ", questions, re.MULTILINE)) == 3 and questions.count("?") >= 3


@every
def test_pictures_have_alt_text(path):
    for cell in cells(load(path), "markdown"):
        for alt in re.findall(r"!\[(.*?)\]\(", cell):
            assert len(alt.split()) >= 5, alt
        for tag in re.findall(r"<img[^>]*>", cell):
            assert re.search(r'alt="[^"]{20,}"', tag), tag


@each
def test_learners_and_solutions_differ_in_the_fill_ins_alone(source):
    ours, theirs = load(solutions(source))["cells"], load(learners(source))["cells"]
    assert [c["id"] for c in ours] == [c["id"] for c in theirs]
    differ = [("".join(b["source"]), "".join(a["source"])) for a, b in zip(ours, theirs) if a != b]
    starts = [re.search(r"^ *# YOUR CODE ([\d.]+), about \d+ lines?\n *raise NotImplementedError\(\"\1\"\)$", todo, re.MULTILINE) for todo, _ in differ]  # fmt: skip
    assert all(starts) and "YOUR CODE" not in "".join(done for _, done in differ)
    wanted = [id for id, e in exercises().items() if isinstance(e, Exercise) and id[:2] == source.name[:2]]
    assert [m[1] for m in starts] == wanted
    for (todo, done), start in zip(differ, starts):
        assert done.startswith(todo[: start.start()]), "the same head"
    text = "\n".join(cells(load(learners(source)), "code"))
    for id in wanted:
        assert re.search(rf'^(\w+) = lab\.exercise\("{id}", \1\)$', text, re.MULTILINE), id


@each
def test_about_n_lines_is_true(source):
    """Counted from the solution's syntax tree: lines that hold code, without the def."""
    promised = {m[0]: int(m[1]) for m in re.findall(r"# YOUR CODE ([\d.]+), about (\d+) line", "\n".join(cells(load(learners(source)), "code")))}  # fmt: skip
    solved = "\n\n".join(cells(load(solutions(source)), "code"))
    tree = {n.name: n for n in ast.walk(ast.parse(solved)) if isinstance(n, ast.FunctionDef)}
    for id, lines in promised.items():
        body = tree[exercises()[id].name].body
        held = {n.lineno for statement in body for n in ast.walk(statement) if hasattr(n, "lineno")}
        assert abs(len(held) - lines) <= 0.3 * lines, f"{id}: about {lines} promised, {len(held)} counted"


@each
def test_predictions_come_in_pairs_and_before_the_truth(source):
    text = "\n".join(cells(load(learners(source)), "code"))
    asked = re.findall(r'lab\.predict\(\s*"(\w+)"', text)
    shown = re.findall(r'lab\.reveal\(\s*"(\w+)"', text)
    assert sorted(asked) == sorted(set(shown)) and 3 <= len(asked) <= 4
    assert all(id[:2] == source.name[:2] for id in asked)
    for id in asked:
        assert text.index(f'"{id}"') < text.index(f'"{id}"', text.index(f'"{id}"') + 1)
        assert (
            re.search(rf'lab\.predict\(\s*"{id}"', text).start() < re.search(rf'lab\.reveal\(\s*"{id}"', text).start()
        )


def test_builder_cuts_out_exactly_the_solution():
    source = '# %% [markdown]\n"""\n# 99 · T\n"""\n\n# %%\ndef f(x):\n    y = 1\n    # BEGIN SOLUTION 99.1\n    # why\n    z = 2\n\n    return z\n    # END SOLUTION\n'
    todo, done = (json.loads(builder().build(source, "99", solved)) for solved in (False, True))
    assert (
        "".join(todo["cells"][1]["source"])
        == 'def f(x):\n    y = 1\n    # YOUR CODE 99.1, about 2 lines\n    raise NotImplementedError("99.1")'
    )
    assert "".join(done["cells"][1]["source"]) == "def f(x):\n    y = 1\n    # why\n    z = 2\n\n    return z"
    assert "".join(todo["cells"][0]["source"]) == "# 99 · T"
    edited = json.loads(builder().build(source.replace("# 99 · T", "# 99 · U"), "99", False))
    assert edited["cells"][1]["id"] == todo["cells"][1]["id"] and edited["cells"][0]["id"] != todo["cells"][0]["id"]
