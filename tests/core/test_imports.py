"""`import rookery` loads no subpackage, and `rookery.core` imports nothing heavier than msgspec."""

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


def modules_loaded_by(statement: str) -> set[str]:
    """Return the modules that a statement loads in a new interpreter."""
    code = f"import sys\nbefore = set(sys.modules)\n{statement}\nprint(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import rookery.core", "import rookery"])
def test_importing_core_or_rookery_loads_no_heavy_module(statement: str) -> None:
    assert modules_loaded_by(statement) & set(HEAVY) == set()


def test_import_rookery_loads_no_subpackage() -> None:
    assert {name for name in modules_loaded_by("import rookery") if name.startswith("rookery.")} == set()


def test_every_exported_name_exists() -> None:
    import rookery
    from rookery import core

    assert [name for module in (rookery, core) for name in module.__all__ if not hasattr(module, name)] == []
    with pytest.raises(AttributeError) as caught:
        _ = rookery.nonsense  # type: ignore[attr-defined]
    assert caught.value.name == "nonsense"
