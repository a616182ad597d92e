"""Random texts, split by hand; in the program, and in the library on memory with traps around it."""

MOST = 31


def split(text):
    words, at = [], 0
    while True:
        while at < len(text) and text[at] in " \t":
            at += 1
        if at >= len(text):
            return words
        word, quoted = "", False
        while at < len(text) and (quoted or text[at] not in " \t"):
            if text[at] == '"':
                quoted = not quoted
            elif text[at] == "\\":
                word += text[at + 1] if at + 1 < len(text) else "\\"
                at += 1
            else:
                word += text[at]
            at += 1
        words.append(word[:MOST])


def text_of(r):
    pieces = r.choice(
        (["a", "b", " "], ["ab", " ", '"', "\\", "\t"], ['"', "\\", " "], ["word", " ", '"', "x" * 30, "y" * 33])
    )
    return "".join(r.choices(pieces, k=r.randrange(r.choice((4, 24)))))[:900]


def check(g):
    r = g.random
    here = g.copy()
    g.built(here)
    texts = [
        'copy "this file" there',
        'say "hi',
        "end\\",
        '"',
        "\\",
        '""',
        "a" * 31,
        "a" * 32,
        "a" * 33 + " b",
        "",
        "   ",
        '"a\\',
        "x\t",
    ]
    texts += [text_of(r) for _ in range(400)]
    r.shuffle(texts)
    wanted = []
    for text in texts:
        words = split(text)
        wanted += [f"{len(words)}\n", *(f"<{word}>\n" for word in words[:8])]
    g.case("the program", ["./words"], "".join(f"{text}\n" for text in texts), out="".join(wanted))
    g.settle(here)
    g.compiled(here, "driver.c", ["words.c"], "graded-driver")
    orders, wanted = [], []
    for text in texts:
        words, most = split(text), r.randrange(9)
        for ends in (1, 0):
            orders.append(f"{most} {ends} :{text.encode().hex()}\n")
            shown = [f"{word.encode().hex()}." for word in words[:most]]
            wanted.append(" ".join([str(len(words)), *shown]) + "\n")
    g.case("the library", ["./graded-driver"], "".join(orders), out="".join(wanted))
    g.settle(here)
