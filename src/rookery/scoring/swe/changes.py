"""What an agent changed, taken out of its box and put into another one.

Promises:
- only plain files, folders and links are taken; links as links: none is followed, here or there;
- no program of the box is believed: files are read from outside; what a program of it says is where a link leads,
  and a lie about that is a link that the agent could have made itself;
- bytes, entries and time are bounded: `TooMuch` beyond that, which is the submission's doing;
- names are data, whatever they are made of;
- what is no file for another reason (gone, unreadable, a socket, a FIFO, a device) is left out and counted.
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
from rookery.core.errors import behind, describe
from rookery.sandboxes import Sandbox
from rookery.scoring.swe.planted import below
from rookery.scoring.swe.prepare import Clock, run, told

MOST_BYTES: Final = 256 << 20
MOST_ENTRIES: Final = 50_000
LARGE: Final = 32 << 20
"""What a machine carries in the time that gradings have."""
MOST_LOOKED: Final = 10_000
AT_ONCE: Final = 8
MOST_WORDS: Final = 32 << 10
"""Bytes on one command line: the kernel takes more, and a box's own variables count too."""
_GONE: Final = (errno.ENOENT, errno.ENOTDIR)
_NOT_PLAIN: Final = (errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EISDIR, errno.EACCES, errno.EPERM)

_CLEAR: Final = r"""for p; do case $p in
  \?*) p=${p#?}
     if [ -L "$p" ]; then printf "%s\0l%s\0" "$p" "$(readlink -- "$p")"
     elif [ -d "$p" ]; then printf "%s\0d%s\0" "$p" "$(stat -c %a -- "$p")"; fi ;;
  =*) p=${p#=}; [ -d "$p" ] && [ ! -L "$p" ] || rm -rf -- "$p" ;;
  *) p=${p#-}; [ -e "$p" ] || [ -L "$p" ] || continue
     rm -rf -- "$p" 2>/dev/null || { chmod -R u+rwX -- "$p" 2>/dev/null; rm -rf -- "$p"; } ;;
esac; done; exit 0"""
"""Paths that begin with `-` go; of those with `=` what is no folder goes; of those with `?` it says where they
lead, or a folder's mode."""


class TooMuch(Exception):  # noqa: N818  (what a submission did, not an error of ours)
    """The submission is larger than what is graded."""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A submission on this machine: a tree of its files, and what it removed."""

    tree: Path
    folders: frozenset[str]
    """Paths that are folders in it."""
    removed: tuple[str, ...]
    replaced: tuple[str, ...]
    """Files and links in it that may have been something else before."""
    left_out: int = 0
    size: int = 0

    @property
    def empty(self) -> bool:
        return not self.removed and not any(self.tree.iterdir())


@contextmanager
def host_folder() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="rookery-submission-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def take(
    box: Sandbox,
    changes: Mapping[str, str],
    tops: Collection[str],
    back: Collection[str],
    into: Path,
    clock: Clock,
) -> Taken:
    """What was added and changed below `tops`, but for `back`, goes below `into`."""
    held = sorted(path for path in changes if below(path, tops) and path not in back)
    if len(held) > MOST_ENTRIES:
        raise TooMuch(f"it changed {len(held)} files; {MOST_ENTRIES} are graded")
    # A folder in which something is kept back stays.
    firm = _above(back)
    removed = [path for path in held if changes[path] == "removed" and path not in firm]
    there = [path for path in held if changes[path] != "removed"]
    left = _Room(MOST_BYTES)
    gate = asyncio.Semaphore(AT_ONCE)
    tree = into / "tree"
    tree.mkdir()
    parents = _above(changes)

    async def one(path: str) -> str:
        # A folder is told by what lies in it; one that is empty by what reading it says.
        if path in parents:
            return "folder"
        async with gate:
            return await _file(box, path, tree, left, clock)

    kinds = dict(zip(there, await _all([one(path) for path in there]), strict=True))
    for path, kind in kinds.items():
        if kind == "folder":
            _host(tree, path).mkdir(parents=True, exist_ok=True)
    odd = [path for path, kind in kinds.items() if kind == "odd" and path not in firm]
    folders = [path for path, kind in kinds.items() if kind == "folder"]
    seen = await _looked(box, [*odd, *folders], clock)
    dressed(tree, {path: seen[path][1:] for path in folders if seen.get(path, "").startswith("d")})
    for path in odd:  # last: nothing is written through one
        if seen.get(path, "").startswith("l") and _placed_link(tree, path, seen[path][1:]):
            kinds[path] = "link"
    fixed = firm | {top.rstrip("/") for top in tops}
    removed = [path for path in removed if path not in fixed]
    return Taken(
        tree=tree,
        folders=frozenset(folders),
        removed=tuple(removed),
        replaced=tuple(
            path
            for path, kind in kinds.items()
            if kind in ("file", "link") and changes[path] == "changed" and path not in fixed
        ),
        left_out=sum(kind in ("odd", "gone") for kind in kinds.values()),
        size=MOST_BYTES - left.left,
    )


async def put(box: Sandbox, taken: Taken, tops: Collection[str], clock: Clock) -> None:
    """A submission into a box that has the state that it was compared with; it belongs to the box's own user."""
    marks = [f"-{path}" for path in (*taken.removed, *taken.replaced)] + [f"={path}" for path in taken.folders]
    passed = _passed(taken)
    cleared = await _for_each(box, _CLEAR, [*marks, *(f"?{path}" for path in passed)], clock)
    if not cleared.ok:
        raise TooMuch(f"its place cannot be cleared: {told(cleared)}")
    await _uploaded(box, taken, tops, _seen(cleared, passed), clock)


async def whole(box: Sandbox, tops: Collection[str], into: Path, clock: Clock) -> Taken:
    """The folders as they are, where the provider cannot compare: without links."""
    tree = into / "tree"
    tree.mkdir()
    for top in sorted(tops):
        try:
            place = _host(tree, top)
            place.parent.mkdir(parents=True, exist_ok=True)
            await box.download(top, place, limit=MOST_BYTES, timeout=clock.left())
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise TooMuch(f"{top} holds more than {MOST_BYTES} bytes") from error
    return Taken(tree=tree, folders=frozenset(tops), removed=tuple(tops), replaced=())


async def undo(
    box: Sandbox, pristine: Sandbox, remove: Collection[str], restore: Collection[str], into: Path, clock: Clock
) -> None:
    """What was planted goes; what was changed or removed comes back out of the pristine box.

    From outside first: until the shell and the loader are what they were, no program of the box can be started. So
    what is to be removed is made empty before it is.
    """
    if not remove and not restore:
        return
    # Files that became folders: these go first, with all that lies in them.
    replaced = _above(remove) & set(restore)
    if replaced:
        await _for_each(box, _CLEAR, [f"-{path}" for path in sorted(replaced)], clock)
        remove = {path for path in remove if not below(path, replaced)}
    taken = await take(pristine, dict.fromkeys(restore, "changed"), ("/",), (), into, clock)
    for path in remove:
        place = _host(taken.tree, path)
        if not any(above.is_symlink() for above in place.parents if above.is_relative_to(taken.tree)):
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists() and path not in _above(remove):
                place.touch(0o600)
    tops = {f"/{path.split('/')[1]}" for path in (*remove, *restore)}
    await _uploaded(box, taken, tops, await _looked(pristine, _passed(taken), clock), clock)
    if remove:
        await _for_each(box, _CLEAR, [f"-{path}" for path in remove], clock)


def _passed(taken: Taken) -> list[str]:
    """Folders on the way to what was taken, which are not a part of it."""
    found = (f"/{folder.relative_to(taken.tree)}" for folder in _folders_of(taken.tree))
    return [path for path in found if path not in taken.folders][:MOST_LOOKED]


async def _uploaded(
    box: Sandbox, taken: Taken, tops: Collection[str], seen: Mapping[str, str], clock: Clock
) -> None:
    """The tree, folder by folder; those on the way keep the modes that they were seen with."""
    dressed(taken.tree, {path: said[1:] for path, said in seen.items() if said.startswith("d")})
    for top in sorted(tops):
        source = _host(taken.tree, top)
        if source.is_symlink() or not source.exists():  # a source that is a link is refused
            continue
        try:
            await box.upload(source, top, inside=taken.tree.parent, timeout=clock.left())
        except TimeoutError as error:
            if taken.size > LARGE:
                raise TooMuch(f"its {taken.size} bytes could not be carried over in time") from error
            raise SandboxError("the submission did not arrive in time", cause="scoring.timeout") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise TooMuch("it does not fit into the box that it is graded in") from error
            raise TooMuch(f"it cannot be put into its box: {describe(error)}") from error


class _Room:
    def __init__(self, size: int) -> None:
        self.left = size


async def _all(work: list[Coroutine[Any, Any, str]]) -> list[str]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as error:
        raise behind(error) from error
    return [task.result() for task in tasks]


def _above(paths: Iterable[str]) -> set[str]:
    """All folders that the paths lie in."""
    found: set[str] = set()
    for path in paths:
        while (path := posixpath.dirname(path)) not in ("", "/") and path not in found:
            found.add(path)
    return found


async def _file(box: Sandbox, path: str, tree: Path, room: _Room, clock: Clock) -> str:
    if clock.over:
        raise TooMuch("it could not be read in time")
    place = _host(tree, path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        await box.download(path, place, limit=max(0, room.left), timeout=clock.left())
    except TimeoutError as error:
        raise TooMuch("it could not be read in time") from error
    except (NotADirectoryError, FileNotFoundError, FileExistsError):
        return "gone"
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise TooMuch(f"it changed more than {MOST_BYTES} bytes") from error
        if error.errno in _NOT_PLAIN:
            return "odd"
        if error.errno in (errno.ENAMETOOLONG, errno.ENOSPC):
            raise TooMuch(f"it cannot be kept here: {describe(error)}") from error
        raise SandboxError(f"{path!r:.200} cannot be read out of the sandbox: {describe(error)}") from error
    if place.is_dir():
        # What lies in it is told by the changes; what came since then is not looked at.
        await asyncio.to_thread(shutil.rmtree, place)
        place.mkdir()
        return "folder"
    room.left -= place.lstat().st_size
    return "file"


async def _looked(box: Sandbox, paths: list[str], clock: Clock) -> dict[str, str]:
    if not paths:
        return {}
    asked = paths[:MOST_LOOKED]
    return _seen(await _for_each(box, _CLEAR, [f"?{path}" for path in asked], clock), asked)


def _seen(result: ExecResult, paths: Collection[str]) -> dict[str, str]:
    parts = result.stdout.decode("utf-8", "surrogateescape").split("\0")
    wanted = set(paths)
    return {path: said for path, said in zip(parts[::2], parts[1::2], strict=False) if path in wanted and said[1:]}


def dressed(tree: Path, modes: Mapping[str, str]) -> None:
    """Modes of folders in a tree of ours, as a box said them."""
    for path, mode in modes.items():
        place = _host(tree, path)
        if mode.isdigit() and set(mode) <= set("01234567") and place.is_dir() and not place.is_symlink():
            place.chmod(int(mode[-4:], 8) & 0o777 | 0o700)


def _folders_of(tree: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(tree):
        for name in names:
            place = Path(folder, name)
            if not place.is_symlink():
                yield place


def _placed_link(tree: Path, path: str, target: str) -> bool:
    place = _host(tree, path)
    if any(above.is_symlink() for above in place.parents if above.is_relative_to(tree)):
        return False
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)
    except OSError:
        return False
    return True


def _host(tree: Path, path: str) -> Path:
    """Where a path of a box lies in a tree of ours. No name of a diff is `..`, and none is believed not to be."""
    names = [name for name in path.split("/") if name]
    if any(name in (".", "..") or "\0" in name for name in names):
        raise TooMuch("it has names that no file can have")
    return tree.joinpath(*names)


async def _for_each(box: Sandbox, script: str, items: Collection[str], clock: Clock) -> ExecResult:
    """A script without single quotes, over items that are data; those that are too many for one line come in."""
    listed = b"".join(os.fsencode(item) + b"\0" for item in items)
    if not items:
        return ExecResult(status="exited", exit_code=0)
    if len(listed) < MOST_WORDS:
        return await run(box, script, *items, clock=clock)
    return await run(box, f"exec xargs -0 -r sh -c '{script}' sh", stdin=listed, clock=clock)
