"""From one row to its cells."""


def split(line):
    cells = []
    at = 0
    while True:
        if line[at : at + 1] == '"':
            cell, at = _quoted(line, at + 1)
        else:
            end = line.find(",", at)
            end = len(line) if end < 0 else end
            cell, at = line[at:end], end
        cells.append(cell)
        if at >= len(line):
            return cells
        at += 1


def _quoted(line, at):
    """The cell that begins at `at`, and where what follows it begins."""
    parts = []
    while True:
        end = line.find('"', at)
        if end < 0:
            parts.append(line[at:])
            return "".join(parts), len(line)
        parts.append(line[at:end])
        if line[end + 1 : end + 2] != '"':
            return "".join(parts), end + 1
        parts.append('"')
        at = end + 2
