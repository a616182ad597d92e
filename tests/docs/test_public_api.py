"""The public API: what `rookery` exports, and that the docs use nothing else."""

import ast
import importlib
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import rookery
from rookery.cli.init import init

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
REFERENCE = sorted((ROOT / "docs" / "reference" / "api").glob("*.md"))
DIRECTIVE = re.compile(r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?", re.MULTILINE)


def read_reference() -> dict[str, set[str]]:
    """Return the public names of every module on the API reference pages."""
    modules = {"rookery": set(rookery.__all__)}
    for page in REFERENCE:
        for module, members in DIRECTIVE.findall(page.read_text()):
            listed = members.split(", ") if members else importlib.import_module(module).__all__
            modules[module] = set(listed)
    return modules


PUBLIC = read_reference()
"""Documented modules and their names. Everything else is private by convention."""
EXPORTED = {name for names in PUBLIC.values() for name in names}
INTERNAL_PAGES = {ROOT / "docs" / "architecture.md", ROOT / "docs" / "reference" / "benchmarks.md"}
"""Pages for contributors, which also name private classes."""


def list_imports(code: str) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of every import from rookery in Python code."""
    tree = compile(code, "example", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rookery":
            yield from ((node.module or "", alias.name) for alias in node.names)


def check_imports(code: str) -> None:
    for module, name in list_imports(code):
        if f"{module}.{name}" in PUBLIC:
            importlib.import_module(f"{module}.{name}")
            continue
        assert module in PUBLIC, f"{name} is imported from {module}, which is not public"
        assert name in PUBLIC[module], f"{name} is not a public name of {module}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_import_public_names_only(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        check_imports(block)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_files_import_public_names_only(path: Path) -> None:
    check_imports(path.read_text())


def test_created_environment_imports_public_names_only(tmp_path: Path) -> None:
    created = CliRunner().invoke(init, ["puzzles", str(tmp_path)])
    assert created.exit_code == 0, created.output
    check_imports((tmp_path / "puzzles.py").read_text())


def list_definitions() -> set[str]:
    """Return the names of all public classes and of all functions with an underscore in their names."""
    paths = [path for path in (ROOT / "src").rglob("*.py") if "data" not in path.parts]
    nodes = (node for path in paths for node in ast.parse(path.read_text()).body)
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in nodes if isinstance(node, kinds)}
    return {name for name in names if not name.startswith("_") and (name[0].isupper() or "_" in name)}


DEFINED = list_definitions()
OTHER_MEANING = {"Origin", "Retry", "system_prompt"}
"""Words of the pages that happen to be names of private classes and functions: HTTP headers and options."""


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in INTERNAL_PAGES], ids=lambda page: page.stem
)
def test_pages_for_users_mention_public_names_only(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    code = " ".join(re.findall(r"`([^`\n]+)`", prose))
    mentioned = set(re.findall(r"(?<![\w./-])([A-Z][A-Za-z]+|[a-z]+_[a-z_]+)\b", code))
    assert (mentioned & DEFINED) - EXPORTED - OTHER_MEANING == set()


def test_messages_mention_public_names_only() -> None:
    """Names of classes have two humps, or stand before a dot or a parenthesis. Values in braces are skipped."""
    text = re.sub(r"\{[^}]*\}", "", (ROOT / "tests" / "messages" / "catalogue.txt").read_text())
    mentioned = set(re.findall(r"\b([A-Z][a-z]+[A-Z][A-Za-z]+|[A-Z][A-Za-z]+(?=[.(]\w))\b", text))
    assert {"SandboxSpec", "Engine"} <= mentioned
    assert (mentioned & DEFINED) - EXPORTED == set()
    for module, name in re.findall(r"\b(rookery(?:\.[a-z_]+)+)\.(\w+)\b", text):
        assert f"{module}.{name}" in PUBLIC or name in PUBLIC.get(module, ()), f"{module}.{name}"


def test_the_architecture_page_mentions_classes_that_exist() -> None:
    code = re.findall(r"`([A-Z][A-Za-z]+)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(code) > 10
    assert set(code) - DEFINED == set()


def test_the_reference_lists_every_name_of_the_package() -> None:
    page = (ROOT / "docs" / "reference" / "api" / "index.md").read_text()
    linked = re.findall(r"\[`(\w+)`\]\[rookery\.(\w+)\]", page)
    assert all(shown == target for shown, target in linked)
    assert sorted(target for _, target in linked) == rookery.__all__
    for module in PUBLIC.keys() - {"rookery"}:
        assert f"`{module}`" in page, module


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_every_public_name_of_a_documented_module_can_be_imported(module: str) -> None:
    imported = importlib.import_module(module)
    assert [name for name in sorted(PUBLIC[module]) if not hasattr(imported, name)] == []


@pytest.mark.long
def test_the_site_builds_without_warnings_and_describes_every_public_name(tmp_path: Path) -> None:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    inventory = (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]
    described = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    expected = {f"{module}.{name}" for module, names in PUBLIC.items() for name in names}
    assert expected - described == set()


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
