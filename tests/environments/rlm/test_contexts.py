"""Placing contexts in a sandbox."""

import asyncio
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from rookery.environments.rlm.contexts import place_context
from rookery.environments.rlm.recipes import Recipe
from tests.waiting import wait_until


async def test_context_cancelled_during_generation_leaves_nothing_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started, release, written = threading.Event(), threading.Event(), threading.Event()

    def write(_: Recipe, folder: Path) -> Path:
        started.set()
        release.wait(60)
        (folder / "late").mkdir()
        (folder / "late" / "context.txt").write_text("x")
        written.set()
        return folder

    monkeypatch.setattr(Recipe, "write", write)
    sandbox: Any = None
    placing = asyncio.create_task(place_context(sandbox, Recipe(kind="needle", seed=1, size=10_000)))
    await wait_until(started.is_set)
    placing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await placing
    release.set()
    await wait_until(written.is_set)
    await wait_until(lambda: not list(tmp_path.iterdir()))
