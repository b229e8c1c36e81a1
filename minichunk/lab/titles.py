"""Where a figure's numbers come from, in words: every view carries this line."""

from __future__ import annotations

from minichunk.record import Run


def provenance(run: Run) -> str:
    """ "RECORDED h200 2026-11-29 · graph · 4 threads · policy mixed · YOUR scheduler · NOISY", as far as run.meta says it.

    meta read: source, mode ("eager", "graph"), threads, policy, code ("YOUR", "REFERENCE", or a line of its own such as
    "REFERENCE packer"), noisy. A reference says that the learner's own code is not finished.
    """
    meta = run.meta
    parts = [str(meta.get("source") or "source unknown")]
    if meta.get("mode"):
        parts.append(str(meta["mode"]))
    if meta.get("threads"):
        parts.append(f"{meta['threads']} thread{'s' * (meta['threads'] != 1)}")
    if meta.get("policy"):
        parts.append(f"policy {meta['policy']}")
    if meta.get("code"):
        code = f"{meta['code']} scheduler" if meta["code"] in ("YOUR", "REFERENCE") else str(meta["code"])
        parts.append(code + " (yours not finished)" * code.startswith("REFERENCE"))
    if meta.get("noisy"):
        parts.append("NOISY")
    return " · ".join(parts)
