"""A run as one page that works from a file, with the network off: the scrubber's own module and style, and the data."""

from __future__ import annotations

import html
from pathlib import Path

from minichunk.lab import kit, scrubber
from minichunk.record import Run

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0; padding: 16px; background: #f6f8fa; }}
main {{ max-width: 1240px; margin: 0 auto; }}
pre {{ white-space: pre-wrap; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #0b0d10; color: #e6edf3; }} }}
{css}
</style>
</head>
<body class="mc-page">
<main><div id="scrubber"><pre>{text}</pre></div></main>
<script type="text/plain" id="data">{data}</script>
<script type="module">
{module}
mountPage(document.getElementById("scrubber"), document.getElementById("data").textContent);
</script>
</body>
</html>
"""


def to_html(run: Run | tuple[Run, Run], path: str | Path, slo: float | None = None) -> Path:
    """Writes the scrubber over a run (or over two) to `path`. Without JavaScript the first step stands there as text."""
    runs = run if isinstance(run, tuple) else (run,)
    page = PAGE.format(
        title=html.escape(f"minichunk: {runs[0].meta.get('model', 'a run')}, {len(runs[0].steps)} steps"),
        css=kit.style("scrubber"),
        text=html.escape("\n\n".join(scrubber.text(r, 0) for r in runs)),
        data=scrubber.encoded(runs, slo),
        module=kit.module("scrubber"),
    )
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path
