"""Random pictures of every shape, turned by hand."""


def shown(rows, white):
    lines = ["P2", f"{len(rows[0])} {len(rows)}", str(white), *(" ".join(map(str, row)) for row in rows)]
    return "\n".join(lines) + "\n"


def check(g):
    r = g.random
    here = g.copy()
    g.built(here)
    shapes = [(3, 2), (2, 3), (1, 1), (1, 9), (9, 1), (4, 4), (200, 3), (3, 200), (57, 58)]
    shapes += [(r.randrange(1, 30), r.randrange(1, 30)) for _ in range(8)]
    for width, height in shapes:
        rows = [[r.randrange(1000) for _ in range(width)] for _ in range(height)]
        for quarters in range(4):
            turned = rows
            for _ in range(quarters):
                turned = [list(column)[::-1] for column in zip(*turned)]
            g.case("the picture", ["./turn", str(quarters)], shown(rows, 999), out=shown(turned, 999))
    g.case("no picture", ["./turn", "1"], "P2\n2 2\n9\n1 2 3\n", code=2)
    g.settle(here)
