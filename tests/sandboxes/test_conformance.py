"""Conformance checks of the protocol for `subprocess` and `local`."""

import pytest
from click.testing import CliRunner

from rookery.sandboxes import Provider, ProviderHome, open_provider
from rookery.sandboxes.conformance import CHECKS, Check
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
def test_checks_can_be_run_as_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    one = "a_cancelled_exec_kills_the_whole_tree"
    done = CliRunner().invoke(main, ["subprocess", "-k", one])
    assert (done.exit_code, done.output.split()[:2]) == (0, ["ok", one])
    assert CliRunner().invoke(main, ["nowhere"]).exit_code == 2
    assert CliRunner().invoke(main, ["subprocess", "--image", "x"]).exit_code == 1  # not supported

    async def fail(_: Provider) -> None:
        raise AssertionError("broken")

    monkeypatch.setattr("rookery.sandboxes.conformance.__main__.CHECKS", (fail,))
    assert CliRunner().invoke(main, ["subprocess"]).exit_code == 1
