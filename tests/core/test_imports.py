"""What is imported with what: core nothing heavier than msgspec, and `import rookery` next to nothing."""

import subprocess
import sys

import pytest

HEAVY = [
    "aiohttp",
    "asyncio",
    "click",
    "multiprocessing",
    "numpy",
    "orjson",
    "rich",
    "socket",
    "sqlite3",
    "subprocess",
]


def imported(statement: str) -> set[str]:
    """What the statement brings in, over what the interpreter starts with."""
    code = f"import sys\nbefore = set(sys.modules)\n{statement}\nprint(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import rookery.core", "import rookery"])
def test_nothing_is_imported_that_is_heavier_than_msgspec(statement: str) -> None:
    assert imported(statement) & set(HEAVY) == set()


def test_import_rookery_alone_loads_no_room() -> None:
    assert {name for name in imported("import rookery") if name.startswith("rookery.")} == set()


def test_every_offered_name_is_there() -> None:
    import rookery
    from rookery import core

    assert [name for module in (rookery, core) for name in module.__all__ if not hasattr(module, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = rookery.nonsense  # type: ignore[attr-defined]
