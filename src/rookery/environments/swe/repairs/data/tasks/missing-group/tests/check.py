"""Random sales, added up by hand."""

REGIONS = [
    "north",
    "south",
    "7",
    "07",
    "7.0",
    "0",
    "00",
    "",
    "a b",
    "1e3",
    "1000",
    "+7",
    "total",
    " 7",
    "0x10",
    "16",
]


def check(g):
    r = g.random
    top = g.folder()
    for number in range(14):
        groups = [(region, [r.randrange(1, 900)]) for region in ("7", "07", "0", "00")] if number == 1 else []
        for _ in range(r.randrange(8) if number else 0):
            region = r.choice(REGIONS)
            if not groups or groups[-1][0] != region:
                groups.append((region, [r.randrange(-500, 5000) for _ in range(r.randrange(1, 5))]))
        name = f"{top}/sales {number}.tsv"
        with open(name, "w") as file:
            for region, amounts in groups:
                file.writelines(f"{region}\tarticle {r.randrange(9)}\t{amount}\n" for amount in amounts)
        lines = [f"{region}\t{len(amounts)}\t{sum(amounts)}\n" for region, amounts in groups]
        every = [amount for _, amounts in groups for amount in amounts]
        g.case(
            "the report",
            ["sh", f"{g.workspace}/report.sh", name],
            out="".join(lines) + f"total\t{len(every)}\t{sum(every)}\n",
        )
    g.settle()
