"""When a subscription is due."""

from billing.months import moved


def due(start, count, step):
    date = start
    for _ in range(count):
        yield date
        date = moved(date, step)
