"""Write the tasks of the built-in taskset `repairs` as directories, in the formats of open-instruct and Harbor.

A task has the same instruction, files, tests and solution in both formats. In Harbor's format an image is built;
in that of open-instruct a setup script runs in the sandbox instead. The written files are always the same.
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
"""Time limit in seconds for the tests of one task, which normally take a few seconds."""

_DATA: Final = Path(__file__).parent / "data"
_PACKAGES: Final = {"gcc": ("gcc", "libc6-dev"), "awk": ("mawk",)}
"""Debian packages that contain a program, for programs whose package has another name."""
_ALWAYS: Final = ("bash", "python3")
"""Programs that the tests of all tasks need."""
_BASE: Final = "debian:bookworm-slim"

_NEEDS: Final = """\
#!/bin/bash
# Runs in the working directory before the agent starts.
set -eu
missing=
for program in {needs}; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
if [ -n "$missing" ]; then
    echo "this task needs programs that are not in the sandbox:$missing" >&2
    exit 1
fi
"""

_HISTORY: Final = """
# Create the history of the repository.
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
# The reference solution: complete files that replace the broken ones.
set -eu
cp -R "$(dirname "$0")/files/." {workspace}/
"""

_DOCKERFILE: Final = """\
FROM {base}
# Install packages only if the base image lacks a program.
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


class TaskInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata of a task in the taskset `repairs`, from its `meta.toml`."""

    language: str
    difficulty: Literal["easy", "medium", "hard"]
    needs: tuple[str, ...]
    """Programs that the sandbox must have, besides bash and python3."""
    description: str
    """One sentence about the bug, for the documentation."""
    parts: tuple[str, ...] = ()
    """Names of the components of the task's reward; empty if the reward is a single number."""


@cache
def names() -> tuple[str, ...]:
    """Return the names of all tasks in the taskset `repairs`, sorted."""
    return tuple(sorted(path.name for path in (_DATA / "tasks").iterdir() if (path / "meta.toml").is_file()))


@cache
def get_info(name: str) -> TaskInfo:
    """Return the metadata of a task; raise `UsageError` if there is no task of that name."""
    if name not in names():
        raise UsageError(f"{NAME} has no task {name!r}: it has {', '.join(names())}")
    return msgspec.convert(tomllib.loads((_DATA / "tasks" / name / "meta.toml").read_text()), TaskInfo)


def repairs() -> Taskset:
    """Return the taskset `repairs`, in the format of open-instruct."""
    from rookery.tasks import load_tasks

    tasks = load_tasks(folder())
    return Taskset(tuple(tasks), name=NAME, source=NAME)


def folder(kind: RepairsFormat = "open-instruct") -> Path:
    """Return the directory that contains one directory per task in the format `kind`.

    If necessary, it is first written into the task cache of this machine.
    """
    from rookery.tasks.cache import TaskCache, make_key

    _check_format(kind)
    key = make_key(NAME, kind, _digest())
    return TaskCache().get_or_create(key, lambda half: _write(kind, half / NAME), f"the taskset {NAME}") / NAME


def harbor_folder() -> Path:
    """Return the directory of the task directories in Harbor's format, like `folder("harbor")`."""
    return folder("harbor")


def write(kind: RepairsFormat, target: Path) -> None:
    """Write one directory per task, in the format `kind`, below `target`, which must not exist yet."""
    _check_format(kind)
    if target.exists():
        raise UsageError(f"{target} already exists and is not overwritten: choose another path")
    _write(kind, target)


def _check_format(kind: str) -> None:
    if kind not in FORMATS:
        raise UsageError(f"{NAME} cannot be written in the format {kind!r}: known are {', '.join(FORMATS)}")


@cache
def _digest() -> str:
    """Return a digest of everything that determines the written files, including this module's source."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in _list_files(_DATA):
        digest.update(f"{path.relative_to(_DATA)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _list_files(top: Path) -> list[Path]:
    """Return all files below `top`, except bytecode caches."""
    return sorted(path for path in top.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _write(kind: RepairsFormat, target: Path) -> None:
    for name in names():
        directory = target / name
        _write_common(name, directory)
        (_write_open_instruct if kind == "open-instruct" else _write_harbor)(name, directory)


def _write_common(name: str, directory: Path) -> None:
    from rookery.tasks.swe import WORKSPACE

    source = _DATA / "tasks" / name
    _copy(source / "instruction.md", directory / "instruction.md")
    _copy_tree(source / "seeds", directory / "environment" / "seeds")
    for tests in (_DATA / "shared", source / "tests"):
        _copy_tree(tests, directory / "tests")
    _copy_tree(source / "solution", directory / "solution" / "files")
    _write_script(directory / "solution" / "solve.sh", _SOLVE.format(workspace=WORKSPACE))


def _write_open_instruct(name: str, directory: Path) -> None:
    info = get_info(name)
    _write_script(directory / "setup.sh", _make_setup(name))
    description = {
        "metadata": {"language": info.language, "difficulty": info.difficulty},
        "steps": [{"verifier": {"timeout": float(SECONDS)}}],
    }
    (directory / "rookery.json").write_bytes(msgspec.json.format(msgspec.json.encode(description)) + b"\n")


def _write_harbor(name: str, directory: Path) -> None:
    from rookery.tasks.swe import WORKSPACE

    info = get_info(name)
    needs = _list_programs(name)
    packages = sorted({package for program in needs for package in _PACKAGES.get(program, (program,))})
    _write_script(directory / "environment" / "setup.sh", _make_setup(name))
    (directory / "environment" / "Dockerfile").write_text(
        _DOCKERFILE.format(base=_BASE, needs=" ".join(needs), packages=" ".join(packages), workspace=WORKSPACE)
    )
    (directory / "task.toml").write_text(
        _TASK.format(
            name=name,
            difficulty=info.difficulty,
            language=info.language,
            seconds=SECONDS,
            workspace=WORKSPACE,
        )
    )


def _list_programs(name: str) -> list[str]:
    return sorted({*_ALWAYS, *get_info(name).needs})


def _make_setup(name: str) -> str:
    """Return a task's setup script, which checks for required programs and then runs the task's own setup."""
    text = _NEEDS.format(needs=" ".join(shlex.quote(program) for program in _list_programs(name)))
    own = _DATA / "tasks" / name / "setup.sh"
    return text + _HISTORY + own.read_text() if own.is_file() else text


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    # Wheels do not preserve file modes on all systems.
    with source.open("rb") as file:
        target.chmod(0o755 if file.read(2) == b"#!" else 0o644)


def _copy_tree(source: Path, target: Path) -> None:
    for path in _list_files(source):
        _copy(path, target / path.relative_to(source))


def _write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
