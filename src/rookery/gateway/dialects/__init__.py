"""What clients speak: a dialect is one file that turns requests into asks and replies into answers.

Promises:
- a dialect is one class behind an entry point (`rookery.dialects`): adding one edits nothing here;
- two dialects that want the same path are a `UsageError`, in words.
"""

from functools import lru_cache

from rookery.core import UsageError
from rookery.core.errors import describe
from rookery.gateway.dialects.protocol import Answering, Ask, BadRequestError, Dialect, Problem

__all__ = ["Answering", "Ask", "BadRequestError", "Dialect", "Problem", "dialects"]

_GROUP = "rookery.dialects"


@lru_cache(maxsize=1)
def dialects() -> dict[str, Dialect]:
    """All dialects that are installed here, by name."""
    from importlib.metadata import entry_points  # 20 ms, which `--help` should not pay

    found: dict[str, Dialect] = {}
    paths: dict[str, str] = {}
    for point in sorted(entry_points(group=_GROUP), key=lambda point: str(point.name)):
        try:
            dialect: Dialect = point.load()()
        except (ImportError, AttributeError) as error:
            raise UsageError(f"the dialect {point.name!r} cannot be loaded: {describe(error)}") from error
        for path in (*dialect.paths, *getattr(dialect, "counts", ())):
            if (other := paths.setdefault(path, point.name)) != point.name:
                raise UsageError(f"the dialects {other!r} and {point.name!r} both want {path}: remove one of them")
        found[point.name] = dialect
    if "chat" not in found:
        raise UsageError("no dialect is known here: is rookery-rl installed?")
    return found
