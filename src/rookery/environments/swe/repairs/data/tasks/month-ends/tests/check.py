"""Random subscriptions, against the calendar of the grader's own Python."""

import calendar


def dates(start, count, step):
    year, month, day = start
    for number in range(count):
        y, m = divmod(year * 12 + month - 1 + number * step, 12)
        yield f"{y:04d}-{m + 1:02d}-{min(day, calendar.monthrange(y, m + 1)[1]):02d}\n"


def check(g):
    r = g.random
    starts = [((2023, 1, 31), 14, 1), ((2099, 12, 31), 4, 1), ((1900, 4, 30), 6, -1), ((1996, 2, 29), 12, 12)]
    for _ in range(3):
        year, month = r.choice((r.randrange(1890, 2110), r.randrange(1995, 2030))), r.randrange(1, 13)
        day = min(r.choice((1, 15, 28, 29, 30, 31, 31)), calendar.monthrange(year, month)[1])
        starts.append(((year, month, day), r.randrange(1, 40), r.choice((1, 1, 2, 3, 5, 12)) * r.choice((1, -1))))
    for start, count, step in starts:
        words = ["python3", "-m", "billing", "%04d-%02d-%02d" % start, str(count)]
        words += ["--every", str(abs(step))] * (abs(step) != 1) + ["--back"] * (step < 0)
        g.case("due", words, out="".join(dates(start, count, step)))
    for bad in (["2023-02-29", "1"], ["2023-01-01", "1", "--every", "0"]):
        g.case("an error", ["python3", "-m", "billing", *bad], out="", code=2)
