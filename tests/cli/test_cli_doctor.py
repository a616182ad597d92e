"""`rookery doctor`: proof of isolation, missing features and fixes."""

import json
import os
import re
from pathlib import Path

import pytest

from rookery.sandboxes.local import machine_checks
from rookery.sandboxes.probe import ProviderProof
from tests.cli.helpers import rookery
from tests.cli.sandbox_kit import cgroups_of, local_sandboxes, own_folder, run_cli, run_cli_as, without_isolation
from tests.cli.test_cli_exec import scratch
from tests.sandboxes.plugins import plugin

__all__ = ["local_sandboxes", "own_folder", "scratch", "without_isolation"]

ABOUT = {"overlay": True, "unified": "/u/rookery", "v1": {}, "v2": ["cpu", "memory", "pids"]}


@pytest.mark.usefixtures("local_sandboxes")
def test_doctor_proves_isolation_and_exits_with_0(tmp_path: Path) -> None:
    done = run_cli("doctor", cwd=tmp_path)
    assert done.code == 0, done.out
    assert re.search(r"^proof +\S.* local .* \d+(\.\d+)? ms", done.out, re.MULTILINE)
    assert re.search(r"^sandbox +local: ", done.out, re.MULTILINE)
    for name in ("kernel", "user namespaces", "seccomp", "overlay", "limit: memory", "limit: pids", "limit: cpu"):
        assert f" {name} " in done.out
    assert "\x1b" not in done.out


@pytest.mark.usefixtures("local_sandboxes")
def test_doctor_json_has_the_same_content(tmp_path: Path) -> None:
    done = run_cli("doctor", "--json", cwd=tmp_path)
    (found,) = done.events
    assert (found["isolated"], found["provider"], found["exit_code"], done.code) == (True, "local", 0, 0)
    assert found["proof"]["error"] == ""
    assert found["proof"]["create_ms"] > 0
    assert found["proof"]["exec_ms"] > 0
    assert "docker" in [check["name"] for check in found["checks"]]
    assert [one for one in found["providers"] if one["name"] not in ("docker", "kubernetes", "ssh")] == [
        {"name": "local", "isolated": True, "works": True, "reason": ""},
        {"name": "subprocess", "isolated": False, "works": True, "reason": ""},
    ]
    assert {check["status"] for check in found["checks"]} <= {"ok", "weaker", "missing", "info"}


def test_doctor_without_isolation_suggests_fixes_and_exits_with_3(
    tmp_path: Path, without_isolation: tuple[str, ...]
) -> None:
    done = run_cli("doctor", cwd=tmp_path, before=without_isolation)
    assert done.code == 3, done.out
    assert "missing  user namespaces  " in done.out
    assert "user namespaces  sysctl -w user.max_user_namespaces=15000" in done.out
    assert re.search(r"^sandbox +subprocess, ", done.out, re.MULTILINE)
    found = json.loads(run_cli("doctor", "--json", cwd=tmp_path, before=without_isolation).out)
    assert (found["isolated"], found["provider"]) == (False, "subprocess")
    works = {one["name"]: one["works"] for one in found["providers"]}
    assert (works["subprocess"], works["local"]) == (True, False)
    assert "sysctl -w" in next(one["reason"] for one in found["providers"] if one["name"] == "local")


def test_doctor_checks_providers_of_other_packages(tmp_path: Path, without_isolation: tuple[str, ...]) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    plugin(plugins, "walled", check="return []")
    plugin(plugins, "broken", check="return []", module="a_module_that_is_not_there")
    done = run_cli(
        "doctor",
        cwd=tmp_path,
        before=without_isolation,
        PYTHONPATH=f"{plugins}:{os.environ.get('PYTHONPATH', '')}",
    )
    assert done.code == 0, done.out
    assert re.search(r"^proof +\S.* walled ", done.out, re.MULTILINE)
    assert " broken: ModuleNotFoundError" in done.out


@pytest.mark.usefixtures("local_sandboxes")
def test_doctor_shows_an_unprivileged_user_what_is_weaker(
    own_folder: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, user = own_folder
    monkeypatch.setenv("TMPDIR", str(folder))
    done = run_cli_as(user, "doctor", "--json", cwd=folder)
    assert done.code == 0, (done.out, done.err)
    (found,) = done.events
    assert found["provider"] == "local"
    for check in found["checks"]:
        if check["status"] in ("weaker", "missing"):
            assert check["fix"], check
    assert list(folder.iterdir()) == []


async def test_invalid_input_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    (await rookery("doctor", "everything", cwd=tmp_path)).assert_refused("everything")
    (await rookery("doctor", "--fix", cwd=tmp_path)).assert_refused("--fix")


def test_doctor_leaves_no_files(tmp_path: Path) -> None:
    before = set(cgroups_of(os.getpid()))
    run_cli("doctor", cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert set(cgroups_of(os.getpid())) <= before


# ---- the checks


def test_every_failed_check_has_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"overlay": False, "unified": "", "v1": {}, "v2": []}
    for user in (0, 1000):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        for proof in (
            ProviderProof(about=nothing),
            ProviderProof(error="mount proc at root/proc: no"),
            ProviderProof(error="mount tmpfs: no"),
        ):
            for check in machine_checks.run_checks(proof):
                assert bool(check.fix) == (check.status in ("weaker", "missing")), check


def test_checks_of_available_features_pass() -> None:
    found = {check.name: check for check in machine_checks.run_checks(ProviderProof(about=ABOUT))}
    assert found["limit: memory"].status == "ok"
    assert found["limit: memory"].found == "cgroup v2 at /u/rookery"
    assert found["overlay"].status == "ok"


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("mount proc at root/proc: Operation not permitted", "systempaths=unconfined"),
        ("mount tmpfs at sandbox: Permission denied", "--privileged"),
    ],
)
@pytest.mark.usefixtures("local_sandboxes")
def test_sandbox_error_is_reported_with_a_fix(error: str, fix: str) -> None:
    missing = [
        check for check in machine_checks.run_checks(ProviderProof(error=error)) if check.status == "missing"
    ]
    assert len(missing) == 1
    assert fix in missing[0].fix


@pytest.mark.parametrize(
    ("release", "status"),
    [
        ("4.18.0-rh", "missing"),
        ("5.8.1", "missing"),
        ("5.10.0-28-amd64", "weaker"),
        ("6.1.0", "ok"),
        ("odd", "missing"),
    ],
)
def test_old_kernels_are_reported(release: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Name:
        sysname = "Linux"
        machine = "x86_64"

    Name.release = release  # type: ignore[attr-defined]
    monkeypatch.setattr(os, "uname", Name)
    assert machine_checks.run_checks(ProviderProof(about=ABOUT))[0].status == status
