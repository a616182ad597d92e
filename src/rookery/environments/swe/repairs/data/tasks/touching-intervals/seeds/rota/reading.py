"""Bookings as text: minutes since midnight inside, HH:MM outside."""

import re

_LINE = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


class BadBooking(Exception):
    pass


def read(lines):
    found = []
    for line in lines:
        text = line.strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise BadBooking(text)
        hours, minutes, end_hours, end_minutes = map(int, match.groups())
        start, end = hours * 60 + minutes, end_hours * 60 + end_minutes
        if end <= start:
            raise BadBooking(text)
        found.append((start, end))
    return found


def show(span):
    return "-".join(f"{minute // 60:02d}:{minute % 60:02d}" for minute in span)
