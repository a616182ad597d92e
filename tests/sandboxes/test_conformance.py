"""Conformance checks of the protocol for `subprocess` and `local`."""

import pytest
from click.testing import CliRunner

from rookery.sandboxes import Provider, ProviderHome, open_provider
from rookery.sandboxes.conformance import CHECKS, Check, find_capabilities
from rookery.sandboxes.conformance.__main__ import main


@pytest.mark.long
@pytest.mark.parametrize("name", ["subprocess", "local"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_provider_conforms(name: str, check: Check, home: ProviderHome) -> None:
    provider = open_provider(name, home)
    try:
        await check(provider)
    finally:
        await provider.close()


@pytest.mark.long
async def test_capabilities_are_those_that_work(home: ProviderHome) -> None:
    found = {}
    for name in ("subprocess", "local"):
        provider = open_provider(name, home)
        found[name] = {feature for feature, works in (await find_capabilities(provider)).items() if works}
        await provider.close()
    assert {"network all", "kill all"} <= found["subprocess"]
    assert found["subprocess"].isdisjoint({"isolation", "network model", "snapshots", "mounts"})
    assert found["subprocess"] < found["local"]
    assert {"isolation", "network model", "network allow", "mounts", "snapshots"} <= found["local"]


@pytest.mark.long
def test_checks_can_be_run_as_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    one = "a_cancelled_exec_kills_the_whole_tree"
    done = CliRunner().invoke(main, ["subprocess", "-k", one])
    *capabilities, result = [line.split(maxsplit=1) for line in done.output.splitlines()]
    assert (done.exit_code, result[0], result[1].split()[0]) == (0, "ok", one)
    assert ["no", "isolation"] in capabilities
    assert ["yes", "usage"] in capabilities
    assert CliRunner().invoke(main, ["nowhere"]).exit_code == 2
    assert CliRunner().invoke(main, ["subprocess", "--image", "x"]).exit_code == 1  # not supported

    async def fail(_: Provider) -> None:
        raise AssertionError("broken")

    monkeypatch.setattr("rookery.sandboxes.conformance.__main__.CHECKS", (fail,))
    assert CliRunner().invoke(main, ["subprocess"]).exit_code == 1
