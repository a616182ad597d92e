"""The public API: what `rookery` exports, and that the docs use nothing else."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rookery

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PUBLIC = {
    "rookery",
    "rookery.core",
    "rookery.engine",
    "rookery.environments",
    "rookery.environments.agent",
    "rookery.environments.rlm",
    "rookery.environments.swe",
    "rookery.environments.swe.repairs",
    "rookery.environments.tools",
    "rookery.gateway.dialects",
    "rookery.journal",
    "rookery.sandboxes",
    "rookery.sandboxes.conformance",
    "rookery.scoring",
    "rookery.tasks",
    "rookery.training",
    "rookery.training.trl",
    "rookery.upstreams",
    "rookery.upstreams.embedded",
    "rookery.upstreams.http_upstream",
    "rookery.workers",
}
"""Documented modules. Everything else is private by convention."""


def list_imports(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of every import from rookery in the Python examples of a page."""
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        tree = compile(block, str(page), "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rookery":
                yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_import_public_names_only(page: Path) -> None:
    for module, name in list_imports(page):
        if f"{module}.{name}" in PUBLIC:
            importlib.import_module(f"{module}.{name}")
            continue
        assert module in PUBLIC, f"{page.name} imports {name} from {module}, which is not public"
        found = importlib.import_module(module)
        assert hasattr(found, name), f"{page.name}: {module} has no {name}"
        exported = getattr(found, "__all__", None)
        assert exported is None or name in exported, f"{page.name}: {name} is not in {module}.__all__"


def test_every_exported_name_can_be_imported() -> None:
    assert all(getattr(rookery, name) is not None for name in rookery.__all__)
    assert set(rookery.__all__) <= set(dir(rookery))
    with pytest.raises(AttributeError):
        rookery.NoSuchName  # noqa: B018


def test_import_of_the_package_imports_no_other_module_of_it() -> None:
    code = "import sys, rookery; dir(rookery); print(*(name for name in sys.modules if name[:8] == 'rookery.'))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == []


def test_type_checkers_see_the_names_that_are_exported() -> None:
    """The imports for type checkers and the table for the lazy import are two lists of the same names."""
    tree = ast.parse(Path(rookery.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {alias.name: node.module for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    assert imported == {name: f"rookery.{package}" for name, package in rookery._HOME.items()}
