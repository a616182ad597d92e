"""Random tables, written as the README says, must come back."""

import json

PIECES = [
    "a",
    "7",
    " ",
    "é",
    ",",
    '"',
    "\n",
    "\r\n",
    "\r",
    "\x0b",
    "\x0c",
    "\x1c",
    "\x85",
    "\u2028",
    "\u2029",
    "word",
    "\\",
]
PLAIN = [piece for piece in PIECES if piece not in (",", '"', "\n", "\r\n", "\r")]


def written(r, cell):
    quoted = any(mark in cell for mark in ',"\n\r') or r.random() < 0.2
    return '"' + cell.replace('"', '""') + '"' if quoted else cell


def table(r, pieces):
    rows = []
    for _ in range(r.randrange(12, 36)):
        row = ["".join(r.choices(pieces, k=r.randrange(5))) for _ in range(r.randrange(1, 6))]
        rows.append(row if row != [""] else ["x"])
    return rows


def parsed(text):
    return [json.loads(line) for line in text.split("\n")[:-1]]


def check(g):
    r = g.random
    for n in range(5):
        end = r.choice(("\n", "\r\n"))
        rows = table(r, PLAIN if n % 4 == 0 else PIECES)
        text = ""
        for row in rows:
            text += ",".join(written(r, cell) for cell in row) + end + end * (r.random() < 0.2)
        if n % 2:
            text = text.rstrip("\r\n") if not text.rstrip("\r\n").count('"') % 2 else text
        g.case("rows", ["python3", "-m", "table", "rows"], text, out=rows, read=parsed)
        if n % 4 == 0:
            g.case("width", ["python3", "-m", "table", "width"], text, out=f"{max(map(len, rows))}\n")
    g.case("nothing", ["python3", "-m", "table", "rows"], out="")
