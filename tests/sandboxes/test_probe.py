"""Probe of the local provider: it reports what happened and leaves nothing."""

import asyncio
import os
import tempfile
from pathlib import Path

import pytest

from rookery.core import SandboxSpec
from rookery.sandboxes import ProviderHome, best_provider, open_provider, probe
from rookery.sandboxes.local.provider import LocalProvider
from tests.cli.sandbox_kit import cgroups_of, local_sandboxes, run_cli, without_isolation
from tests.sandboxes.plugins import plugin

__all__ = ["local_sandboxes", "without_isolation"]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("local_sandboxes")
def test_probe_creates_uses_and_removes_a_sandbox(scratch: Path) -> None:
    before = set(cgroups_of(os.getpid()))  # this process may have a keeper for programs, until its end
    proof = probe.probe(LocalProvider)
    assert proof.error == ""
    assert min(proof.create_ms, proof.second_create_ms, proof.exec_ms, proof.close_ms) > 0
    assert {"overlay", "v1", "v2", "missing_controllers"} <= proof.about.keys()
    assert list(scratch.iterdir()) == []
    assert set(cgroups_of(os.getpid())) <= before


@pytest.mark.usefixtures("local_sandboxes")
async def test_probe_works_inside_a_running_event_loop() -> None:
    assert probe.probe(LocalProvider).error == ""
    assert asyncio.get_running_loop().is_running()


@pytest.mark.usefixtures("local_sandboxes")
def test_best_provider_is_local() -> None:
    assert best_provider().name == "local"
    assert best_provider().isolated


def test_unsupported_spec_is_reported_without_a_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> str:
        raise AssertionError("a sandbox was created")

    monkeypatch.setattr("rookery.sandboxes.local.machine_checks.find_problem", broken)
    problems = LocalProvider(ProviderHome(folder=tmp_path, run="r")).check(SandboxSpec(user="nobody-else"))
    assert "nobody-else" in problems[0]


def test_probe_reports_a_failing_provider_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin(tmp_path, "refusing", check="return ['This is\\\\nno machine for it.']")
    proof = probe.probe(lambda home: open_provider("refusing", home))
    assert "no machine for it" in proof.error
    assert "\n" not in proof.error


def test_problem_names_the_reason_and_a_fix(tmp_path: Path, without_isolation: tuple[str, ...]) -> None:
    code = "from rookery.sandboxes.local import machine_checks; print(machine_checks.find_problem())"
    done = run_cli("-c", code, cwd=tmp_path, before=(*without_isolation, *_without_cli()))
    assert "sysctl -w user.max_user_namespaces=15000" in done.out


def _without_cli() -> tuple[str, ...]:
    """Return a command prefix that removes `-m rookery.cli` from the command line."""
    return ("sh", "-c", 'python=$1; shift 3; exec "$python" "$@"', "sh")
