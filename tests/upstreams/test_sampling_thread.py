"""The thread of models in this process: a failure that it cannot recover from ends every call."""

import asyncio
from collections.abc import Iterable
from typing import Literal

import pytest

from rookery.core import UpstreamError
from rookery.upstreams.sampling_thread import SamplingThread


class FakeSequence:
    finish: Literal["", "stop", "length", "abort"] = ""


class FakeBatch:
    """A batch whose sequences end in the first step, unless `fault` is `step` or `add`."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self._sequences: list[FakeSequence] = []

    @property
    def busy(self) -> bool:
        return bool(self._sequences)

    def add(self, sequence: FakeSequence, /) -> None:
        if self.fault == "add":
            raise MemoryError
        self._sequences.append(sequence)

    def discard(self, sequence: FakeSequence, /) -> bool:
        raise RuntimeError

    def step(self) -> list[FakeSequence]:
        if self.fault == "step":
            raise RuntimeError
        done, self._sequences = self._sequences, []
        for sequence in done:
            sequence.finish = "stop"
        return done


class FakeThread(SamplingThread[FakeSequence, FakeBatch]):
    """A thread that cannot recover from a failed step."""

    def __init__(self, fault: str = "") -> None:
        super().__init__("fake model")
        self.batch = FakeBatch(fault)

    def _batches(self) -> Iterable[FakeBatch]:
        return (self.batch,)

    def _recover(self, batch: FakeBatch, failed: list[FakeSequence]) -> None:
        raise RuntimeError


async def sample(thread: FakeThread) -> None:
    await asyncio.wait_for(thread.sample(FakeSequence(), thread.batch), 60)


async def test_failed_recovery_ends_all_calls_and_refuses_later_ones() -> None:
    thread = FakeThread("step")
    found = await asyncio.gather(*(sample(thread) for _ in range(8)), return_exceptions=True)
    assert {type(error) for error in found} == {UpstreamError}
    with pytest.raises(UpstreamError) as refused:
        await sample(thread)
    assert refused.value.code == "upstream.unreachable"
    await thread.close()


async def test_sequence_that_cannot_be_added_fails_alone() -> None:
    thread = FakeThread("add")
    with pytest.raises(UpstreamError) as failed:
        await sample(thread)
    assert failed.value.code == "upstream.error"
    thread.batch.fault = ""
    await sample(thread)
    await thread.close()
