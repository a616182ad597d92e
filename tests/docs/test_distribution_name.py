"""No text tells users to install `rookery`, which is another project's distribution on PyPI."""

import re
import subprocess
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

import rookery

ROOT = Path(__file__).parents[2]
OTHER = "rookery"
NAME = "rookery-rl"
INSTALLS = re.compile(
    rf"\b(?:pip3?|pipx|uv|poetry|conda|mamba)\b[^\n`]*\b(?:install|add|run)\b[^\n`]*(?<![\w./:-]){OTHER}(?![\w./:-])",
    re.IGNORECASE,
)
EXTRA = re.compile(rf"(?<![\w./-]){OTHER}\\?\[[a-z]")


def list_text_files() -> list[Path]:
    """Return the tracked files of the checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    folders = (ROOT / name for name in ("src", "tests", "tools", "docs", "benchmarks"))
    return [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*"))]


def find_wrong_names(text: str) -> list[str]:
    return [match[0] for pattern in (INSTALLS, EXTRA) for match in pattern.finditer(text)]


def test_no_text_tells_users_to_install_the_other_project() -> None:
    found = {}
    for path in list_text_files():
        if path.is_file() and path.stat().st_size < 1 << 20:
            data = path.read_bytes()
            if b"\0" not in data and (lines := find_wrong_names(data.decode("utf-8", "replace"))):
                found[str(path.relative_to(ROOT))] = lines
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install {}",
        "pip install '{}[x]'",
        "python -m pip install torch {}",
        "uv add {}",
        "uv pip install -U {}",
        "'{}[x]'",
    ],
)
def test_the_check_sees_every_way_to_name_it(text: str) -> None:
    assert find_wrong_names(text.format(OTHER))
    assert not find_wrong_names(text.format(NAME))


def test_the_distribution_has_its_own_name_and_the_module_and_command_keep_theirs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == NAME
    assert project["scripts"] == {OTHER: "rookery.cli:main"}
    assert rookery.__name__ == OTHER
    assert distribution(NAME).version == rookery.__version__
