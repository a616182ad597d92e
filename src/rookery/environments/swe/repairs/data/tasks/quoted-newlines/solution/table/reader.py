"""From text to rows."""

from table.cells import cell


def rows(text):
    row, at = [], 0
    while at < len(text):
        found, at, quoted = cell(text, at)
        row.append(found)
        if text[at : at + 1] == ",":
            at += 1
            if at < len(text):
                continue
            row.append("")
        else:
            at += 2 if text[at : at + 2] == "\r\n" else 1
        if quoted or row != [""]:
            yield row
        row = []
    if row:
        yield row
