"""Fixtures for the tests of telemetry."""

from collections.abc import AsyncIterator

import pytest

from tests.servers import Answer, ModelServer, Request

ENV = "tests.telemetry.envs:Observed"
WORDS = ("rook", "broken")
"""Words that the policy passes to the tool, in one reply. The tool fails for the second."""


@pytest.fixture
async def model() -> AsyncIterator[ModelServer]:
    """Calls the tool `lookup` for each of `WORDS`, reads the results and answers."""

    def play(request: Request) -> Answer:
        known = {"prompt_ids": [1, 2, 3], "ids": [4, 5], "logprobs": [-0.5, -0.25]}
        if request.body["messages"][-1]["content"] == "question":
            return Answer(
                None, [("lookup", f'{{"word": "{word}"}}') for word in WORDS], finish="tool_calls", **known
            )
        return Answer("done", **known)

    async with ModelServer(play) as server:
        yield server
