"""The task folders of `repairs`, written out of the package's data.

Promises:
- whatever the format, a task has the same instruction, files, tests and solution;
- what differs is how a format says it, and that Harbor's image is built where open-instruct's box is set up;
- the same package gives the same bytes and modes.
"""

import hashlib
import shlex
import shutil
import tomllib
from functools import cache
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import msgspec

from rookery.core import Taskset, UsageError

RepairsFormat: TypeAlias = Literal["open-instruct", "harbor"]
FORMATS: Final[tuple[RepairsFormat, ...]] = get_args(RepairsFormat)
NAME: Final = "repairs"
SECONDS: Final = 600
"""For the tests of one task; they take a few."""

_DATA: Final = Path(__file__).parent / "data"
_PACKAGES: Final = {"gcc": ("gcc", "libc6-dev"), "awk": ("mawk",)}
"""Debian's names of programs, where they are others."""
_ALWAYS: Final = ("bash", "python3")
"""The tests need them."""
_BASE: Final = "debian:bookworm-slim"

_NEEDS: Final = """\
#!/bin/bash
# Run in the working folder before the agent gets it.
set -eu
missing=
for program in {needs}; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
if [ -n "$missing" ]; then
    echo "this task needs programs that are not in the box:$missing" >&2
    exit 1
fi
"""

_HISTORY: Final = """
# The history of the repository.
export HOME=/nonexistent GIT_CONFIG_NOSYSTEM=1
commit() {
    GIT_AUTHOR_NAME=Robin GIT_AUTHOR_EMAIL=robin@example.org GIT_AUTHOR_DATE="$1Z" \\
        GIT_COMMITTER_NAME=Robin GIT_COMMITTER_EMAIL=robin@example.org GIT_COMMITTER_DATE="$1Z" \\
        git commit -q -m "$2"
}
git init -q -b main .
"""

_SOLVE: Final = """\
#!/bin/sh
# The reference solution: whole files, put over the broken ones.
set -eu
cp -R "$(dirname "$0")/files/." {workspace}/
"""

_DOCKERFILE: Final = """\
FROM {base}
# Nothing is fetched where the base has it all.
RUN for program in {needs}; do command -v "$program" >/dev/null || missing=1; done; \\
    [ -z "${{missing:-}}" ] || {{ apt-get update && apt-get install -y --no-install-recommends {packages} \\
    && rm -rf /var/lib/apt/lists/*; }}
RUN grep -q '^user:' /etc/passwd || {{ echo 'user:x:1000:1000::/home/user:/bin/bash' >> /etc/passwd \\
    && echo 'user:x:1000:' >> /etc/group && mkdir -p /home/user && chown 1000:1000 /home/user; }}
WORKDIR {workspace}
COPY seeds/ ./
COPY setup.sh /tmp/setup.sh
RUN bash /tmp/setup.sh && rm /tmp/setup.sh && chown -R 1000:1000 .
"""

_TASK: Final = """\
schema_version = "1.4"

[task]
name = "rookery/{name}"

[metadata]
difficulty = "{difficulty}"
language = "{language}"

[agent]
user = "user"

[verifier]
timeout_sec = {seconds}

[environment]
workdir = "{workspace}"
network_mode = "no-network"
memory_mb = 1024
"""


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known about a task without reading its instruction."""

    language: str
    difficulty: Literal["easy", "medium", "hard"]
    needs: tuple[str, ...]
    words: str
    parts: tuple[str, ...] = ()
    """The names of the parts of its reward; none where it is one number."""


@cache
def names() -> tuple[str, ...]:
    return tuple(sorted(path.name for path in (_DATA / "tasks").iterdir() if (path / "meta.toml").is_file()))


@cache
def about(name: str) -> About:
    if name not in names():
        raise UsageError(f"{NAME} has no task {name!r}: it has {', '.join(names())}")
    return msgspec.convert(tomllib.loads((_DATA / "tasks" / name / "meta.toml").read_text()), About)


def repairs() -> Taskset:
    """The tasks, as an engine takes them."""
    from rookery.tasks import load_tasks

    tasks = load_tasks(folder())
    return Taskset(tuple(tasks), name=NAME, source=NAME)


def folder(kind: RepairsFormat = "open-instruct") -> Path:
    """The folder of task folders, in the cache of tasks of this machine."""
    from rookery.tasks.cache import Cache, key_of

    _check(kind)
    key = key_of(NAME, kind, _digest())
    return Cache().once(key, lambda half: _write(kind, half / NAME), f"the taskset {NAME}") / NAME


def folder_of_harbor() -> Path:
    return folder("harbor")


def write(kind: RepairsFormat, target: Path) -> None:
    """Writes the folder of task folders to a place that is not there yet."""
    _check(kind)
    if target.exists():
        raise UsageError(f"{target} exists already, and nothing is overwritten: name something new")
    _write(kind, target)


def _check(kind: str) -> None:
    if kind not in FORMATS:
        raise UsageError(f"{NAME} is not written as {kind!r}: known are {', '.join(FORMATS)}")


@cache
def _digest() -> str:
    """Of everything that the folders are made from, this file included."""
    whole = hashlib.sha256(Path(__file__).read_bytes())
    for path in _files(_DATA):
        whole.update(f"{path.relative_to(_DATA)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return whole.hexdigest()


def _files(top: Path) -> list[Path]:
    """Compiled files that an interpreter may have left are none of ours."""
    return sorted(path for path in top.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _write(kind: RepairsFormat, target: Path) -> None:
    for name in names():
        place = target / name
        _common(name, place)
        (_open_instruct if kind == "open-instruct" else _harbor)(name, place)


def _common(name: str, place: Path) -> None:
    from rookery.tasks.swe import WORKSPACE

    source = _DATA / "tasks" / name
    _copy(source / "instruction.md", place / "instruction.md")
    _copy_tree(source / "seeds", place / "environment" / "seeds")
    for tests in (_DATA / "shared", source / "tests"):
        _copy_tree(tests, place / "tests")
    _copy_tree(source / "solution", place / "solution" / "files")
    _script(place / "solution" / "solve.sh", _SOLVE.format(workspace=WORKSPACE))


def _open_instruct(name: str, place: Path) -> None:
    found = about(name)
    _script(place / "setup.sh", _setup(name))
    said = {
        "metadata": {"language": found.language, "difficulty": found.difficulty},
        "steps": [{"verifier": {"timeout": float(SECONDS)}}],
    }
    (place / "rookery.json").write_bytes(msgspec.json.format(msgspec.json.encode(said)) + b"\n")


def _harbor(name: str, place: Path) -> None:
    from rookery.tasks.swe import WORKSPACE

    found = about(name)
    needs = _needs(name)
    packages = sorted({package for program in needs for package in _PACKAGES.get(program, (program,))})
    _script(place / "environment" / "setup.sh", _setup(name))
    (place / "environment" / "Dockerfile").write_text(
        _DOCKERFILE.format(base=_BASE, needs=" ".join(needs), packages=" ".join(packages), workspace=WORKSPACE)
    )
    (place / "task.toml").write_text(
        _TASK.format(
            name=name,
            difficulty=found.difficulty,
            language=found.language,
            seconds=SECONDS,
            workspace=WORKSPACE,
        )
    )


def _needs(name: str) -> list[str]:
    return sorted({*_ALWAYS, *about(name).needs})


def _setup(name: str) -> str:
    """What makes sure of the programs, and then makes the history where the task has one."""
    text = _NEEDS.format(needs=" ".join(shlex.quote(program) for program in _needs(name)))
    own = _DATA / "tasks" / name / "setup.sh"
    return text + _HISTORY + own.read_text() if own.is_file() else text


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    # A wheel does not keep modes everywhere.
    with source.open("rb") as file:
        target.chmod(0o755 if file.read(2) == b"#!" else 0o644)


def _copy_tree(source: Path, target: Path) -> None:
    for path in _files(source):
        _copy(path, target / path.relative_to(source))


def _script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
