"""The sandbox of an attempt: settings of the run, then of the environment, then the best provider."""

from pathlib import Path

import pytest

from rookery import sandboxes
from rookery.core import SandboxSpec, UsageError
from rookery.engine import Engine
from rookery.environments import Environment
from rookery.sandboxes import ProviderChoice
from tests.engine.conftest import build_engine, events
from tests.environments.helpers import unwrap_sandbox
from tests.servers import ModelServer

POLICY = "http://localhost:9/v1"


class WithoutSandbox(Environment):
    async def run(self, ctx) -> None:  # type: ignore[no-untyped-def]
        await ctx.policy.chat(ctx.task.prompt)

    async def score(self, ctx) -> float:  # type: ignore[no-untyped-def]
        return 1.0


class WithOwnSpec(WithoutSandbox):
    sandbox = SandboxSpec(provider="subprocess", pids=50, network="all")


class RequestsSandbox(WithoutSandbox):
    """Requests its own spec without a provider."""

    async def run(self, ctx) -> None:  # type: ignore[no-untyped-def]
        sandbox = await ctx.sandbox(SandboxSpec(pids=33))
        created = unwrap_sandbox(sandbox)
        ctx.info["got"] = (created.provider, created.spec.pids)


@pytest.fixture
def nothing_isolates(monkeypatch: pytest.MonkeyPatch) -> None:
    best = ProviderChoice(name="subprocess", isolated=False, refused={"local": "Not here."})
    monkeypatch.setattr(sandboxes, "best_provider", lambda spec=None: best)


def test_provider_of_the_run_overrides_that_of_the_environment() -> None:
    engine = Engine(WithOwnSpec(), policy=POLICY, runners=0)
    assert engine.sandbox == WithOwnSpec.sandbox
    assert engine.config.sandbox == SandboxSpec(provider="subprocess")
    over = Engine(WithOwnSpec(), policy=POLICY, runners=0, sandbox=SandboxSpec(provider="local", pids=7))
    assert over.sandbox == SandboxSpec(provider="local", pids=7, network="all")


def test_explicit_default_overrides_the_environment() -> None:
    engine = Engine(WithOwnSpec(), policy=POLICY, runners=0, explicit_sandbox_fields=("network",))
    assert (engine.sandbox.network, engine.sandbox.pids) == ("none", 50)


@pytest.mark.usefixtures("nothing_isolates")
def test_environment_that_needs_a_sandbox_is_refused_without_isolation() -> None:
    class Needs(WithoutSandbox):
        sandbox = SandboxSpec(pids=3)

    engine = Engine(WithoutSandbox(), policy=POLICY, runners=0)
    assert engine.sandbox.provider == engine.config.sandbox.provider == ""
    engine.check_sandbox()
    with pytest.raises(UsageError, match=r"local: Not here\..*--unsafe"):
        Engine(Needs(), policy=POLICY, runners=0).check_sandbox()
    consented = Engine(Needs(), policy=POLICY, runners=0, sandbox=SandboxSpec(untrusted_ok=True))
    assert consented.sandbox.provider == "subprocess"
    consented.check_sandbox()


async def test_spec_without_a_provider_uses_that_of_the_run(tmp_path: Path) -> None:
    async with ModelServer("42") as model:
        options = {"env": RequestsSandbox(), "runners": 0, "sandbox": "subprocess"}
        async with build_engine(model, tmp_path, **options) as engine:
            (group,) = [group async for group in engine.groups(["?"])]
    assert group.rollouts[0].info["got"] == ["subprocess", 33]


@pytest.mark.usefixtures("nothing_isolates")
async def test_sandbox_without_isolation_is_refused_without_consent(tmp_path: Path) -> None:
    async with (
        ModelServer("42") as model,
        build_engine(model, tmp_path, env=RequestsSandbox(), runners=0, breaker=None) as engine,
    ):
        (group,) = [group async for group in engine.groups(["?"])]
    outcome = group.rollouts[0].outcome
    assert outcome.cause == "sandbox.refused"  # type: ignore[union-attr]
    assert "--unsafe" in outcome.detail  # type: ignore[union-attr]
    (event,) = events(tmp_path, "sandbox.not_isolated")
    assert "--unsafe" in event["detail"]
