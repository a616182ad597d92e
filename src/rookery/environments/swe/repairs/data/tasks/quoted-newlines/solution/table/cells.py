"""From text to one cell."""

import re

_PLAIN = re.compile(r"(?:[^,\n\r]|\r(?!\n))*")


def cell(text, at):
    """The cell that begins at `at`, where what follows it begins, and whether it stood in quotes."""
    if text[at : at + 1] != '"':
        match = _PLAIN.match(text, at)
        return match.group(), match.end(), False
    parts = []
    at += 1
    while True:
        end = text.find('"', at)
        if end < 0:
            parts.append(text[at:])
            return "".join(parts), len(text), True
        parts.append(text[at:end])
        if text[end + 1 : end + 2] != '"':
            return "".join(parts), end + 1, True
        parts.append('"')
        at = end + 2
