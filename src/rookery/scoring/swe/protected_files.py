"""Decide which files a submission may not change, because they control how test runners and shells start. Pure
functions.

Changes are given as a mapping from each path to `added`, `changed` or `removed`.

Guarantees:
- Files that configure or start the test runner, the shell, the interpreter or the dynamic loader are selected, so
  that they are graded as the task made them: changed and removed files are restored, added ones are left out.
- Changed tests of the task's repository are selected as well. Tests that the submission added are not.
- A file that also describes the project (`pyproject.toml`, `setup.cfg`, …) is taken from the submission, unless
  its settings for test runners differ or cannot be read.
- A new module is left out if it would be imported instead of a module of the standard library.
- The rules apply if the tests run the submission as their own user or run among the files that the agent left. A
  submission that runs as another user in a fresh sandbox could gain nothing from such files.
"""

import configparser
import json
import posixpath
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

RUNNER_FILES: Final = frozenset(
    [
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "noxfile.py",
        "toxfile.py",
        ".coveragerc",
        "nose.cfg",
        "unittest.cfg",
        "sitecustomize.py",
        "usercustomize.py",
        ".rspec",
        ".mocharc.js",
        ".mocharc.cjs",
        ".mocharc.json",
        ".mocharc.yml",
        ".mocharc.yaml",
        "karma.conf.js",
        "phpunit.xml",
        "phpunit.xml.dist",
        ".pdbrc",
        ".pythonrc.py",
        ".noserc",
        ".bazelrc",
        ".babelrc",
        ".envrc",
    ]
)
RUNNER_PATTERNS: Final = (
    re.compile(r".+\.pth"),
    re.compile(r"__editable__.*"),
    re.compile(r"(jest|vitest|ava|cypress|playwright|jasmine)\.config\.[cm]?[jt]s(on)?"),
)
RUNNER_MODULES: Final = frozenset(
    [
        "pytest",
        "_pytest",
        "pluggy",
        "iniconfig",
        "unittest",
        "doctest",
        "nose",
        "nose2",
        "xdist",
        "pytest_cov",
        "coverage",
    ]
)
"""Modules of test runners. Python would import a file or directory of that name beside the tests instead."""
SHELL_FILES: Final = frozenset(
    [
        ".bashrc",
        ".bash_profile",
        ".bash_login",
        ".bash_logout",
        ".bash_aliases",
        ".profile",
        ".shrc",
        ".kshrc",
        ".zshrc",
        ".zshenv",
        ".zprofile",
        ".zlogin",
        ".inputrc",
        ".cshrc",
        ".tcshrc",
        ".login",
        ".xprofile",
        ".pam_environment",
        ".env",
    ]
)
TEST_NAMES: Final = re.compile(
    r"test_.+\.py|.+_test\.(py|go|c|cc|cpp|rb|sh)|tests?\.(py|sh|c)|.+\.(test|spec)\.[cm]?[jt]sx?|.+_spec\.rb|.+Test\.java|.+\.bats"
)
TEST_DIRECTORIES: Final = frozenset(("tests", "test", "testing", "__tests__", "spec"))
MIXED_FILES: Final = frozenset(("pyproject.toml", "setup.cfg", "tox.ini", "package.json"))
"""Files that describe a project and also configure test runners."""
_STDLIB: Final = sys.stdlib_module_names - TEST_DIRECTORIES
_RUNNER_SECTIONS: Final = re.compile(r"tool:pytest|pytest|nosetests|coverage.*|aliases|unittest|tox|testenv.*")
_RUNNER_TOOLS: Final = ("pytest", "coverage", "nose", "tox", "nox", "hatch")
_TEST_SCRIPTS: Final = ("test", "pretest", "posttest")
_PACKAGE_KEYS: Final = ("jest", "mocha", "ava", "vitest", "c8", "nyc", "jasmine")

PROGRAM_DIRECTORIES: Final = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
LIBRARY_DIRECTORIES: Final = (
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/libx32",
    "/usr/libexec",
    "/usr/local/lib",
)
PACKAGE_DIRECTORIES: Final = ("site-packages", "dist-packages", "node_modules", "gems")
"""Directories that packages are installed into. Only test runners in them are protected."""
_SEARCHED_FIRST: Final = re.compile(r"/python[0-9.]+/|/python[0-9]+\.zip$|/glibc-hwcaps/|/tls/")
SYSTEM_STARTUP: Final = (
    "/etc/alternatives",
    "/etc/perl",
    "/etc/ld.so.preload",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/ld.so.cache",
    "/etc/environment",
    "/etc/profile",
    "/etc/profile.d",
    "/etc/bash.bashrc",
    "/etc/bashrc",
    "/etc/zsh",
    "/etc/inputrc",
    "/etc/localtime",
    "/etc/pip.conf",
    "/etc/gitconfig",
)
"""Files that control how programs of all users start."""


def is_runner_file(path: str) -> bool:
    """Return whether a file controls how tests are run."""
    name = posixpath.basename(path)
    if name in RUNNER_FILES or any(pattern.fullmatch(name) for pattern in RUNNER_PATTERNS):
        return True
    parts = path.split("/")
    if "__pycache__" in parts:  # Python would use it as the compiled form of a source file
        return True
    return any(
        part.removesuffix(".py").removesuffix(".so") in RUNNER_MODULES for part in parts[1:] if part.isascii()
    ) or (name == "entry_points.txt" and len(parts) > 1 and parts[-2].endswith((".dist-info", ".egg-info")))


def is_test(path: str, top: str) -> bool:
    """Return whether a file of the repository is one of its tests."""
    below = posixpath.relpath(path, top).split("/")
    return bool(TEST_NAMES.fullmatch(below[-1])) or any(part in TEST_DIRECTORIES for part in below[:-1])


def is_shell_startup(path: str) -> bool:
    """Return whether shells read a file when they start."""
    return posixpath.basename(path) in SHELL_FILES


def is_below(path: str, tops: Collection[str]) -> bool:
    """Return whether a path is one of the directories `tops`, or is inside one of them."""
    return any(path == top or path.startswith(f"{top.rstrip('/')}/") for top in tops)


def find_protected(changes: Mapping[str, str], tops: Collection[str]) -> set[str]:
    """Return the changed paths below `tops` that are not graded.

    Files in `MIXED_FILES` are not included; compare them with `same_runner_settings`.
    """
    back: set[str] = set()
    for path, how in changes.items():
        top = next((one for one in tops if is_below(path, (one,))), "/")
        tests = is_test(path, top) or posixpath.basename(path) in TEST_DIRECTORIES
        if is_runner_file(path) or is_shell_startup(path) or (how != "added" and tests):
            back.add(path)
    return back


def find_shadowing(changes: Mapping[str, str], tops: Collection[str]) -> set[str]:
    """Return added files that are imported instead of a module of the standard library.

    These are files at the top of the submission's directories and beside tests, which Python searches before
    the standard library. Deeper in a package such a name is harmless.
    """
    found: set[str] = set()
    for path, how in changes.items():
        top = next((one for one in tops if is_below(path, (one,))), None)
        if top is None or how != "added":
            continue
        folder = posixpath.relpath(posixpath.dirname(path), top)
        if folder == "." or posixpath.basename(folder) in TEST_DIRECTORIES:
            name, _, kind = posixpath.basename(path).partition(".")
            if name in _STDLIB and (not kind or kind.rpartition(".")[2] in ("py", "pyc", "so", "pyd")):
                found.add(path)
    return found


def find_system_changes(
    changes: Mapping[str, str], own: Collection[str], programs: Collection[str]
) -> tuple[set[str], set[str]]:
    """Return which added paths outside `own` to remove, and which changed or removed paths to restore.

    `own` are the submission's directories, and `programs` the paths of all programs in the untouched sandbox.
    Programs and libraries of the system are restored. A new program stays unless it has the name of an existing
    one, because a task may ask for an installation.
    """
    remove: set[str] = set()
    restore: set[str] = set()
    existing_names = {posixpath.basename(path) for path in programs if path not in changes}
    folders = {*PROGRAM_DIRECTORIES, *(posixpath.dirname(path) for path in programs)}
    for path, how in changes.items():
        if is_below(path, own):
            continue
        start = is_shell_startup(path) or is_runner_file(path) or is_below(path, SYSTEM_STARTUP)
        if how == "added":
            shadows = posixpath.dirname(path) in folders and posixpath.basename(path) in existing_names
            if (
                start
                or shadows
                or (
                    is_below(path, LIBRARY_DIRECTORIES)
                    and not _is_installed_package(path)
                    and _is_searched_first(path)
                )
            ):
                remove.add(path)
        elif (
            start
            or is_below(path, folders)
            or (is_below(path, LIBRARY_DIRECTORIES) and not _is_installed_package(path))
        ):
            restore.add(path)
    return remove, restore


def _is_searched_first(path: str) -> bool:
    """Return whether Python or the dynamic loader finds a new library before the existing ones."""
    return bool(_SEARCHED_FIRST.search(path))


def _is_installed_package(path: str) -> bool:
    return any(part in PACKAGE_DIRECTORIES for part in path.split("/"))


def same_runner_settings(name: str, before: bytes, now: bytes) -> bool:
    """Return whether two versions of a file in `MIXED_FILES` configure test runners in the same way.

    Return False if one of them cannot be parsed.
    """
    read: Callable[[bytes], Any] = {"pyproject.toml": _read_pyproject, "package.json": _read_package_json}.get(
        name, _read_ini
    )
    try:
        return bool(read(before) == read(now))
    except (ValueError, RecursionError, configparser.Error, AttributeError, TypeError):
        return False


def _read_pyproject(data: bytes) -> Any:
    tools = tomllib.loads(data.decode()).get("tool", {})
    return {name: tools[name] for name in _RUNNER_TOOLS if name in tools}


def _read_package_json(data: bytes) -> Any:
    found = json.loads(data or b"{}")
    scripts = found.get("scripts", {})
    return [{name: found.get(name) for name in _PACKAGE_KEYS}, {name: scripts.get(name) for name in _TEST_SCRIPTS}]


def _read_ini(data: bytes) -> Any:
    parser = configparser.RawConfigParser(strict=True)
    parser.read_string("\n".join(data.decode().splitlines()))  # split lines as test runners do
    return {name: dict(parser.items(name)) for name in parser.sections() if _RUNNER_SECTIONS.fullmatch(name)}
