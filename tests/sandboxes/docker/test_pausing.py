"""Pausing a container while a snapshot is taken, on a machine where the container engine is slow to freeze it."""

from typing import Any

import pytest

from rookery.sandboxes.docker.client import EngineAPIError, EngineClient
from rookery.sandboxes.docker.snapshots import paused


class SlowFreezer(EngineClient):
    """Container engine whose first attempts to freeze a container fail, as those of runc do on a busy machine."""

    def __init__(self, failures: int, status: int = 500) -> None:
        self.failures, self.status = failures, status
        self.calls: list[str] = []

    async def call(self, method: str, path: str, *args: Any, **options: Any) -> Any:
        self.calls.append(path.rpartition("/")[2])
        if self.calls[-1] == "pause" and self.calls.count("pause") <= self.failures:
            raise EngineAPIError("OCI runtime pause failed: unable to freeze", status=self.status)


async def test_freezing_is_tried_again() -> None:
    engine = SlowFreezer(2)
    async with paused(engine, "c"):
        assert engine.calls == ["pause"] * 3
    assert engine.calls == ["pause"] * 3 + ["unpause"]


@pytest.mark.parametrize(("failures", "status", "calls"), [(9, 500, 4), (9, 404, 1)])
async def test_container_that_cannot_be_frozen_is_an_error(failures: int, status: int, calls: int) -> None:
    engine = SlowFreezer(failures, status)
    with pytest.raises(EngineAPIError):
        async with paused(engine, "c"):
            pytest.fail("the container is not frozen")
    assert engine.calls == ["pause"] * calls + ["unpause"]
