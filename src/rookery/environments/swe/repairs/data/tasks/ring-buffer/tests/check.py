"""Random commands, against a plain text; and the library on memory with a trap behind it."""


class Model:
    def __init__(self, room):
        self.room, self.held = room, ""

    def put(self, text):
        text = text[: self.room - len(self.held)]
        self.held += text
        return str(len(text))

    def get(self, count, take):
        text = self.held[:count]
        self.held = self.held[count:] if take else self.held
        return text


def check(g):
    r = g.random
    here = g.copy()
    g.built(here)
    g.case("the example", ["./ring", "8"], "put abcde\nget 5\nput fghij\nget 5\n", out="5\nabcde\n5\nfghij\n")
    for _ in range(12):
        room = r.choice((1, 2, 3, 8, 16, 61))
        model, orders, wanted = Model(room), [], []
        for _ in range(120):
            what, text = r.choice(("put", "put", "get", "get", "peek", "size", "none")), words(r, room + 2)
            if what == "put":
                orders.append(f"put {text}")
                wanted.append(model.put(text))
            elif what in ("get", "peek"):
                count = r.randrange(room + 3)
                orders.append(f"{what} {count}")
                wanted.append(model.get(count, what == "get"))
            elif what == "size":
                orders.append("size")
                wanted.append(str(len(model.held)))
            else:
                clear = r.random() < 0.2
                orders.append("clear" if clear else "what")
                wanted.append("0" if clear else "?")
                model.held = "" if clear else model.held
        g.case("the commands", ["./ring", str(room)], lines(orders), out=lines(wanted))
    g.settle(here)
    g.compiled(here, "driver.c", ["ring.c"], "graded-driver")
    orders, wanted = [], []
    for _ in range(30):
        room = r.randrange(1, 40)
        model = Model(room)
        orders.append(f"new {room}")
        for _ in range(60):
            what, text = r.choice(("put", "get", "get", "peek")), words(r, room + 2)
            if what == "put":
                orders.append(f"put {text}")
                wanted.append(model.put(text))
            else:
                count = r.choice((room, r.randrange(room + 3)))
                orders.append(f"{what} {count}")
                wanted.append(model.get(count, what == "get") + "!")
    g.case("the library", ["./graded-driver"], lines(orders), out=lines(wanted))
    g.settle(here)


def words(r, most):
    return "".join(r.choices("abcdefghijklmnopqrstuvwxyz", k=r.randrange(1, most + 1)))


def lines(texts):
    return "".join(f"{text}\n" for text in texts)
