"""Writes data/recorded/<gpu>/MANIFEST.json: size and SHA-256 of every recorded file beside it. --check compares instead."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

RECORDED = Path(__file__).resolve().parent.parent / "data" / "recorded"
MOST_BYTES = 3_000_000  # of one folder


def manifest(folder: Path) -> dict:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "MANIFEST.json")
    return {
        p.relative_to(folder).as_posix(): {
            "bytes": p.stat().st_size,
            "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
        }
        for p in files
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check, bad = parser.parse_args().check, []
    for folder in sorted(p for p in RECORDED.iterdir() if p.is_dir()):
        found, path = manifest(folder), folder / "MANIFEST.json"
        total = sum(f["bytes"] for f in found.values())
        if total > MOST_BYTES:
            bad.append(f"{folder.name}: {total} bytes, at most {MOST_BYTES}")
        if not check:
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        elif not path.exists() or json.loads(path.read_text(encoding="utf-8")) != found:
            bad.append(f"{folder.name}: MANIFEST.json does not say what is there: run tools/make_manifest.py")
        print(f"{folder.name}: {len(found)} files, {total} bytes")
    print("\n".join(bad), file=sys.stderr)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
