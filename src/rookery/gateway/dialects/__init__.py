"""API dialects of the gateway: each parses the requests and formats the replies of one provider's API.

A dialect is a class that is registered under the entry point group `rookery.dialects`. Dialects run in gateway
shards.
"""

from functools import lru_cache

from rookery.core import UsageError
from rookery.core.errors import describe
from rookery.gateway.dialects.protocol import (
    BadRequestError,
    ClientRequest,
    DescribedDialect,
    Dialect,
    ErrorKind,
    HeaderDialect,
    Operation,
    ReplyStream,
    StatefulDialect,
    TokenCountDialect,
)

__all__ = [
    "BadRequestError",
    "ClientRequest",
    "DescribedDialect",
    "Dialect",
    "ErrorKind",
    "HeaderDialect",
    "Operation",
    "ReplyStream",
    "StatefulDialect",
    "TokenCountDialect",
    "load_dialects",
]

_GROUP = "rookery.dialects"


@lru_cache(maxsize=1)
def load_dialects() -> dict[str, Dialect]:
    """Return all installed dialects by name.

    Raises `UsageError` if a dialect cannot be loaded, or if two dialects serve the same path.
    """
    from importlib.metadata import entry_points  # takes 20 ms to import; `--help` does not need it

    found: dict[str, Dialect] = {}
    paths: dict[str, str] = {}
    for point in sorted(entry_points(group=_GROUP), key=lambda point: str(point.name)):
        try:
            dialect: Dialect = point.load()()
        except (ImportError, AttributeError) as error:
            raise UsageError(f"the API dialect {point.name!r} cannot be loaded: {describe(error)}") from error
        for path in (*dialect.paths, *getattr(dialect, "count_paths", ())):
            if (other := paths.setdefault(path, point.name)) != point.name:
                raise UsageError(
                    f"the dialects {other!r} and {point.name!r} both serve {path}: uninstall one of them"
                )
        found[point.name] = dialect
    if "chat" not in found:
        raise UsageError(
            "the API dialect 'chat' of the gateway is not installed: reinstall rookery-rl with its entry points"
        )
    return found
