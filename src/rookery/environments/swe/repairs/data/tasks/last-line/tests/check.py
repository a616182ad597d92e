"""Random files, put together by hand."""

PIECES = ["a", "{}", " ", "  ", "\t", "\\", "\\n", "*", "-n", "-e", "é", '"', "$x", "\r", "%s", "\udcff"]
# Lines that a wrong repair treats as options, pads or escapes. Each occurs in every grading.
ODD_LINES = ("-n", "-e x", "  {} ", "back\\slash\\")


def check(g):
    r = g.random
    top = g.folder()
    script = ["bash", f"{g.workspace}/merge.sh"]
    for number in range(12):
        names, wanted = [], []
        for place in range(r.randrange(1, 4)):
            lines = []
            for _ in range(r.randrange(6)):
                lines.append(
                    "".join(r.choices(PIECES, k=r.randrange(6)))
                    if r.random() < 0.8
                    else r.choice(("", " ", "\t "))
                )
            if number % 2 and place == 0:
                lines.append(ODD_LINES[number // 2 % len(ODD_LINES)])
            elif number % 2 and r.random() < 0.5:
                lines.append(r.choice(ODD_LINES))
            wanted += [line for line in lines if line.strip(" \t")]
            text = "\n".join(lines) + ("\n" if r.random() < 0.5 and lines else "")
            names.append(f"{top}/{number} {place}.jsonl")
            with open(names[-1], "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                file.write(text)
        g.case("the records", [*script, *names], out="".join(f"{line}\n" for line in wanted))
        counted = [*script[:1], "-c", 'bash "$0" "$@" 2>&1 >/dev/null', script[1], *names]
        g.case("the count", counted, out=f"merged {len(wanted)} records\n")
    g.case("an error", [*script, names[0], f"{top}/none"], out="", code=1)
    g.settle()
