"""The structure of the package that docs/architecture.md and CONTRIBUTING.md promise."""

import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "rookery"
MODULES = [path for path in PACKAGE.rglob("*.py") if "swe/repairs/data" not in path.as_posix()]


def test_no_module_shadows_a_module_of_the_standard_library() -> None:
    names = {path.parent.name if path.stem == "__init__" else path.stem for path in MODULES}
    # Two plug-ins have the name under which users choose them: `rookery run code` and `rookery run inspect:TASK`.
    assert names & sys.stdlib_module_names <= {"__main__", "code", "inspect"}


def test_no_module_has_more_than_650_lines() -> None:
    assert [path for path in MODULES if len(path.read_text().splitlines()) > 650] == []


def test_the_architecture_page_names_existing_files() -> None:
    page = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w-]+/[\w./-]*)`", page))
    assert named
    assert [name for name in named if not (PACKAGE / name).exists()] == []
