"""Lines of code: those with a token that is neither comment nor docstring. `python tools/code_lines.py [FILES]`."""

import ast
import io
import sys
import tokenize
from pathlib import Path

CORE = "request text blocks scheduler packing runner sampling engine record".split()


def code_lines(path: Path) -> int:
    source = path.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    doc: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            doc.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - doc)


if __name__ == "__main__":
    files = [Path(a) for a in sys.argv[1:]] or [Path("minichunk") / f"{name}.py" for name in CORE]
    counts = {str(path): code_lines(path) for path in files}
    for name, count in counts.items():
        print(f"{count:5}  {name}")
    print(f"{sum(counts.values()):5}  in all")
