"""Which files decide how a test runner or a shell starts, and so are not the submission's to change. Pure.

Guarantees:
- one principle: what configures or starts the runner, the shell, the interpreter or the loader is as the task made
  it: changed ones are put back, new ones are left out, removed ones are there again;
- tests that the task's repository came with are as they were; tests that the submission added are its own;
- a file that also describes the project (`pyproject.toml`, `setup.cfg`, …) is the submission's, unless what it
  says about the runner is different, or cannot be read;
- a new module with the name of one of the standard library is left out where it would be imported in its place;
- all of this is for tests that run the submission as themselves, or among its files: a program that runs as
  another user has nothing to gain from any of it.
"""

import configparser
import json
import posixpath
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

RUNNER: Final = frozenset(
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
SHADOWS: Final = frozenset(
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
"""Modules of runners: a file or folder of that name beside the tests would be run in their place."""
SHELL: Final = frozenset(
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
TEST_FOLDERS: Final = frozenset(("tests", "test", "testing", "__tests__", "spec"))
MIXED: Final = frozenset(("pyproject.toml", "setup.cfg", "tox.ini", "package.json"))
"""Which describe a project and its runner."""
_LIBRARY: Final = sys.stdlib_module_names - TEST_FOLDERS
_SECTIONS: Final = re.compile(r"tool:pytest|pytest|nosetests|coverage.*|aliases|unittest|tox|testenv.*")
_TOOLS: Final = ("pytest", "coverage", "nose", "tox", "nox", "hatch")
_SCRIPTS: Final = ("test", "pretest", "posttest")
_PACKAGE: Final = ("jest", "mocha", "ava", "vitest", "c8", "nyc", "jasmine")

PROGRAMS: Final = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
LIBRARIES: Final = (
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
PACKAGES: Final = ("site-packages", "dist-packages", "node_modules", "gems")
"""Folders that packages are installed into: of what lies there only the runners are the task's."""
_FIRST: Final = re.compile(r"/python[0-9.]+/|/python[0-9]+\.zip$|/glibc-hwcaps/|/tls/")
LOADER: Final = (
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
"""How programs of everybody start."""


def is_runner(path: str) -> bool:
    """Whether a file decides over how tests are run."""
    name = posixpath.basename(path)
    if name in RUNNER or any(pattern.fullmatch(name) for pattern in RUNNER_PATTERNS):
        return True
    parts = path.split("/")
    if "__pycache__" in parts:  # what Python would take for the compiled form of any source
        return True
    return any(
        part.removesuffix(".py").removesuffix(".so") in SHADOWS for part in parts[1:] if part.isascii()
    ) or (name == "entry_points.txt" and len(parts) > 1 and parts[-2].endswith((".dist-info", ".egg-info")))


def is_test(path: str, top: str) -> bool:
    """Whether a file of the repository is one of its tests."""
    below = posixpath.relpath(path, top).split("/")
    return bool(TEST_NAMES.fullmatch(below[-1])) or any(part in TEST_FOLDERS for part in below[:-1])


def is_start(path: str) -> bool:
    """Whether a file is read by shells when they start."""
    return posixpath.basename(path) in SHELL


def below(path: str, tops: Collection[str]) -> bool:
    return any(path == top or path.startswith(f"{top.rstrip('/')}/") for top in tops)


def kept_back(changes: Mapping[str, str], tops: Collection[str]) -> set[str]:
    """Of changes to the submission's folders, those that are not carried over. What is mixed is not among them."""
    back: set[str] = set()
    for path, how in changes.items():
        top = next((one for one in tops if below(path, (one,))), "/")
        tests = is_test(path, top) or posixpath.basename(path) in TEST_FOLDERS
        if is_runner(path) or is_start(path) or (how != "added" and tests):
            back.add(path)
    return back


def shadowing(changes: Mapping[str, str], tops: Collection[str]) -> set[str]:
    """Return what was added and has the name of a module of the standard library, where an import finds it first.

    That is at the top of the submission's folders and beside tests: Python looks there before it looks at its own
    modules. Deeper in a package such a name is an ordinary one.
    """
    found: set[str] = set()
    for path, how in changes.items():
        top = next((one for one in tops if below(path, (one,))), None)
        if top is None or how != "added":
            continue
        folder = posixpath.relpath(posixpath.dirname(path), top)
        if folder == "." or posixpath.basename(folder) in TEST_FOLDERS:
            name, _, kind = posixpath.basename(path).partition(".")
            if name in _LIBRARY and (not kind or kind.rpartition(".")[2] in ("py", "pyc", "so", "pyd")):
                found.add(path)
    return found


def of_system(
    changes: Mapping[str, str], own: Collection[str], programs: Collection[str]
) -> tuple[set[str], set[str]]:
    """Of changes to a whole file system: what to remove, and what to put back.

    `own`: the submission's folders; `programs`: paths of the programs that there are. Programs and libraries of
    the system are as they were; a new program may stay unless it has the name of one that was there, for a task
    may ask for something to be installed.
    """
    remove: set[str] = set()
    restore: set[str] = set()
    there = {posixpath.basename(path) for path in programs if path not in changes}
    folders = {*PROGRAMS, *(posixpath.dirname(path) for path in programs)}
    for path, how in changes.items():
        if below(path, own):
            continue
        start = is_start(path) or is_runner(path) or below(path, LOADER)
        if how == "added":
            shadows = posixpath.dirname(path) in folders and posixpath.basename(path) in there
            if start or shadows or (below(path, LIBRARIES) and not _installed(path) and _before_others(path)):
                remove.add(path)
        elif start or below(path, folders) or (below(path, LIBRARIES) and not _installed(path)):
            restore.add(path)
    return remove, restore


def _before_others(path: str) -> bool:
    """Whether a new library is found before those that were there: by Python, or by the loader."""
    return bool(_FIRST.search(path))


def _installed(path: str) -> bool:
    return any(part in PACKAGES for part in path.split("/"))


def says_same(name: str, before: bytes, now: bytes) -> bool:
    """Whether two versions of a mixed file say the same about the runner; what cannot be read does not."""
    read: Callable[[bytes], Any] = {"pyproject.toml": _toml, "package.json": _package}.get(name, _config)
    try:
        return bool(read(before) == read(now))
    except (ValueError, RecursionError, configparser.Error, AttributeError, TypeError):
        return False


def _toml(data: bytes) -> Any:
    tools = tomllib.loads(data.decode()).get("tool", {})
    return {name: tools[name] for name in _TOOLS if name in tools}


def _package(data: bytes) -> Any:
    found = json.loads(data or b"{}")
    scripts = found.get("scripts", {})
    return [{name: found.get(name) for name in _PACKAGE}, {name: scripts.get(name) for name in _SCRIPTS}]


def _config(data: bytes) -> Any:
    parser = configparser.RawConfigParser(strict=True)
    parser.read_string("\n".join(data.decode().splitlines()))  # by the line ends that test runners know
    return {name: dict(parser.items(name)) for name in parser.sections() if _SECTIONS.fullmatch(name)}
