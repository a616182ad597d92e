"""The structure of the package that docs/architecture.md and CONTRIBUTING.md promise."""

import ast
import re
import sys
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "rookery"
MODULES = [path for path in PACKAGE.rglob("*.py") if "swe/repairs/data" not in path.as_posix()]

GENERAL = ("cli", "core", "engine", "gateway", "journal", "telemetry", "training", "trajectories", "view")
"""Packages that must work with every plug-in, so they name none."""


def test_no_module_shadows_a_module_of_the_standard_library() -> None:
    names = {path.parent.name if path.stem == "__init__" else path.stem for path in MODULES}
    assert names & sys.stdlib_module_names <= {"__main__"}


def test_no_module_has_more_than_650_lines() -> None:
    assert [path for path in MODULES if len(path.read_text().splitlines()) > 650] == []


def test_the_architecture_page_names_existing_files() -> None:
    page = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w-]+/[\w./-]*)`", page))
    assert named
    assert [name for name in named if not (PACKAGE / name).exists()] == []


def test_general_packages_name_no_sandbox_provider_and_no_kind_of_upstream() -> None:
    plugins = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]["entry-points"]
    names = {*plugins["rookery.sandboxes"], *plugins["rookery.upstreams"]}
    names -= {"none", "function", "steps", "openai", "ssh", "subprocess"}  # words with other meanings
    # The commands for the built-in model, and the renderer of its chat format.
    own = {"cli/demo.py", "cli/serve_embedded.py", "cli/train.py", "cli/validate.py"}
    own |= {"gateway/chat_renderers/embedded_renderer.py", "gateway/media.py"}  # the latter names a domain
    found = []
    for path in MODULES:
        module = path.relative_to(PACKAGE).as_posix()
        if module.split("/")[0] in GENERAL and module not in own:
            nodes = ast.walk(ast.parse(path.read_text()))
            found += [(module, one.value) for one in nodes if isinstance(one, ast.Constant) and one.value in names]
    assert found == []
