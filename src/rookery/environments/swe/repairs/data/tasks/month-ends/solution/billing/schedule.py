"""When a subscription is due."""

from billing.months import moved


def due(start, count, step):
    for number in range(count):
        yield moved(start, number * step)
