"""Launchers are data, and what is wrong with one is said when it is made."""

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


def test_every_built_in_launcher_can_be_made_and_read_again() -> None:
    assert set(list_launchers()) >= BUILT_IN
    for name in BUILT_IN:
        made = find_launcher(name)
        assert (made.name, bool(made.about)) == (name, True)
        assert msgspec.convert(msgspec.to_builtins(made), Launcher) == made


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "has no command"),
        ({"command": []}, "has no command"),
        ({"command": ["x", "{prompt}"], "comand": 1}, "no key 'comand'"),
        ({"command": ["x", "{promt}"]}, "unknown placeholder {promt}"),
        ({"command": ["x"], "environment": {"A": "{url}"}}, "environment.A has the unknown placeholder {url}"),
        ({"command": ["x"]}, "no {prompt}"),
        ({"command": ["x"], "prompt": "file"}, "{prompt_file}"),
        ({"command": ["{agent}/x", "{prompt}"]}, "installs nothing"),
        ({"command": ["x", "{script}", "{prompt}"]}, "script = true"),
        ({"command": ["x", "{prompt}"], "script": True}, "{script}"),
        ({"command": ["x", "{mcp_file}", "{prompt}"]}, "has no [mcp]"),
        ({"command": ["x", "{prompt}"], "check": ["{key}"]}, "check may only use"),
        ({"command": ["x", "{prompt}"], "install": {"pip": []}}, "pip"),
        ({"command": ["x", "{prompt}"], "install": {"seconds": -1}}, "install.seconds"),
        ({"command": ["x", "{prompt}"], "name": "a b"}, "its name must be"),
        ({"command": ["x", "{driver}", "{prompt}"], "driver": "../x.py"}, "driver"),
    ],
)
def test_what_is_wrong_with_a_launcher_is_reported(table: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        find_launcher({"name": "mine", **table})
    assert said in str(error.value)


def test_a_file_of_the_users_own_is_a_launcher(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('command = "sh {driver} {prompt}"\ndriver = "go.sh"\n[environment]\nX = "{{{model}}}"\n')
    (tmp_path / "go.sh").write_text("echo $1\n")
    made = find_launcher(path)
    assert (made.name, made.command, made.driver_text) == ("mine", ("sh", "{driver}", "{prompt}"), "echo $1\n")
    assert fill_placeholders(made.environment["X"], {"model": "m"}) == "{m}"
    for text, said in (("command = [", "is not TOML"), ("x = 1", "no key 'x'")):
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            find_launcher(str(path))
    with pytest.raises(UsageError, match="does not exist"):
        find_launcher(str(tmp_path / "other.toml"))


def test_a_name_that_is_unknown_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"cladue-code.*claude-code"):
        AgentEnvironment("cladue-code")


@given(st.text(alphabet=string.ascii_lowercase + "{}_ ", max_size=40), st.sampled_from(sorted(PLACEHOLDERS)))
def test_what_fills_a_placeholder_is_never_filled_in_itself(prompt: str, name: str) -> None:
    assert fill_placeholders(f"<{{{name}}}>", {name: prompt}) == f"<{prompt}>"
    assert fill_placeholders(f"{{{{{name}}}}}", {}) == f"{{{name}}}"
    assert find_placeholders(f"{{{{{name}}}}}") == []


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"launcher": "program"}, "script=FILE"),
        ({"launcher": "mini-swe-agent", "script": "x.py"}, "takes no script"),
        ({"launcher": "program", "script": "/nowhere/x.py"}, "cannot be read"),
        ({"launcher": "mini-swe-agent", "args": "-v"}, "args"),
        ({"launcher": "mini-swe-agent", "timeout": 0}, "timeout"),
        ({"launcher": "mini-swe-agent", "model": ""}, "model"),
    ],
)
def test_an_environment_that_cannot_work_is_refused_when_it_is_made(given_: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        AgentEnvironment(**given_)


@pytest.mark.parametrize("network", ["none", "allow"])
def test_a_network_that_does_not_lead_to_the_gateway_is_refused_before_the_start(network: Any) -> None:
    (said,) = AgentEnvironment({"name": "x", "command": ["x", "{prompt}"]}).check(SandboxSpec(network=network))
    assert "'model'" in said
    assert network in said


def test_an_installed_package_adds_a_launcher_by_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
