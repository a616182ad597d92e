"""Run one module of Rookery as a program, without importing the packages above it.

`python -I -S path/to/sandbox_runtime/__main__.py MODULE` imports MODULE and calls its `main`. Parent packages such
as `rookery.sandboxes` are replaced by empty ones that only know their directory: their `__init__` modules import
much more than a small program needs, and start-up time counts.
"""

import os
import sys


def import_program(name: str) -> object:
    """Import a module of Rookery by its full name, with empty packages in place of its parent packages."""
    directory = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    *parents, _ = name.split(".")
    for depth, part in enumerate(parents):
        directory = f"{directory}/{part}" if depth else directory
        package = type(sys)(".".join(parents[: depth + 1]))
        package.__path__ = [directory]
        sys.modules[package.__name__] = package
    __import__(name)
    return sys.modules[name]


if __name__ == "__main__":
    import_program(sys.argv[1]).main()  # type: ignore[attr-defined]
