"""A random row of changes; after each one, what was compiled and what the program prints."""

import json
import os

HEADER = "#ifndef {guard}\n#define {guard}\n{lines}\n#endif\n"


def header(name, *lines):
    return HEADER.format(guard=name.upper() + "_H", lines="\n".join(lines))


def check(g):
    r = g.random
    rates = {"grams": 454, "cents": 1250, "mark": "EUR"}
    extra = f"x{r.randrange(10**6)}"
    more = False

    def units():
        return header("units", f"#define GRAMS_PER_POUND {rates['grams']}")

    def price():
        middle = f'#include "{extra}.h"' if more else f"#define CENTS_PER_KILO {rates['cents']}"
        return header("price", '#include "units.h"', middle, "long price_of_pounds(long pounds);")

    def extras():
        return header(extra, f"#define CENTS_PER_KILO {rates['cents']}")

    def shows():
        return header("show", f'#define MARK "{rates["mark"]}"', "void show(long cents);")

    def main(note):
        return f"/* {note} */\n" + MAIN

    both = ["main.o", "price.o"]
    changes, wanted = [], []

    def change(files, compiled):
        pounds = r.randrange(1, 500)
        cents = pounds * rates["grams"] * rates["cents"] // 1000
        changes.append({"files": files, "pounds": str(pounds)})
        wanted.append([0, compiled, 0, f"{cents // 100}.{cents % 100:02d} {rates['mark']}\n"])

    change({}, ["main.o", "price.o", "show.o"])
    change({}, [])
    kinds = ["units", "price", "show", "main", "none"]
    r.shuffle(kinds)
    for place, kind in enumerate([*kinds, "extra", "extra", "units", "gone", "price", "show"]):
        rates["grams"] += kind == "units"
        if kind == "units":
            change({"src/units.h": units()}, both)
        elif kind == "show":
            rates["mark"] = r.choice("ABCDEFG") + str(place)
            change({"src/show.h": shows()}, ["main.o", "show.o"])
        elif kind == "main":
            change({"src/main.c": main(place)}, ["main.o"])
        elif kind == "none":
            change({}, [])
        elif kind == "price":
            rates["cents"] += 10
            change({"src/price.h": price()}, both)
        elif kind == "extra":
            rates["cents"] += 10
            files = {f"src/{extra}.h": extras()} if more else {}
            more = True
            change(files or {f"src/{extra}.h": extras(), "src/price.h": price()}, both)
        else:
            more = False
            change({f"src/{extra}.h": None, "src/price.h": price()}, both)
    here = g.copy()
    g.run(["rm", "-rf", "obj", "quote"], cwd=here)
    with open(os.path.join(os.path.dirname(__file__), "driver.py")) as file:
        driver = file.read()
    result = g.run(["python3", "-I", "-c", driver], json.dumps(changes), cwd=here)
    answers = json.loads(result.text)
    for number, right in enumerate(wanted):
        g.expect(f"change {number}, {sorted(changes[number]['files'])}", answers[number], right)
    g.expect("make clean", answers[-1], [0, [], False])


MAIN = """#include "price.h"
#include "show.h"

#include <stdlib.h>

int main(int count, char **words)
{
    if (count != 2)
        return 2;
    show(price_of_pounds(strtol(words[1], NULL, 10)));
    return 0;
}
"""
