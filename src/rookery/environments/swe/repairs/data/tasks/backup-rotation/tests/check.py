"""Folders of files with every kind of name. What is left is looked at by the grader."""

import os

PARTS = ("names", "empty")
PLAIN = ["mon.bak", "tue.bak", "wed-2.bak", "thu_3.bak", "fri.4.bak", ".sat.bak"]
ODD = [
    "poster final (2).bak",
    " leading.bak",
    "trailing .bak",
    "two\nlines.bak",
    "\n.bak",
    "-rf.bak",
    "--help.bak",
    "*.bak",
    "[a-z].bak",
    "a\tb.bak",
    "quote\"'.bak",
    "back\\slash.bak",
    "$(touch gone).bak",
    "`id`.bak",
    "a;b&c|d.bak",
    "é\udcff.bak",
    "mon.bak tue.bak",
    ".hidden too.bak",
    "~.bak",
    "%s%n.bak",
    ".bak",
]
KEPT = ["folder.bak", "link.bak"]
OTHERS = ["notes.txt", "mon.bak.old", "xbak", "keep me.bak~"]


def check(g):
    r = g.random

    def filled(top, names, folder=None):
        """Backups in the order of their age, the newest first."""
        place = folder or f"{top}/f{r.randrange(10**6)}"
        os.mkdir(place)
        os.chmod(place, 0o777)
        names = [f"{r.randrange(1000)}{name}" if name[0] not in "-. \n~*[" else name for name in names]
        names = list(dict.fromkeys(names))
        r.shuffle(names)
        for age, name in enumerate(names):
            path = f"{place}/{name}"
            with open(path, "w") as file:
                file.write(name.encode("utf-8", "surrogateescape").hex())
            os.utime(path, (10**9 + r.randrange(100), 1.6e9 - age * 60))
        for name in OTHERS:
            with open(f"{place}/{name}", "w"):
                pass
            os.utime(f"{place}/{name}", (1.2e9, 1.2e9))
        return place, names

    script, asked = ["bash", f"{g.workspace}/rotate.sh"], []

    def rotate(place, names, keep, *, words=None, twice=False):
        """To be done; what must be left is known now."""
        left = sorted([*names[:keep], *(name for name in os.listdir(place) if name in OTHERS or name in KEPT)])
        g.case(
            "what it says", [*script, *(words or [place, str(keep)])], out=f"removed {max(0, len(names) - keep)}\n"
        )
        if twice:
            g.case("the second time", [*script, place, str(keep)], out="removed 0\n")
        asked.append((place, left))

    def done():
        """All of them, one after the other."""
        now, asked[:] = asked[:], []
        g.settle(top)
        for place, left in now:
            g.expect("what is left", sorted(os.listdir(place)), left)

    top = g.folder()
    plain = [f"{r.randrange(10**6)}.bak" for _ in range(r.randrange(3, 9))] + PLAIN
    for keep in (0, r.randrange(1, 5), 50):
        rotate(*filled(top, plain), keep)
    for bad in (["1"], [top, "x"], [f"{top}/none", "1"], [top, "-1"], [top, ""], [top, "1", "2"]):
        g.case("an error", [*script, *bad], out="", code=2)
    done()

    with g.part("names"):
        for keep in (0, r.randrange(1, 9), 12):
            rotate(*filled(top, ODD + PLAIN), keep)
        rotate(*filled(top, ODD[:6], f"{top}/a folder [x] *"), 2)
        rotate(*filled(top, ODD[2:9], f"{top}/-dash"), 1, words=["-dash", "1"])
        place, names = filled(top, PLAIN + ODD[:4])
        inside, outside = f"{place}/folder.bak", f"{top}/outside.txt"
        os.mkdir(inside)
        for path in (f"{inside}/deep.bak", outside):
            with open(path, "w"):
                pass
        os.symlink(outside, f"{place}/link.bak")
        rotate(place, names, 3)
        done()
        g.expect(
            "a folder and a link", (os.listdir(inside), os.path.islink(f"{place}/link.bak")), (["deep.bak"], True)
        )
        g.expect("outside", os.path.exists(outside), True)

    with g.part("empty"):
        for number in (0, 3):
            place = f"{top}/empty{number}"
            os.mkdir(place)
            rotate(place, [], number)
        rotate(*filled(top, []), 2)
        rotate(*filled(top, ["only.bak"]), 0, twice=True)
        done()
