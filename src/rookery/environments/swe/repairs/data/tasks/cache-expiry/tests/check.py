"""Random uses on a clock of our own, against a plain model."""

DRIVER = """
from larder import Larder
state = {}
def handle(order):
    now, what, arguments = order
    state["now"] = now
    if what == "new":
        state["larder"] = Larder(arguments[0], arguments[1], lambda: state["now"])
        return None
    if what == "len":
        return len(state["larder"])
    return getattr(state["larder"], what)(*arguments)
"""


class Model:
    def __init__(self, room, keep):
        self.room, self.keep, self.entries = room, keep, []  # [key, value, put at], the most recently used last

    def do(self, now, what, arguments):
        fresh = [entry for entry in self.entries if now - entry[2] < self.keep]
        keys = sorted(entry[0] for entry in fresh)
        if what in ("keys", "len"):
            return keys if what == "keys" else len(keys)
        key = arguments[0]
        found = next((entry for entry in fresh if entry[0] == key), None)
        others = [entry for entry in fresh if entry is not found]
        if what == "get":
            if found is None:
                return arguments[1] if len(arguments) > 1 else None
            self.entries = [*others, found]
            return found[1]
        if found is None and len(others) >= self.room:
            others = others[1:]
        self.entries = [*others, [key, arguments[1], now]]
        return None


def day(r):
    """Uses at random."""
    room, keep, now = r.randrange(1, 6), r.randrange(3, 40), r.randrange(1000)
    yield now, "new", [room, keep]
    for _ in range(80):
        now += r.choice((0, 0, 1, 2, 3)) if r.random() < 0.9 else r.choice((keep // 2, keep - 1, keep))
        key = f"k{r.randrange(room + 2)}"
        what = r.choice(("put", "put", "get", "get", "get", "len", "keys"))
        yield now, what, {"put": [key, r.randrange(10**6)], "get": r.choice(([key], [key, "none"]))}.get(what, [])


def quiet_hour(r):
    """A full larder, in which those that were read last are the first that are no longer fresh."""
    room, keep, now = r.randrange(2, 7), r.randrange(20, 60), r.randrange(1000)
    yield now, "new", [room, keep]
    old = r.randrange(1, room)
    for number in range(room):
        yield now + (0 if number < old else keep // 2), "put", [f"k{number}", r.randrange(10**6)]
    for number in range(old):
        yield now + keep - 1, "get", [f"k{number}"]
    for number in range(room):
        yield now + keep + 1, "put", [f"new{number}", number]
        yield now + keep + 1, "keys", []


def favourites(r):
    """A full larder of fresh entries, the oldest of which are read: those that nobody read go first."""
    room, keep, now = r.randrange(2, 7), r.randrange(60, 90), r.randrange(1000)
    yield now, "new", [room, keep]
    for number in range(room):
        yield now + number, "put", [f"k{number}", r.randrange(10**6)]
    for number in [*r.sample(range(1, room), r.randrange(room - 1)), 0]:
        yield now + 2 * room, "get", [f"k{number}"]
    for number in range(room):
        yield now + 3 * room + number, "put", [f"new{number}", number]
        yield now + 3 * room + number, "keys", []


def check(g):
    r = g.random
    orders, wanted = [], []
    for kind in [day] * 20 + [quiet_hour] * 5 + [favourites] * 5:
        for now, what, arguments in kind(r):
            orders.append([now, what, arguments])
            if what == "new":
                model = Model(*arguments)
                wanted.append(None)
            else:
                wanted.append(model.do(now, what, arguments))
    for order, got, right in zip(orders, g.driver(DRIVER, orders), wanted):
        g.expect(str(order), got, right)
