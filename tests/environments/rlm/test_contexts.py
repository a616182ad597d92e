"""Contexts on their way into a sandbox."""

import asyncio
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from rookery.environments.rlm.contexts import place_context
from rookery.environments.rlm.recipes import Recipe
from tests.environments.rlm.helpers import until


async def test_one_that_is_given_up_while_it_is_made_leaves_nothing_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    begun, go, wrote = threading.Event(), threading.Event(), threading.Event()

    def write(_: Recipe, folder: Path) -> Path:
        begun.set()
        go.wait(60)
        (folder / "late").mkdir()
        (folder / "late" / "context.txt").write_text("x")
        wrote.set()
        return folder

    monkeypatch.setattr(Recipe, "write", write)
    sandbox: Any = None
    putting = asyncio.create_task(place_context(sandbox, Recipe(kind="needle", seed=1, size=10_000)))
    await until(begun.is_set)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    go.set()
    await until(wrote.is_set)
    await until(lambda: not list(tmp_path.iterdir()))
