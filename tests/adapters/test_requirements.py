"""Tests that every adapter for a trainer has a page, an example, a tested range of versions, and short modules."""

import ast
import asyncio
import importlib
import logging
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rookery.adapters import compatibility
from rookery.adapters.nemo_gym.server import NemoGymServer
from rookery.adapters.tinker import TinkerPolicy
from rookery.adapters.trainer_engine import ThreadedTrainerEngine, TrainerEngine
from rookery.adapters.verifiers.server import VerifiersServer
from rookery.adapters.verifiers.taskset_package import write_package
from tests.adapters.kit import ScriptedEnvironment

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "src" / "rookery" / "adapters"
MAX_LINES = 170
MAX_CODE = 155
"""Maximum number of lines of code for an interface of a trainer, without imports, docstrings and comments."""
INTERFACES = {
    "nemo_gym": ("agent server", "data set and configuration"),
    "slime": ("rollout function", "data source"),
    "trl": ("rollout function", "rollout worker"),
    "verifiers": ("environment server", "taskset package"),
    "verl": ("agent-loop manager", "agent loop"),
}
"""The interfaces of a trainer that an adapter implements, where these are several."""
PAGES = {
    "areal": "areal",
    "nemo_gym": "nemo-gym",
    "open_instruct": "open-instruct",
    "openenv": "trl",
    "openrlhf": "openrlhf",
    "skyrl": "skyrl",
    "slime": "slime",
    "tinker": "tinker",
    "trl": "trl",
    "verifiers": "prime-rl",
    "verl": "verl",
}
"""The page in `docs/trainers` of each adapter."""
RANGES = {
    "areal": "areal",
    "nemo_gym.server": "nemo-gym",
    "openenv": "openenv",
    "openrlhf": "openrlhf",
    "skyrl": "skyrl",
    "slime.rollout_function": "slime",
    "tinker": "tinker",
    "trl.settings": "trl",
    "verifiers.server": "verifiers",
    "verl.rollouts": "verl",
}
"""The package whose versions a module of an adapter checks."""


@pytest.mark.parametrize("name", PAGES)
def test_adapters_and_their_modules_are_short(name: str) -> None:
    module = ADAPTERS / f"{name}.py"
    sources = [
        path.read_text(encoding="utf-8")
        for path in ([module] if module.exists() else (ADAPTERS / name).glob("*.py"))
    ]
    assert all(len(source.splitlines()) <= MAX_LINES for source in sources)
    assert sum(map(count_code, sources)) <= MAX_CODE * len(INTERFACES.get(name, [name]))


def count_code(source: str) -> int:
    """Return the number of lines that are not blank, nor part of an import, a docstring or a comment."""
    left = {number for number, line in enumerate(source.splitlines(), 1) if line.split("#")[0].strip()}
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            left -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(left)


@pytest.mark.parametrize("name", sorted(set(PAGES.values())))
def test_page_starts_with_a_command_and_names_an_example_and_the_limits(name: str) -> None:
    page = (ROOT / "docs" / "trainers" / f"{name}.md").read_text(encoding="utf-8")
    first, *_ = re.findall(r"^```(\w+)\n", page, re.MULTILINE)
    assert first == "console"
    assert page.index("```console") < page.index("\n## ")
    examples = re.findall(r"examples/(\w+\.(?:py|sh))", page)
    assert examples
    assert all((ROOT / "examples" / example).is_file() for example in examples)
    _, table = page.split("## What this trainer can and cannot express\n")
    assert "| failed rollout |" in table
    assert re.search(r"\b\d+\.\d+\.\d+\b|commit [0-9a-f]{7}\b", table)  # what was tested


@pytest.mark.parametrize("name", RANGES)
def test_tested_range_names_the_package_and_two_versions(name: str) -> None:
    package, oldest, before = importlib.import_module(f"rookery.adapters.{name}").TESTED
    assert package == RANGES[name]
    assert compatibility.parse_release(oldest) < compatibility.parse_release(before)


def test_generated_taskset_package_needs_the_tested_versions(tmp_path: Path) -> None:
    write_package([], tmp_path, "tasks", "tcp://127.0.0.1:5000")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    package, oldest, before = importlib.import_module("rookery.adapters.verifiers.server").TESTED
    assert project["dependencies"] == [f"{package}>={oldest},<{before}"]


class NoPolicy:
    """A service that is not used: the servers refuse to start, or are stopped at once."""

    has_policy = True
    unfinished = 0


async def serve(server: Any) -> None:
    stop = asyncio.Event()
    stop.set()
    await server.serve(NoPolicy(), "127.0.0.1", 0, lambda _: None, stop)


async def test_other_versions_are_reported_with_the_range(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every adapter in a trainer's process has one of these engines, except that for Tinker."""
    monkeypatch.setattr(compatibility, "version", lambda _: "999.1")
    options: dict[str, Any] = {"trainer": "x", "tested": ("x", "1.0", "1.1"), "policy": "embedded"}
    with caplog.at_level(logging.WARNING, "rookery.adapters"):
        TrainerEngine(ScriptedEnvironment(), **options)
        ThreadedTrainerEngine(ScriptedEnvironment(), **options)
        TinkerPolicy(None)
        await serve(NemoGymServer())
        await serve(VerifiersServer())
    assert [record.args for record in caplog.records] == [
        ("x", "999.1", "1.0", "1.1"),
        ("x", "999.1", "1.0", "1.1"),
        ("tinker", "999.1", "0.36", "0.39"),
        ("nemo-gym", "999.1", "0.7", "0.8"),
        ("verifiers", "999.1", "0.4.0", "0.4.1"),
    ]
