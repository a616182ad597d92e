"""Failures in environments of other systems: what is no reward, and what the policy reads as its mistake."""

from types import SimpleNamespace

import pytest

from rookery.adapters.environments import nemo_gym, openenv, verifiers
from rookery.core import Message, ScoringError, ToolCall, ToolSchema


def test_reward_that_verifiers_did_not_compute_is_no_zero() -> None:
    rewards = {"fast": SimpleNamespace(value=1.0), "slow": None}
    trace = SimpleNamespace(rewards=rewards, metrics={}, reward=1.0, stop_condition="scoring_timeout")
    with pytest.raises(ScoringError) as caught:
        verifiers.get_score([trace])
    assert (caught.value.code, caught.value.fault) == ("scoring.timeout", "infra")


async def test_deeply_nested_arguments_are_a_mistake_of_the_policy() -> None:
    nested = "[" * 100_000
    call = Message("assistant", None, (ToolCall("1", "look", nested),))
    for message in (call, Message("assistant", nested)):
        ((action, _),) = openenv.parse_actions(message, {})
        assert isinstance(action, openenv.ActionError)
    environment = nemo_gym.NemoGymEnvironment("http://localhost:1", dataset=__file__)
    tools = [ToolSchema("look", "", {})]
    assert await environment.call_tool(None, "look", nested, tools)  # type: ignore[arg-type]
