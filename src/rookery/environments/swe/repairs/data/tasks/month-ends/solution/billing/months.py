"""Arithmetic with months."""

import datetime

_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def length(year, month):
    """How many days the month has."""
    if month == 2 and (year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)):
        return 29
    return _DAYS[month - 1]


def moved(date, months):
    """The same day of another month, or its last one."""
    count = date.year * 12 + date.month - 1 + months
    year, month = divmod(count, 12)
    return datetime.date(year, month + 1, min(date.day, length(year, month + 1)))
