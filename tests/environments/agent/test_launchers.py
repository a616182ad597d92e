"""Launchers are data, and an invalid one is refused when it is loaded."""

import string
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import SandboxSpec, UsageError
from rookery.environments.agent import AgentEnvironment, Launcher, find_launcher, list_launchers
from rookery.environments.agent.launchers import PLACEHOLDERS, fill_placeholders, find_placeholders

BUILT_IN = {
    "anthropic-sdk",
    "claude-code",
    "codex",
    "mini-swe-agent",
    "openai-agents",
    "openai-sdk",
    "program",
}


def test_built_in_launchers_load_and_round_trip() -> None:
    assert set(list_launchers()) >= BUILT_IN
    for name in BUILT_IN:
        launcher = find_launcher(name)
        assert (launcher.name, bool(launcher.about)) == (name, True)
        assert msgspec.convert(msgspec.to_builtins(launcher), Launcher) == launcher


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({}, "command"),
        ({"command": []}, "command"),
        ({"command": ["x", "{prompt}"], "comand": 1}, "'comand'"),
        ({"command": ["x", "{promt}"]}, "{promt}"),
        ({"command": ["x"], "environment": {"A": "{url}"}}, "{url}"),
        ({"command": ["x"]}, "{prompt}"),
        ({"command": ["x"], "prompt": "file"}, "{prompt_file}"),
        ({"command": ["{agent}/x", "{prompt}"]}, "{agent}"),
        ({"command": ["x", "{script}", "{prompt}"]}, "{script}"),
        ({"command": ["x", "{prompt}"], "script": True}, "{script}"),
        ({"command": ["x", "{mcp_file}", "{prompt}"]}, "{mcp_file}"),
        ({"command": ["x", "{prompt}"], "check": ["{key}"]}, "check"),
        ({"command": ["x", "{prompt}"], "install": {"pip": []}}, "pip"),
        ({"command": ["x", "{prompt}"], "install": {"seconds": -1}}, "install.seconds"),
        ({"command": ["x", "{prompt}"], "name": "a b"}, "'a b'"),
        ({"command": ["x", "{driver}", "{prompt}"], "driver": "../x.py"}, "driver"),
    ],
)
def test_invalid_launcher_is_refused(table: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as error:
        find_launcher({"name": "mine", **table})
    assert named in str(error.value)


def test_toml_file_is_a_launcher(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('command = "sh {driver} {prompt}"\ndriver = "go.sh"\n[environment]\nX = "{{{model}}}"\n')
    (tmp_path / "go.sh").write_text("echo $1\n")
    launcher = find_launcher(path)
    assert (launcher.name, launcher.command, launcher.driver_text) == (
        "mine",
        ("sh", "{driver}", "{prompt}"),
        "echo $1\n",
    )
    assert fill_placeholders(launcher.environment["X"], {"model": "m"}) == "{m}"
    for text, named in (("command = [", "mine.toml"), ("x = 1", "'x'")):
        path.write_text(text)
        with pytest.raises(UsageError, match=named):
            find_launcher(str(path))
    with pytest.raises(UsageError, match=r"other\.toml"):
        find_launcher(str(tmp_path / "other.toml"))


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"cladue-code.*claude-code"):
        AgentEnvironment("cladue-code")


@given(st.text(alphabet=string.ascii_lowercase + "{}_ ", max_size=40), st.sampled_from(sorted(PLACEHOLDERS)))
def test_placeholders_in_values_are_not_filled(prompt: str, name: str) -> None:
    assert fill_placeholders(f"<{{{name}}}>", {name: prompt}) == f"<{prompt}>"
    assert fill_placeholders(f"{{{{{name}}}}}", {}) == f"{{{name}}}"
    assert find_placeholders(f"{{{{{name}}}}}") == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"launcher": "program"}, "script"),
        ({"launcher": "mini-swe-agent", "script": "x.py"}, "script"),
        ({"launcher": "program", "script": "/nowhere/x.py"}, "/nowhere/x.py"),
        ({"launcher": "mini-swe-agent", "args": "-v"}, "args"),
        ({"launcher": "mini-swe-agent", "timeout": 0}, "timeout"),
        ({"launcher": "mini-swe-agent", "model": ""}, "model"),
    ],
)
def test_invalid_environment_arguments_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        AgentEnvironment(**arguments)


@pytest.mark.parametrize("network", ["none", "allow"])
def test_network_without_the_gateway_is_a_problem(network: Any) -> None:
    (problem,) = AgentEnvironment({"name": "x", "command": ["x", "{prompt}"]}).check(SandboxSpec(network=network))
    assert "'model'" in problem
    assert network in problem


def test_installed_package_adds_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rookery_test_plugin.py").write_text(
        'LAUNCHER = {"command": ["x", "{prompt}"], "about": "from a package"}\n'
    )
    info = tmp_path / "rookery_test_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rookery-test-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[rookery.launchers]\nadded = rookery_test_plugin:LAUNCHER\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "added" in list_launchers()
    assert find_launcher("added").about == "from a package"
    assert AgentEnvironment("added").launcher.name == "added"
