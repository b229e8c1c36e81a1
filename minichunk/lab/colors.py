"""One colour, one hatch and one letter a request, the same in every view, so that colour is never the only mark.

Seven colours of Okabe and Ito ("Color Universal Design", 2008; black is left to the system's own things) and eight
hatches: neither count divides the other, so the first 56 requests all look different, and neighbours differ twice.
"""

from __future__ import annotations

from minichunk.record import Run

LIGHT = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
DARK = ("#E69F00", "#7CC8F2", "#19B98C", "#F0E442", "#4C9FE0", "#EE7733", "#E09CC1")  # the dark ones lifted
HATCHES = ("", "/", "\\", "x", "-", "|", "+", ".")  # plotly's pattern_shape names
THEMES = {
    "light": {
        "colors": LIGHT,
        "ink": "#1b1f24",
        "soft": "#59636e",
        "hatch": "#1b1f24",
        "paper": "#ffffff",
        "line": "#d1d9e0",
        "hidden": "#d1d9e0",
        "alarm": "#b3261e",
    },
    "dark": {
        "colors": DARK,
        "ink": "#e6edf3",
        "soft": "#9aa4af",
        "hatch": "#e6edf3",
        "paper": "#111418",
        "line": "#3d444d",
        "hidden": "#3d444d",
        "alarm": "#ff8a80",
    },
}
# A figure is data: it does not learn whether the notebook around it is light or dark. So it has no paper of its own, and
# a grey and a red as far from white as from black.
BOTH = {
    "colors": LIGHT,
    "ink": "#757c84",
    "soft": "#757c84",
    "hatch": "#1b1f24",
    "paper": "rgba(0,0,0,0)",
    "line": "rgba(128,128,128,0.35)",
    "hidden": "#a3abb3",  # opaque: plotly picks black or white for the text on it
    "alarm": "#dd3f37",
}


def palette(theme: str) -> dict:
    """The colours of a theme: "light", "dark", or "both", which reads on either. Raises ValueError for another name."""
    looks = {**THEMES, "both": BOTH}
    if theme not in looks:
        raise ValueError(f"theme must be both, light or dark, got {theme!r}")
    return looks[theme]


def color(index: int, theme: str = "both") -> str:
    """Fill of the index-th request of a run."""
    colors = palette(theme)["colors"]
    return colors[index % len(colors)]


def hatch(index: int) -> str:
    """Plotly pattern_shape of the index-th request of a run."""
    return HATCHES[index % len(HATCHES)]


def letter(index: int) -> str:
    """0 → A, 25 → Z, 26 → AA, 27 → AB …"""
    out = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        out = chr(65 + rest) + out
    return out


def letters(run: Run) -> dict:
    """{request id: letter} in the order in which the run knows its requests.

    Ids that are letters already (all str, at most two characters) stay as they are.
    """
    ids = list(run.requests)
    if all(isinstance(i, str) and 0 < len(i) <= 2 for i in ids):
        return {i: i for i in ids}
    return {id: letter(n) for n, id in enumerate(ids)}
