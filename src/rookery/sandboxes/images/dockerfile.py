"""Build images from Dockerfiles. Blocking; runs in the child process that fetches an image.

Guarantees:
- the image is built by the running container engine, or else by the program `buildah` or `podman`; if none of them
  is there, the error says so;
- files that `.dockerignore` names are not sent to the builder, and no symbolic link in the build context is
  followed;
- an unchanged build context is not built again: its key is a hash of the names, sizes, times and modes of its
  files;
- a failed build is an error of the task (cause `task.image`). The message has the last lines of its output.
"""

import fnmatch
import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rookery.core import SandboxError
from rookery.sandboxes import transfers
from rookery.sandboxes.docker.client import api_path, find_running_engine
from rookery.sandboxes.images.engine_images import (
    TAR_HEADERS,
    EngineImages,
    parse_json_lines,
    reporting_image_errors,
)
from rookery.sandboxes.images.sources import DockerArchiveSource, LocalSource, ResolvedImage, image_unavailable

BUILD_SECONDS = 3600.0
MAX_FILES = 200_000
MAX_OUTPUT_BYTES = 64 << 20
_LAST_LINES = 20
_PROGRAMS = ("buildah", "podman")


def find_builder_program() -> str:
    """Return the path of `buildah` or `podman`, which can build images; "" if neither is installed."""
    return next((found for name in _PROGRAMS if (found := shutil.which(name))), "")


def iter_context(folder: Path) -> Iterator[Path]:
    """Yield the files of the build context `folder` that `.dockerignore` does not exclude, in a fixed order."""
    ignored = _read_ignore_patterns(folder)
    count = 0
    for here, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files) + [name for name in folders if Path(here, name).is_symlink()]:
            path = Path(here, name)
            count += 1
            if count > MAX_FILES:
                raise SandboxError(
                    f"the build context {folder} has more than {MAX_FILES:,} files: exclude some in .dockerignore",
                    cause="task.image",
                )
            if not _is_ignored(path.relative_to(folder).as_posix(), ignored):
                yield path


def _read_ignore_patterns(folder: Path) -> list[tuple[str, bool]]:
    try:
        lines = (folder / ".dockerignore").read_text(errors="replace").splitlines()
    except OSError:
        return []
    lines = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return [(line.lstrip("!").strip("/"), not line.startswith("!")) for line in lines]


def _is_ignored(path: str, patterns: list[tuple[str, bool]]) -> bool:
    """Return whether `.dockerignore` excludes a path. The last pattern that matches it or a parent decides."""
    if path in ("Dockerfile", ".dockerignore"):
        return False
    parts = path.split("/")
    found = False
    for pattern, excludes in patterns:
        deep = pattern.startswith("**/")
        for at in range(1, len(parts) + 1):
            here = "/".join(parts[:at])
            if (
                fnmatch.fnmatchcase(here, pattern)
                and (deep or "**" in pattern or here.count("/") == pattern.count("/"))
            ) or (deep and fnmatch.fnmatchcase(here, pattern[3:])):
                found = excludes
    return found


def hash_context(dockerfile: Path) -> str:
    """Return a hash of the names, sizes, times and modes of all files of a build context."""
    digest = hashlib.sha256()
    for path in [dockerfile, *iter_context(dockerfile.parent)]:
        info = path.lstat()
        digest.update(f"{path}\0{info.st_size}\0{info.st_mtime_ns}\0{info.st_mode}\0".encode("utf-8", "replace"))
    return digest.hexdigest()


class DockerfileSource(LocalSource):
    """An image that is built from a Dockerfile."""

    def __init__(self, dockerfile: Path, name: str, staging: Path) -> None:
        """`name` is the image's name in messages; `staging` is a directory for temporary files."""
        self._file, self._name, self._staging = dockerfile, name, staging

    def resolve(self) -> ResolvedImage:
        archive = self._staging / "built.tar"
        client = find_running_engine()
        if client is not None:
            engine = EngineImages(client)
            engine.save(self.build(engine), archive)
        elif program := find_builder_program():
            self._build_with_program(program, archive)
        else:
            raise SandboxError(
                f"the image {self._name} cannot be built: no container engine answers, and neither buildah nor "
                "podman is installed; build it elsewhere and load it with `rookery images import`",
                cause="task.image",
            )
        found = DockerArchiveSource(str(archive), "", self._name, "build").resolve()
        return msgspec.structs.replace(found, names=())

    def build(self, engine: EngineImages) -> str:
        """Build the image in a container engine; return its ID."""
        context = self._staging / "context.tar"
        try:
            self.pack(context)
        except OSError as error:
            raise self._failed(f"its build context cannot be read: {error.strerror or error}") from error
        path = api_path("build", dockerfile=self._file.name, q="0", rm="1", forcerm="1")
        with (
            context.open("rb") as body,
            reporting_image_errors(f"the container engine cannot build the image {self._name}"),
            engine.client.open("POST", path, body, headers=TAR_HEADERS, timeout=BUILD_SECONDS) as response,
        ):
            output = response.read(MAX_OUTPUT_BYTES)
            if response.status != 200:
                raise self._failed(output.decode("utf-8", "replace"))
        context.unlink()
        image_id, lines = "", list[str]()
        for message in parse_json_lines(output):
            if message.get("error"):
                raise self._failed("".join([*lines[-_LAST_LINES:], str(message["error"])]))
            lines.append(str(message.get("stream") or ""))
            image_id = str((message.get("aux") or {}).get("ID") or image_id)
        if not image_id:
            prefix = "Successfully built "
            built = [line.removeprefix(prefix).strip() for line in lines if line.startswith(prefix)]
            image_id = built[-1] if built else ""
        if not image_id:
            raise self._failed("the container engine did not report the ID of the built image")
        return image_id

    def pack(self, archive: Path) -> None:
        """Write the build context as a tar archive. Symbolic links are stored as links."""
        ignored = _read_ignore_patterns(self._file.parent)
        with tarfile.open(archive, "w") as tar:
            for item in transfers.walk_source(self._file.parent, transfers.TransferClock(BUILD_SECONDS)):
                name = "/".join(item.names)
                info = tarfile.TarInfo(name)
                info.mode, info.mtime = item.info.st_mode & 0o777, int(item.info.st_mtime)
                if item.link is not None:
                    info.type, info.linkname = tarfile.SYMTYPE, item.link
                elif item.file is not None:
                    info.size = item.info.st_size
                else:
                    continue
                if name == self._file.name or not _is_ignored(name, ignored):
                    tar.addfile(info, item.file)

    def _build_with_program(self, program: str, archive: Path) -> None:
        id_file = self._staging / "built.id"
        self._run([program, "build", "--iidfile", str(id_file), "-f", str(self._file), str(self._file.parent)])
        image_id = id_file.read_text().strip()
        if Path(program).name == "buildah":
            self._run([program, "push", image_id, f"docker-archive:{archive}"])
        else:
            self._run([program, "save", "--format", "docker-archive", "-o", str(archive), image_id])

    def _run(self, argv: list[str]) -> None:
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=BUILD_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise image_unavailable(f"{argv[0]} could not build {self._name}", type(error).__name__) from error
        if done.returncode:
            lines = (done.stdout + done.stderr).decode("utf-8", "replace").splitlines()
            raise self._failed("\n".join(lines[-_LAST_LINES:]))

    def _failed(self, reason: str) -> SandboxError:
        return SandboxError(
            f"the image {self._name} cannot be built: {reason.strip()[-1500:]}", cause="task.image"
        )
