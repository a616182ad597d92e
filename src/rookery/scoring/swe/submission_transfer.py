"""Collect what an agent changed in its sandbox and install it in another sandbox.

Guarantees:
- Only regular files, directories and symbolic links are copied. Links are never followed, neither on the host
  nor in a sandbox.
- Programs in the sandbox are not trusted: files are read from outside. Only targets of links and modes of
  directories are reported by programs inside, and the agent could have chosen these anyway.
- Bytes, entries and time are limited. A submission that exceeds a limit raises `UngradableSubmission`.
- File names are treated as data, whatever characters they contain.
- Other entries (removed, unreadable, sockets, FIFOs, devices) are left out and counted.
"""

import asyncio
import errno
import os
import posixpath
import shutil
import tempfile
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.core import ExecResult, SandboxError
from rookery.core.errors import describe, unwrap_group
from rookery.sandboxes import Sandbox
from rookery.scoring.swe.preparation import Deadline, describe_result, run_script
from rookery.scoring.swe.protected_files import is_below

MAX_BYTES: Final = 256 << 20
MAX_ENTRIES: Final = 50_000
LARGE_SUBMISSION: Final = 32 << 20
"""If a submission of more bytes than this is not copied in time, its size is to blame, not the sandbox."""
MAX_INSPECTED: Final = 10_000
MAX_DOWNLOADS: Final = 8
MAX_ARGV_BYTES: Final = 32 << 10
"""Maximum total length of the arguments on one command line. The kernel allows more, but its limit includes the
environment variables."""
_NOT_PLAIN: Final = (errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EISDIR, errno.EACCES, errno.EPERM)

_CLEAR_SCRIPT: Final = r"""for p; do case $p in
  \?*) p=${p#?}
     if [ -L "$p" ]; then printf "%s\0l%s\0" "$p" "$(readlink -- "$p")"
     elif [ -d "$p" ]; then printf "%s\0d%s\0" "$p" "$(stat -c %a -- "$p")"; fi ;;
  =*) p=${p#=}; [ -d "$p" ] && [ ! -L "$p" ] || rm -rf -- "$p" ;;
  *) p=${p#-}; [ -e "$p" ] || [ -L "$p" ] || continue
     rm -rf -- "$p" 2>/dev/null || { chmod -R u+rwX -- "$p" 2>/dev/null; rm -rf -- "$p"; } ;;
esac; done; exit 0"""
"""Shell script whose arguments are paths with a prefix. For `-` it removes the path, for `=` it removes the path
unless it is a directory, and for `?` it prints the target of a symbolic link or the mode of a directory."""


class UngradableSubmission(Exception):  # noqa: N818  (caused by the submission)
    """The submission cannot be graded because of its size or its files; it counts as a crash of its tests."""


class SubmissionFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of an agent's changes on the host. All paths are those in the sandbox."""

    tree: Path
    """Host directory with the changed files, at their paths relative to the root of the sandbox."""
    folders: frozenset[str]
    """Changed paths that are directories."""
    removed: tuple[str, ...]
    """Paths that the agent removed."""
    replaced: tuple[str, ...]
    """Changed files and symbolic links, which may have had another type before."""
    left_out: int = 0
    """Number of changed entries that were not copied."""
    size: int = 0
    """Total size of the copied files in bytes."""


@contextmanager
def staging_directory() -> Iterator[Path]:
    """Yield a temporary directory on the host, which is removed at the end of the block."""
    folder = tempfile.mkdtemp(prefix="rookery-submission-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def collect_changes(
    sandbox: Sandbox,
    changes: Mapping[str, str],
    tops: Collection[str],
    back: Collection[str],
    into: Path,
    deadline: Deadline,
) -> SubmissionFiles:
    """Copy changes from a sandbox into the host directory `into`.

    `changes` maps each path to `added`, `changed` or `removed`. Only paths below `tops` are copied, without
    those in `back`. Raise `UngradableSubmission` if they exceed a limit.
    """
    changed_paths = sorted(path for path in changes if is_below(path, tops) and path not in back)
    if len(changed_paths) > MAX_ENTRIES:
        raise UngradableSubmission(
            f"the submission changed {len(changed_paths)} files, more than the maximum of {MAX_ENTRIES}"
        )
    # A directory that contains excluded paths stays.
    kept_directories = _parent_directories(back)
    removed = [path for path in changed_paths if changes[path] == "removed" and path not in kept_directories]
    present = [path for path in changed_paths if changes[path] != "removed"]
    budget = _ByteBudget(MAX_BYTES)
    gate = asyncio.Semaphore(MAX_DOWNLOADS)
    tree = into / "tree"
    tree.mkdir()
    parents = _parent_directories(changes)

    async def download(path: str) -> str:
        # A changed path with other changes below it is a directory. For other paths, the download shows the type.
        if path in parents:
            return "folder"
        async with gate:
            return await _download_file(sandbox, path, tree, budget, deadline)

    kinds = dict(zip(present, await _gather([download(path) for path in present]), strict=True))
    for path, kind in kinds.items():
        if kind == "folder":
            get_host_path(tree, path).mkdir(parents=True, exist_ok=True)
    odd = [path for path, kind in kinds.items() if kind == "odd" and path not in kept_directories]
    folders = [path for path, kind in kinds.items() if kind == "folder"]
    seen = await _inspect(sandbox, [*odd, *folders], deadline)
    apply_modes(tree, {path: seen[path][1:] for path in folders if seen.get(path, "").startswith("d")})
    for path in odd:  # links come last, so that nothing is written through one
        if seen.get(path, "").startswith("l") and make_link(tree, path, seen[path][1:]):
            kinds[path] = "link"
    fixed = kept_directories | {top.rstrip("/") for top in tops}
    removed = [path for path in removed if path not in fixed]
    return SubmissionFiles(
        tree=tree,
        folders=frozenset(folders),
        removed=tuple(removed),
        replaced=tuple(
            path
            for path, kind in kinds.items()
            if kind in ("file", "link") and changes[path] == "changed" and path not in fixed
        ),
        left_out=sum(kind in ("odd", "gone") for kind in kinds.values()),
        size=MAX_BYTES - budget.left,
    )


async def install(sandbox: Sandbox, files: SubmissionFiles, tops: Collection[str], deadline: Deadline) -> None:
    """Apply a submission to a sandbox in the state from which the agent started.

    The sandbox's default user owns the installed files.
    """
    marks = [f"-{path}" for path in (*files.removed, *files.replaced)] + [f"={path}" for path in files.folders]
    passed = _intermediate_directories(files)
    cleared = await _run_for_each(sandbox, _CLEAR_SCRIPT, [*marks, *(f"?{path}" for path in passed)], deadline)
    if not cleared.ok:
        raise UngradableSubmission(
            f"cannot remove the files that the submission replaces: {describe_result(cleared)}"
        )
    await _upload_tree(sandbox, files, tops, _parse_inspection(cleared, passed), deadline)


async def collect_directories(
    sandbox: Sandbox, tops: Collection[str], into: Path, deadline: Deadline
) -> SubmissionFiles:
    """Copy whole directories to the host, without symbolic links. Used if the provider cannot list changes."""
    tree = into / "tree"
    tree.mkdir()
    for top in sorted(tops):
        try:
            local = get_host_path(tree, top)
            local.parent.mkdir(parents=True, exist_ok=True)
            await sandbox.download(top, local, limit=MAX_BYTES, timeout=deadline.remaining())
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise UngradableSubmission(
                    f"the submission's directory {top} contains more than {MAX_BYTES} bytes"
                ) from error
    return SubmissionFiles(tree=tree, folders=frozenset(tops), removed=tuple(tops), replaced=())


async def revert(
    sandbox: Sandbox,
    pristine: Sandbox,
    remove: Collection[str],
    restore: Collection[str],
    into: Path,
    deadline: Deadline,
) -> None:
    """Remove the paths in `remove`, and restore the paths in `restore` from the sandbox `pristine`.

    Files are first written from outside: until the shell and the dynamic loader are restored, no program in the
    sandbox can be trusted to start. Therefore files to remove are first replaced by empty ones.
    """
    if not remove and not restore:
        return
    # Files that became directories are removed first, with their content.
    replaced = _parent_directories(remove) & set(restore)
    if replaced:
        await _run_for_each(sandbox, _CLEAR_SCRIPT, [f"-{path}" for path in sorted(replaced)], deadline)
        remove = {path for path in remove if not is_below(path, replaced)}
    files = await collect_changes(pristine, dict.fromkeys(restore, "changed"), ("/",), (), into, deadline)
    for path in remove:
        local = get_host_path(files.tree, path)
        if not any(above.is_symlink() for above in local.parents if above.is_relative_to(files.tree)):
            local.parent.mkdir(parents=True, exist_ok=True)
            if not local.exists() and path not in _parent_directories(remove):
                local.touch(0o600)
    tops = {f"/{path.split('/')[1]}" for path in (*remove, *restore)}
    await _upload_tree(
        sandbox,
        files,
        tops,
        await _inspect(pristine, _intermediate_directories(files), deadline),
        deadline,
    )
    if remove:
        await _run_for_each(sandbox, _CLEAR_SCRIPT, [f"-{path}" for path in remove], deadline)


def _intermediate_directories(files: SubmissionFiles) -> list[str]:
    """Return the directories on the path to collected files that are not themselves part of the submission."""
    found = (f"/{folder.relative_to(files.tree)}" for folder in _walk_directories(files.tree))
    return [path for path in found if path not in files.folders][:MAX_INSPECTED]


async def _upload_tree(
    sandbox: Sandbox,
    files: SubmissionFiles,
    tops: Collection[str],
    seen: Mapping[str, str],
    deadline: Deadline,
) -> None:
    """Upload the files of a submission, one directory of `tops` at a time.

    `seen` is the report of a sandbox about directories that contain changed files and did not change themselves.
    They are uploaded with the modes in that report.
    """
    apply_modes(files.tree, {path: state[1:] for path, state in seen.items() if state.startswith("d")})
    for top in sorted(tops):
        source = get_host_path(files.tree, top)
        if source.is_symlink() or not source.exists():  # `upload` refuses links
            continue
        try:
            await sandbox.upload(source, top, inside=files.tree.parent, timeout=deadline.remaining())
        except TimeoutError as error:
            if files.size > LARGE_SUBMISSION:
                raise UngradableSubmission(
                    f"the submission's {files.size} bytes could not be copied in time"
                ) from error
            raise SandboxError("the submission could not be copied in time", cause="scoring.timeout") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise UngradableSubmission("the submission does not fit into the sandbox for grading") from error
            raise UngradableSubmission(
                f"cannot copy the submission into the sandbox for grading: {describe(error)}"
            ) from error


class _ByteBudget:
    def __init__(self, size: int) -> None:
        self.left = size


async def _gather(work: list[Coroutine[Any, Any, str]]) -> list[str]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in work]
    except BaseExceptionGroup as error:
        raise unwrap_group(error) from error
    return [task.result() for task in tasks]


def _parent_directories(paths: Iterable[str]) -> set[str]:
    """Return all directories that contain the paths."""
    found: set[str] = set()
    for path in paths:
        while (path := posixpath.dirname(path)) not in ("", "/") and path not in found:
            found.add(path)
    return found


async def _download_file(sandbox: Sandbox, path: str, tree: Path, budget: _ByteBudget, deadline: Deadline) -> str:
    if deadline.expired:
        raise UngradableSubmission("the submission could not be read in time")
    local = get_host_path(tree, path)
    try:
        local.parent.mkdir(parents=True, exist_ok=True)
        await sandbox.download(path, local, limit=max(0, budget.left), timeout=deadline.remaining())
    except TimeoutError as error:
        raise UngradableSubmission("the submission could not be read in time") from error
    except (NotADirectoryError, FileNotFoundError, FileExistsError):
        return "gone"
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise UngradableSubmission(
                f"the submission's changed files have more than {MAX_BYTES} bytes in total"
            ) from error
        if error.errno in _NOT_PLAIN:
            return "odd"
        if error.errno in (errno.ENAMETOOLONG, errno.ENOSPC):
            raise UngradableSubmission(
                f"the submission cannot be stored on this machine: {describe(error)}"
            ) from error
        raise SandboxError(f"cannot read {path!r:.200} from the sandbox: {describe(error)}") from error
    if local.is_dir():
        # The list of changes names its content. What was created since then is ignored.
        await asyncio.to_thread(shutil.rmtree, local)
        local.mkdir()
        return "folder"
    budget.left -= local.lstat().st_size
    return "file"


async def _inspect(sandbox: Sandbox, paths: list[str], deadline: Deadline) -> dict[str, str]:
    if not paths:
        return {}
    inspected = paths[:MAX_INSPECTED]
    return _parse_inspection(
        await _run_for_each(sandbox, _CLEAR_SCRIPT, [f"?{path}" for path in inspected], deadline), inspected
    )


def _parse_inspection(result: ExecResult, paths: Collection[str]) -> dict[str, str]:
    parts = result.stdout.decode("utf-8", "surrogateescape").split("\0")
    wanted = set(paths)
    return {
        path: state for path, state in zip(parts[::2], parts[1::2], strict=False) if path in wanted and state[1:]
    }


def apply_modes(tree: Path, modes: Mapping[str, str]) -> None:
    """Set the modes of directories in a host tree to those reported by a sandbox."""
    for path, mode in modes.items():
        local = get_host_path(tree, path)
        if mode.isdigit() and set(mode) <= set("01234567") and local.is_dir() and not local.is_symlink():
            local.chmod(int(mode[-4:], 8) & 0o777 | 0o700)


def _walk_directories(tree: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(tree):
        for name in names:
            local = Path(folder, name)
            if not local.is_symlink():
                yield local


def make_link(tree: Path, path: str, target: str) -> bool:
    """Create the symbolic link at a path of the sandbox in a host tree. Return False if that is not possible."""
    local = get_host_path(tree, path)
    if any(above.is_symlink() for above in local.parents if above.is_relative_to(tree)):
        return False
    try:
        local.parent.mkdir(parents=True, exist_ok=True)
        local.symlink_to(target)
    except OSError:
        return False
    return True


def get_host_path(tree: Path, path: str) -> Path:
    """Return the path below `tree`, a directory of the host, that corresponds to a path in the sandbox.

    Raise `UngradableSubmission` if the path contains `.`, `..` or a NUL. A sandbox should never report such a
    path.
    """
    names = [name for name in path.split("/") if name]
    if any(name in (".", "..") or "\0" in name for name in names):
        raise UngradableSubmission(f"the submission contains the invalid path {path!r:.200}")
    return tree.joinpath(*names)


async def _run_for_each(sandbox: Sandbox, script: str, items: Collection[str], deadline: Deadline) -> ExecResult:
    """Run a shell script with `items` as its arguments.

    If they are too many for one command line, `xargs` runs the script several times.
    """
    listed = b"".join(os.fsencode(item) + b"\0" for item in items)
    if not items:
        return ExecResult(status="exited", exit_code=0)
    if len(listed) < MAX_ARGV_BYTES:
        return await run_script(sandbox, script, *items, deadline=deadline)
    return await run_script(sandbox, f"exec xargs -0 -r sh -c '{script}' sh", stdin=listed, deadline=deadline)
