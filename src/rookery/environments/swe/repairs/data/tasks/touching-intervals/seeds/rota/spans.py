"""Spans of time: pairs of minutes, the second not included."""


def merged(spans):
    """The same minutes in as few spans as possible, in order."""
    result = []
    for start, end in sorted(spans):
        if result and start < result[-1][1]:
            first, last = result[-1]
            result[-1] = (first, max(last, end))
        else:
            result.append((start, end))
    return result


def gaps(spans, within):
    """What `spans`, which are merged, leave of `within`."""
    at, end = within
    result = []
    for start, stop in spans:
        if stop <= at:
            continue
        if start >= end:
            break
        if start > at or (start == at and result):
            result.append((at, start))
        at = max(at, stop)
    if at < end:
        result.append((at, end))
    return result
