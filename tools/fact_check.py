"""docs/fact-check.md from data/claims.json.

    python tools/fact_check.py                 writes docs/fact-check.md
    python tools/fact_check.py --update 48 49  computes the evidence of these claims anew first and keeps it as expected

Read what moved, and whether the reason still holds, before you commit an update.
"""

import argparse
import json
from collections import Counter

from minichunk import claims
from minichunk.paths import data_path

HEAD = """# The fact check

<!-- made by tools/fact_check.py from data/claims.json -->

This course began with a public article about running prompts and decodes in one batch with chunked prefill, FlashAttention
and FlashInfer. It makes {count} claims that can be told apart. Here they are in our own words, each with a verdict. The
number that speaks for or against a claim is computed: the name in the last column is a function of `minichunk/claims.py`,
and `tests/test_claims.py` runs every one and fails when a number moves. Notebook 95 works twelve of them out.

Simulated numbers are estimates on one seed. What a paper printed, or what a document says, is only repeated.

{verdicts}
"""


def document() -> str:
    """docs/fact-check.md."""
    found = claims.load().values()
    counts = Counter(c["verdict"] for c in found)
    lines = ["| verdict | claims |", "|---|---|"]
    lines += [f"| **{v}** {name} | {counts[v]} |" for v, name in claims.VERDICTS.items()]
    out = [HEAD.format(count=len(found), verdicts="\n".join(lines))]
    for part in dict.fromkeys(c["part"] for c in found):
        out += [f"## {part}\n", "| # | claim | verdict | why | sources | evidence |", "|---|---|---|---|---|---|"]
        out += [row(c) for c in found if c["part"] == part]
        out.append("")
    return "\n".join(out)


def row(claim: dict) -> str:
    cells = [
        claim["id"], claim["claim"], f"**{claim['verdict']}** {claims.VERDICTS[claim['verdict']]}", claims.reason(claim["id"]),
        claim["source"], f"{claim['kind']}: `{claim['evidence']}`",
    ]  # fmt: skip
    return "| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |"


def rounded(value):
    """Six digits are more than the tolerance asks for."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def update(ids: list[int]) -> None:
    path = data_path("claims.json")
    file = json.loads(path.read_text(encoding="utf-8"))
    for claim in file["claims"]:
        if claim["id"] in ids:
            new = {name: rounded(value) for name, value in claims.evidence(claim["id"]).items()}
            print(claim["id"], *claims.moved(claim["expect"], new) or ["nothing moved"], sep="\n  ")
            claim["expect"] = new
    lines = ",\n".join("  " + json.dumps(c, ensure_ascii=False) for c in file["claims"])
    about = json.dumps(file["about"], ensure_ascii=False)
    path.write_text(f'{{\n "about": {about},\n "claims": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    claims.load.cache_clear()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=int, nargs="+", default=[], metavar="ID")
    update(parser.parse_args().update)
    path = data_path("claims.json").parents[1] / "docs" / "fact-check.md"
    path.write_text(document(), encoding="utf-8", newline="\n")
    print(f"wrote docs/{path.name}")
