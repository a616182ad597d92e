"""Random days, against a plain count of minutes."""


def spans_of(minutes):
    found = []
    for minute in sorted(minutes):
        if found and found[-1][1] == minute:
            found[-1][1] = minute + 1
        else:
            found.append([minute, minute + 1])
    return found


def shown(spans):
    return "".join(f"{a // 60:02d}:{a % 60:02d}-{b // 60:02d}:{b % 60:02d}\n" for a, b in spans)


def check(g):
    r = g.random
    days = [[(540, 600), (600, 690)], [], [(600, 700), (610, 620), (700, 701), (0, 480), (481, 500)]]
    for _ in range(3):
        step = r.choice((1, 5, 30))
        day = []
        for _ in range(r.randrange(12)):
            start = r.randrange(0, 1410, step)
            day.append((start, min(1439, start + step * r.randrange(1, 9))))
        r.shuffle(day)
        days.append(day)
    for day in days:
        taken = {minute for a, b in day for minute in range(a, b)}
        text = shown(day)
        g.case("busy", ["python3", "-m", "rota", "busy"], text, out=shown(spans_of(taken)))
        if r.random() < 0.5 and len(day) > 2:
            continue
        free = set(range(480, 1080)) - taken
        g.case("free", ["python3", "-m", "rota", "free"], text, out=shown(spans_of(free)))
    for bad in ("10:00-09:00\n",):
        g.case("an error", ["python3", "-m", "rota", "busy"], bad, out="", code=2)
