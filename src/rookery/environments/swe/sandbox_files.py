"""Read and replace files in a sandbox for the tool `edit`, with shell scripts that run there as the agent's user.

Paths are resolved inside the sandbox with the agent's permissions; no file of this machine is ever opened. File
names are passed as arguments, never as shell code. New content is written to a temporary file, which gets the mode
and owner of the old file and is renamed over it. If that is impossible (other owner, hard links, read-only
directory), the file is written in place, and restored if that fails. A file that changed since it was read is not
overwritten. `EditRefused` reports a failure, with the system's message; a lost sandbox raises `SandboxError`.

The image needs `sh` and the usual utilities (`stat`, `cat`, `mv`, `find`, …) of GNU or BusyBox, but no Python.
"""

import posixpath
import secrets
from typing import Final, NamedTuple

from rookery.core import ExecResult, SandboxError
from rookery.environments.swe.text_file import EditRefused
from rookery.sandboxes.protocol import Command, Sandbox

MAX_FILE: Final = 4 << 20
"""Maximum size of a file that can be viewed or edited, in bytes."""
MAX_LISTED: Final = 64 << 10
"""Maximum size of a directory listing, in bytes."""

_INSPECT: Final = """
LC_ALL=C; export LC_ALL; p=$1
if [ -d "$p" ]; then
  printf 'folder\\n'
  cd "$p" || exit 1
  # Breadth first, so that the limit does not hide entries of the top level.
  below() { find . "$@" -print0 2>/dev/null | tr '\\0\\n' '\\n?' | sed 's|^..||'; }
  { below -mindepth 1 -maxdepth 1 ! -name '.*' -type d | sed 's|$|/|'
    below -mindepth 1 -maxdepth 1 ! -name '.*' ! -type d
    below -mindepth 2 -maxdepth 2 ! -path './.*' ! -name '.*'
  } | head -c "$3"
  exit 0
fi
if [ ! -e "$p" ]; then
  if [ ! -L "$p" ] && [ -d "$(dirname -- "$p")" ] && [ -x "$(dirname -- "$p")" ]; then
    printf 'missing\\n'; exit 0
  fi
  stat -L -c '' -- "$p" 2>&1 >/dev/null | sed 's|.*: ||'; exit 1
fi
[ -f "$p" ] || { echo 'it is not a regular file'; exit 1; }
message=$(stat -L -c '%i %s %a %u:%g %h %Y' -- "$p" 2>&1) || { printf '%s\\n' "$message"; exit 1; }
[ -r "$p" ] || { echo 'Permission denied'; exit 1; }
set -- "$p" "$2" $message
[ "$4" -le "$2" ] || { printf 'large %s\\n' "$4"; exit 0; }
printf 'file %s\\n' "$message"
exec cat < "$p"
"""
"""Arguments: path, size limit, listing limit. Prints the type on the first line, then the content."""

_REPLACE: Final = """
LC_ALL=C; export LC_ALL; p=$1 was=$2 temporary=$3 mask=$4 mode=$5 owner=$6 links=$7
fail() { [ -z "$t" ] || rm -f -- "$t"; printf '%s\\n' "$1" | sed 's|.*: ||'; exit "${2:-1}"; }
t= real=$p
if [ "$was" = new ]; then
  # A dangling link points to the name to create.
  if [ -L "$p" ]; then real=$(readlink -f -- "$p" 2>&1) || fail "$real"; fi
  [ ! -e "$real" ] || fail 'the file has appeared meanwhile' 3
else
  if [ -L "$p" ]; then real=$(readlink -f -- "$p" 2>&1) || fail "$real"; fi
  now=$(stat -L -c '%i %s %a %u:%g %h %Y' -- "$p" 2>&1) || fail "$now"
  [ "$now" = "$was" ] || fail 'the file has changed meanwhile' 3
  [ -w "$p" ] || fail "$({ : >> "$p"; } 2>&1 || echo 'Permission denied')"
fi
if [ "$links" = 1 ]; then
  umask "$mask"
  h=${real%/*}/$temporary
  # An invalid name or directory fails in the redirection; a full disk fails in cat.
  if message=$( { set -C; cat > "$h"; } 2>&1); then t=$h
  elif [ "$was" = new ] || [ -e "$h" ] || [ -w "${real%/*}/" ]; then t=$h; fail "$message"
  else links=more; fi
fi
if [ -n "$t" ]; then
  same=1
  [ -z "$mode" ] || chmod "$mode" "$t" 2>/dev/null
  if [ "$was" != new ] && ! { [ -O "$real" ] && [ -G "$real" ]; }; then
    chown "$owner" "$t" 2>/dev/null && [ -n "$mode" ] && chmod "$mode" "$t" 2>/dev/null
    [ "$(stat -c '%u:%g' -- "$t")" = "$owner" ] || same=
  fi
  if [ -n "$same" ]; then
    message=$(mv -f -- "$t" "$real" 2>&1) || fail "$message"
    exit 0
  fi
  message=$( { cat "$t" > "$real"; } 2>&1) || fail "$message" 4
  rm -f -- "$t"; exit 0
fi
exit 5
"""
"""Arguments: path, the stat line printed by `_INSPECT` or `new`, temporary name, umask, mode if it is not implied
by the umask, owner, number of hard links. Reads the content from stdin. Exit codes: 3, someone else wrote the
file; 4, written in part; 5, a rename is impossible and the file must be written in place."""

_WRITE_IN_PLACE: Final = """
LC_ALL=C; export LC_ALL; t=
message=$( { cat > "$1"; } 2>&1) || { printf '%s\\n' "$message" | sed 's|.*: ||'; exit 4; }
"""
_REMOVE_TEMPORARY: Final = 'r=$(readlink -f -- "$1") || r=$1; rm -f -- "$(dirname -- "$r")/$2"'
_RESTORE: Final = 'exec cat > "$1"'
_MAKE_PARENTS: Final = """
LC_ALL=C; export LC_ALL; umask 022; d=${1%/*}
[ -z "$d" ] || [ -d "$d" ] || message=$(mkdir -p -- "$d" 2>&1) || {
  printf '%s\\n' "$message" | sed 's|.*: ||'; exit 1
}
"""
_REMOVE: Final = 'LC_ALL=C rm -f -- "$1" 2>&1 | sed "s|.*: ||"; [ ! -e "$1" ]'


class FileState(NamedTuple):
    """The object found at a path: a file, a directory, or nothing."""

    data: bytes | None = None
    """Content of the file, or None if there is no file at the path."""
    stat_line: str = "new"
    """Inode, size, mode, owner, link count and modification time of the file; `new` if there is no file."""
    listing: str | None = None
    """Entries of the directory, one per line, or None if the path is not a directory."""


class SandboxFiles:
    """Access to the files of one sandbox.

    Relative paths are relative to `folder`. `seconds` is the time limit of each shell script.
    """

    def __init__(self, sandbox: Sandbox, folder: str, seconds: float) -> None:
        self._sandbox = sandbox
        self._folder = folder
        self._seconds = seconds

    def resolve(self, path: str) -> str:
        """Return `path` as an absolute path, normalised unless it contains `..`.

        Raise `EditRefused` if it is empty, contains a NUL character or is too long.
        """
        if not path.strip() or "\0" in path:
            raise EditRefused(f"{path!r:.100} is not a path.")
        if len(path.encode("utf-8", "replace")) > 4096:
            raise EditRefused("The path is too long.")
        joined = posixpath.join(self._folder, path)
        return joined if ".." in joined.split("/") else posixpath.normpath(joined)

    async def inspect(self, path: str, *, limit: int = MAX_FILE) -> FileState:
        """Read the file or list the directory at a path; raise `EditRefused` if that fails.

        A file of more than `limit` bytes is refused. If nothing exists at the path, return an empty `FileState`.
        """
        result = await self._run(_INSPECT, path, str(limit), str(MAX_LISTED), output=limit + (1 << 16))
        head, _, rest = result.stdout.partition(b"\n")
        kind, _, stat_line = head.decode(errors="replace").partition(" ")
        if not result.ok:
            raise EditRefused(f"{path} cannot be read: {_describe_failure(result)}.")
        if kind == "missing":
            return FileState()
        if kind == "folder":
            return FileState(listing=rest.decode(errors="replace"))
        if kind == "large":
            raise EditRefused(
                f"{path} has {int(stat_line):,} bytes, more than the limit of {limit:,}: use the shell."
            )
        # Files in /proc and /sys report size 0 but have content.
        if kind != "file" or result.stdout_dropped or int(stat_line.split(" ")[1]) not in (0, len(rest)):
            raise EditRefused(f"{path} cannot be read: it changed while it was read.")
        return FileState(rest, stat_line)

    async def make_parents(self, path: str) -> None:
        """Create the missing parent directories of a file; raise `EditRefused` on failure."""
        result = await self._run(_MAKE_PARENTS, path)
        if not result.ok:
            raise EditRefused(f"The directory of {path} cannot be created: {_describe_failure(result)}.")

    async def replace(self, path: str, data: bytes, state: FileState) -> None:
        """Write `data` to the file for which `inspect` returned `state`, or create it.

        Raise `EditRefused` if the file has changed since, or if writing fails. The old content is then kept or
        restored; if it cannot be restored, the message says so.
        """
        if len(data) > MAX_FILE:
            raise EditRefused(f"That would be {len(data):,} bytes, more than the {MAX_FILE:,} of one edit.")
        temporary = f".edit.{secrets.token_hex(8)}"
        fields = state.stat_line.split(" ")
        umask, mode, owner, links = 0o022, "", "", "1"  # for a new file
        if state.data is not None:
            permissions, owner, links = int(fields[2], 8), fields[3], fields[4]
            # Only chmod can set execute permission; other modes follow from the umask.
            umask, mode = 0o777 & ~permissions, f"{permissions:o}" if permissions & ~0o666 else ""
        result = await self._run(
            _REPLACE, path, state.stat_line, temporary, f"{umask:03o}", mode, owner, links, stdin=data
        )
        if result.status == "exited" and result.exit_code == 5:
            result = await self._run(_WRITE_IN_PLACE, path, stdin=data)
        if result.ok:
            return
        killed = result.status != "exited"
        if killed:
            await self._run(_REMOVE_TEMPORARY, path, temporary)
        if state.data is not None and (result.exit_code == 4 or killed):
            current = await self._run(_INSPECT, path, str(MAX_FILE), "0", output=MAX_FILE + (1 << 16))
            unchanged = current.stdout.partition(b"\n")[2] == state.data
            if not unchanged and not (await self._run(_RESTORE, path, stdin=state.data)).ok:
                raise EditRefused(
                    f"{path} was written only in part and could not be restored: {_describe_failure(result)}."
                )
        raise EditRefused(f"{path} cannot be written: {_describe_failure(result)}. Nothing was changed.")

    async def remove(self, path: str) -> None:
        """Delete a file; raise `EditRefused` on failure."""
        result = await self._run(_REMOVE, path)
        if not result.ok:
            raise EditRefused(f"{path} cannot be removed: {_describe_failure(result)}.")

    async def _run(self, script: str, *arguments: str, stdin: bytes = b"", output: int = 1 << 16) -> ExecResult:
        try:
            argv = ("sh", "-c", script, "sh", *arguments)
            command = Command(argv=argv, stdin=stdin, cwd="/", wall=self._seconds, output=output)
            for argument in arguments:
                argument.encode()
        except UnicodeEncodeError:
            raise EditRefused("The path is not valid text.") from None
        result = await self._sandbox.exec(command)
        if result.status == "lost":
            raise SandboxError(
                f"sandbox {self._sandbox.id} was lost during an edit: {result.detail or 'no detail'}"
            )
        return result


def _describe_failure(result: ExecResult) -> str:
    """Return why a shell script failed: the limit that stopped it, its output, or its exit code."""
    if result.status == "disk_limit":
        return "No space left on device"
    if result.status != "exited":
        return f"stopped by the {result.status.replace('_', ' ')}"
    text = (result.stdout.rpartition(b"file ")[2] if result.ok else result.stdout) + b" " + result.stderr
    words = text.decode(errors="replace").split()
    return " ".join(words)[:300].rstrip(".") or f"exit code {result.exit_code}"
