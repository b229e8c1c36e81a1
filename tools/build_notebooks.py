"""One source, two notebooks: notebooks/source/NN_slug.py → notebooks/NN_slug.ipynb and notebooks/solutions/NN_slug.ipynb.

A source is a py:percent file: `# %% [markdown]` before a triple-quoted text, `# %%` before code. Between
`# BEGIN SOLUTION 40.1` and `# END SOLUTION` stands the answer; learners get a comment and NotImplementedError instead.
Run it from anywhere: python tools/build_notebooks.py
"""

import hashlib
import json
import re
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
CELL = re.compile(r"^# %%(?P<kind> \[markdown\])?[^\n]*\n(?P<body>.*?)(?=^# %%|\Z)", re.MULTILINE | re.DOTALL)
SOLUTION = re.compile(
    r"^(?P<indent> *)# BEGIN SOLUTION (?P<id>[\d.]+)\n(?P<body>.*?)^ *# END SOLUTION\n?", re.MULTILINE | re.DOTALL
)


def count_lines(body: str) -> int:
    """Lines of code in a solution: neither blank nor only a comment."""
    return sum(1 for line in body.splitlines() if line.strip() and not line.strip().startswith("#"))


def blank(match: re.Match) -> str:
    indent, number, lines = match["indent"], match["id"], count_lines(match["body"])
    about = f"about {lines} line{'s' * (lines > 1)}"
    return f'{indent}# YOUR CODE {number}, {about}\n{indent}raise NotImplementedError("{number}")\n'


def build(source: str, number: str, solved: bool) -> str:
    """The notebook as canonical JSON. A cell's id is a hash of its source text, so an edit changes that id alone."""
    cells, seen = [], {}
    for match in CELL.finditer(source):
        body = match["body"].strip("\n")
        digest = hashlib.sha256(body.encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell = {"id": f"{number}-{digest}-{seen[digest]}", "metadata": {}}
        if match["kind"]:
            cell |= {"cell_type": "markdown", "source": re.fullmatch(r'r?"""\n?(.*?)\n?"""', body, re.DOTALL)[1]}
        else:
            text = SOLUTION.sub((lambda m: m["body"]) if solved else blank, body + "\n").rstrip("\n")
            cell |= {"cell_type": "code", "source": text, "outputs": [], "execution_count": None}
        cell["source"] = cell["source"].splitlines(keepends=True)
        cells.append(cell)
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def targets(notebooks: Path = NOTEBOOKS) -> dict[Path, str]:
    """{file to write: its text} for every source."""
    out = {}
    for source in sorted((notebooks / "source").glob("[0-9][0-9]_*.py")):
        text, name = source.read_text(encoding="utf-8"), source.with_suffix(".ipynb").name
        out[notebooks / name] = build(text, name[:2], solved=False)
        out[notebooks / "solutions" / name] = build(text, name[:2], solved=True)
    return out


if __name__ == "__main__":
    for path, text in targets().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
        print(path.relative_to(NOTEBOOKS.parent))
