"""From text to rows."""

from table.cells import split


def rows(text):
    for line in text.splitlines():
        if line:
            yield split(line)
