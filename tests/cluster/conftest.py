"""Fixtures for cluster tests. After each test no process and nothing in the nodes' directory may be left."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rookery.cluster.agent import FOLDER_VARIABLE
from tests.processes import descendants
from tests.servers import Answer, ModelServer, Request


class HeldModel(ModelServer):
    """A model server that answers prompts with `hold` only after `release` was set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        super().__init__(self.play)

    def play(self, request: Request) -> Answer:
        held = "hold" in str(request.body["messages"][-1]["content"])
        tokens = {"prompt_ids": [1, 2, 3], "ids": [4, 5], "logprobs": [-0.5, -0.25]}
        return Answer("ok", **tokens, hold=self.release if held else None)


@pytest.fixture
async def model() -> AsyncIterator[HeldModel]:
    async with HeldModel() as server:
        yield server


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory in which agents keep their files. It must be empty when the test ends."""
    folder = tmp_path / "nodes"
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    before = set(descendants(os.getpid()))
    yield folder
    assert not folder.exists() or list(folder.iterdir()) == []
    assert descendants(os.getpid(), without=before) == []
