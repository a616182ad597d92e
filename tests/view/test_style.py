"""Tests of the viewer's source: contrast of its colours, and that transcripts can only be inserted as text."""

import re
from itertools import product
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "viewer" / "src"
READABLE = 4.5
"""Contrast that WCAG 2 requires of text (level AA)."""


def read_colours() -> dict[str, tuple[str, str]]:
    """Return the light and the dark value of each colour."""
    style = (SOURCE / "style.css").read_text()
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", style)
    return {name: (light, dark) for name, light, dark in found}


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    high, low = sorted((luminance(one), luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_is_readable_on_its_background(dark: bool) -> None:
    colours = {name: pair[dark] for name, pair in read_colours().items()}
    pairs = [
        *product(("ink", "quiet", "link"), ("bg", "panel", "hover", "code-bg")),
        *((name, f"{name}-bg") for name in ("good", "bad", "warn", "live")),
        ("quiet", "bad-bg"),
        *product(("c1", "c2", "c4"), ("panel", "code-bg")),  # highlighted code
    ]
    found = {pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in pairs}
    assert {pair: value for pair, value in found.items() if value < READABLE} == {}


def test_page_inserts_no_html() -> None:
    forbidden = r"(?i)(?:inner|outer|adjacent)HTML|document\.write|\beval\(|new Function"
    for path in SOURCE.iterdir():
        assert not re.search(forbidden, path.read_text()), path.name
