"""Which sandbox an attempt gets: what the run says, then what the environment says, then the best there is."""

from pathlib import Path

import pytest

from rookery import sandboxes
from rookery.core import SandboxSpec, UsageError
from rookery.engine import Engine
from rookery.environments import Environment
from rookery.sandboxes import ProviderChoice
from tests.engine.conftest import engine, events
from tests.servers import ModelServer

POLICY = "http://localhost:9/v1"


class Plain(Environment):
    async def run(self, ctx) -> None:  # type: ignore[no-untyped-def]
        await ctx.policy.chat(ctx.task.prompt)

    async def score(self, ctx) -> float:  # type: ignore[no-untyped-def]
        return 1.0


class Boxed(Plain):
    sandbox = SandboxSpec(provider="subprocess", pids=50, network="all")


class Asks(Plain):
    """Asks for a sandbox of its own making, without naming who makes it."""

    async def run(self, ctx) -> None:  # type: ignore[no-untyped-def]
        box = await ctx.sandbox(SandboxSpec(pids=33))
        ctx.info["got"] = (box._inner.provider, box._inner.spec.pids)


@pytest.fixture
def nothing_isolates(monkeypatch: pytest.MonkeyPatch) -> None:
    best = ProviderChoice(name="subprocess", isolated=False, refused={"local": "Not here."})
    monkeypatch.setattr(sandboxes, "best_provider", lambda spec=None: best)


def test_an_environment_may_name_its_provider_and_the_run_goes_over_it() -> None:
    made = Engine(Boxed(), policy=POLICY, runners=0)
    assert made.sandbox == Boxed.sandbox
    assert made.config.sandbox == SandboxSpec(provider="subprocess")
    over = Engine(Boxed(), policy=POLICY, runners=0, sandbox=SandboxSpec(provider="local", pids=7))
    assert over.sandbox == SandboxSpec(provider="local", pids=7, network="all")


def test_what_was_named_goes_over_also_where_it_is_the_default() -> None:
    made = Engine(Boxed(), policy=POLICY, runners=0, sandbox_named=("network",))
    assert (made.sandbox.network, made.sandbox.pids) == ("none", 50)


@pytest.mark.usefixtures("nothing_isolates")
def test_where_nothing_isolates_nothing_is_settled_for_and_who_needs_one_is_refused() -> None:
    class Needs(Plain):
        sandbox = SandboxSpec(pids=3)

    made = Engine(Plain(), policy=POLICY, runners=0)
    assert made.sandbox.provider == made.config.sandbox.provider == ""
    made.check_sandbox()
    with pytest.raises(UsageError, match=r"local: Not here\..*--unsafe"):
        Engine(Needs(), policy=POLICY, runners=0).check_sandbox()
    consented = Engine(Needs(), policy=POLICY, runners=0, sandbox=SandboxSpec(untrusted_ok=True))
    assert consented.sandbox.provider == "subprocess"
    consented.check_sandbox()


async def test_a_spec_without_a_provider_is_made_by_the_runs(tmp_path: Path) -> None:
    async with ModelServer("42") as model:
        options = {"env": Asks(), "runners": 0, "sandbox": "subprocess"}
        async with engine(model, tmp_path, **options) as made:
            (group,) = [group async for group in made.groups(["?"])]
    assert group.rollouts[0].info["got"] == ["subprocess", 33]


@pytest.mark.usefixtures("nothing_isolates")
async def test_a_sandbox_that_nobody_consented_to_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    async with ModelServer("42") as model, engine(model, tmp_path, env=Asks(), runners=0, breaker=None) as made:
        (group,) = [group async for group in made.groups(["?"])]
    outcome = group.rollouts[0].outcome
    assert outcome.cause == "sandbox.refused"  # type: ignore[union-attr]
    assert "--unsafe" in outcome.detail  # type: ignore[union-attr]
    (said,) = events(tmp_path, "sandbox.not_isolated")
    assert "sandboxes will be refused" in said["detail"]
