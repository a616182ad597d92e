"""Images out of Dockerfiles, where something on this machine can build them.

Promises:
- the engine that answers builds, else `buildah` or `podman` where one is installed; else an error says what is
  missing;
- what `.dockerignore` names is not sent; no link of the folder is followed;
- the same folder, unchanged, is not built again: its key is made of all its files' names, sizes and times;
- a build that fails is the task's fault, with the last lines that it said.
"""

import fnmatch
import hashlib
import os
import shutil
import subprocess
import tarfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rookery.core import SandboxError
from rookery.sandboxes import transfers
from rookery.sandboxes.images.engine import Engine, find_socket
from rookery.sandboxes.images.sources import Found, Local, SavedSource, unavailable

BUILD_SECONDS = 3600.0
MAX_FILES = 200_000
MAX_SAID = 64 << 20
_LAST_LINES = 20
_PROGRAMS = ("buildah", "podman")


def builder() -> str:
    """What would build here: `engine`, the path of a program, or nothing."""
    if find_socket():
        return "engine"
    return next((found for name in _PROGRAMS if (found := shutil.which(name))), "")


def files_of(folder: Path) -> Iterator[Path]:
    """The context of a build, in order."""
    ignored = _patterns(folder)
    count = 0
    for here, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files) + [name for name in folders if Path(here, name).is_symlink()]:
            path = Path(here, name)
            count += 1
            if count > MAX_FILES:
                raise SandboxError(f"the folder {folder} has too many files to build from", cause="task.image")
            if not _ignored(path.relative_to(folder).as_posix(), ignored):
                yield path


def _patterns(folder: Path) -> list[tuple[str, bool]]:
    try:
        lines = (folder / ".dockerignore").read_text(errors="replace").splitlines()
    except OSError:
        return []
    kept = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return [(line.lstrip("!").strip("/"), not line.startswith("!")) for line in kept]


def _ignored(path: str, patterns: list[tuple[str, bool]]) -> bool:
    """The last pattern that says something about a file, or about a folder that it is in, decides."""
    if path in ("Dockerfile", ".dockerignore"):
        return False
    parts = path.split("/")
    found = False
    for pattern, out in patterns:
        deep = pattern.startswith("**/")
        for at in range(1, len(parts) + 1):
            here = "/".join(parts[:at])
            if (
                fnmatch.fnmatchcase(here, pattern)
                and (deep or "**" in pattern or here.count("/") == pattern.count("/"))
            ) or (deep and fnmatch.fnmatchcase(here, pattern[3:])):
                found = out
    return found


def stamp(dockerfile: Path) -> str:
    digest = hashlib.sha256()
    for path in [dockerfile, *files_of(dockerfile.parent)]:
        info = path.lstat()
        digest.update(f"{path}\0{info.st_size}\0{info.st_mtime_ns}\0{info.st_mode}\0".encode("utf-8", "replace"))
    return digest.hexdigest()


class BuiltSource(Local):
    def __init__(self, dockerfile: Path, shown: str, work: Path) -> None:
        self._file, self._shown, self._work = dockerfile, shown, work
        self._saved: SavedSource | None = None

    def find(self) -> Found:
        how = builder()
        if not how:
            raise SandboxError(
                f"the image {self._shown} cannot be built: no container engine answers, and neither buildah nor "
                "podman is installed; build it elsewhere and give it to `rookery images import`",
                cause="task.image",
            )
        archive = self._work / "built.tar"
        if how == "engine":
            engine = Engine(find_socket())
            engine.save(self.by_engine(engine), archive, lambda _: None)
        else:
            self._by_program(how, archive)
        found = SavedSource(str(archive), "", self._shown, "build").find()
        return msgspec.structs.replace(found, names=())

    def by_engine(self, engine: Engine) -> str:
        """Built there; its id."""
        context = self._work / "context.tar"
        try:
            self._pack(context)
        except OSError as error:
            raise self._failed(f"its folder cannot be read: {error.strerror or error}") from error
        query = urllib.parse.urlencode({"dockerfile": self._file.name, "q": "0", "rm": "1", "forcerm": "1"})
        image, said = "", list[str]()
        with (
            context.open("rb") as body,
            engine.ask("POST", f"/build?{query}", body, kind="application/x-tar", seconds=BUILD_SECONDS) as reply,
        ):
            data = reply.read(MAX_SAID)
            if reply.status != 200:
                raise self._failed(data.decode("utf-8", "replace"))
        context.unlink()
        for line in data.splitlines():
            try:
                one = msgspec.json.decode(line)
            except msgspec.MsgspecError:
                continue
            if one.get("error"):
                raise self._failed("".join([*said[-_LAST_LINES:], str(one["error"])]))
            said.append(str(one.get("stream") or ""))
            image = str((one.get("aux") or {}).get("ID") or image)
        if not image:
            done = [
                text.removeprefix("Successfully built ") for text in said if text.startswith("Successfully built ")
            ]
            image = done[-1].strip() if done else ""
        if not image:
            raise self._failed("the engine did not say what it built")
        return image

    def _pack(self, archive: Path) -> None:
        """Write the build context as a tar archive. Links become links; none is followed on this machine."""
        ignored = _patterns(self._file.parent)
        with tarfile.open(archive, "w") as tar:
            for item in transfers.source_items(self._file.parent, transfers.Clock(BUILD_SECONDS)):
                name = "/".join(item.names)
                info = tarfile.TarInfo(name)
                info.mode, info.mtime = item.info.st_mode & 0o777, int(item.info.st_mtime)
                if item.link is not None:
                    info.type, info.linkname = tarfile.SYMTYPE, item.link
                elif item.file is not None:
                    info.size = item.info.st_size
                else:
                    continue
                if name == self._file.name or not _ignored(name, ignored):
                    tar.addfile(info, item.file)

    def _by_program(self, program: str, archive: Path) -> None:
        identity = self._work / "built.id"
        words = [program, "build", "--iidfile", str(identity), "-f", str(self._file), str(self._file.parent)]
        self._run(words)
        image = identity.read_text().strip()
        if Path(program).name == "buildah":
            self._run([program, "push", image, f"docker-archive:{archive}"])
        else:
            self._run([program, "save", "--format", "docker-archive", "-o", str(archive), image])

    def _run(self, words: list[str]) -> None:
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, timeout=BUILD_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise unavailable(f"{words[0]} could not build {self._shown}", type(error).__name__) from error
        if done.returncode:
            lines = (done.stdout + done.stderr).decode("utf-8", "replace").splitlines()
            raise self._failed("\n".join(lines[-_LAST_LINES:]))

    def _failed(self, why: str) -> SandboxError:
        return SandboxError(f"the image {self._shown} cannot be built: {why.strip()[-1500:]}", cause="task.image")
