"""The images of a Docker or Podman engine: look up, save, load, import and tag. Blocking.

Runs in the child process that fetches an image. If the container engine does not have an image of a name, that is
an error of the task (cause `task.image`). If the container engine does not answer, it is not (cause
`sandbox.image`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from rookery.core import SandboxError
from rookery.sandboxes.docker.client import (
    CHUNK_BYTES,
    BlockingEngineClient,
    EngineAPIError,
    EngineUnreachable,
    api_error,
    api_path,
    find_running_engine,
)
from rookery.sandboxes.images import records
from rookery.sandboxes.images.records import ImageName
from rookery.sandboxes.images.references import ImageReference, familiar_name
from rookery.sandboxes.images.sources import (
    DockerArchiveSource,
    LocalSource,
    OnBytes,
    ResolvedImage,
    image_unavailable,
)

LOOKUP_SECONDS = 30.0
TRANSFER_SECONDS = 600.0
"""Longest wait for the next chunk of a saved or loaded image. It is long, because a container engine may assemble
the whole archive before it sends the first chunk."""
MAX_RESPONSE_BYTES = 16 << 20
TAR_HEADERS = {"Content-Type": "application/x-tar"}


@contextmanager
def reporting_image_errors(action: str) -> Iterator[None]:
    """Turn errors of the container engine's client in the block into `SandboxError(sandbox.image)`.

    `action` is the beginning of the message and says what failed.
    """
    try:
        yield
    except (EngineAPIError, EngineUnreachable) as error:
        raise image_unavailable(action, str(error)) from error


class EngineImages:
    """Image operations of one container engine."""

    def __init__(self, client: BlockingEngineClient) -> None:
        self.client = client

    def find_id(self, name: str) -> str:
        """Return the ID of the image with this name, or "" if the container engine has no such image."""
        path = api_path("images", name, "json")
        with reporting_image_errors(f"the image {name} cannot be looked up in the container engine"):
            found = self.client.call("GET", path, ok=(404,), timeout=LOOKUP_SECONDS)
        return str(found.get("Id") or "") if found is not None else ""

    def save(self, name: str, target: Path) -> None:
        """Write an image to the file `target`, in the format of `docker save`."""
        with (
            reporting_image_errors(f"the container engine cannot save the image {name}"),
            self.client.open("GET", api_path("images", name, "get"), timeout=TRANSFER_SECONDS) as response,
        ):
            if response.status != 200:
                raise api_error("GET images", response.status, response.read(MAX_RESPONSE_BYTES))
            with target.open("wb") as file:
                while chunk := response.read(CHUNK_BYTES):
                    file.write(chunk)

    def load(self, archive: Path, on_bytes: OnBytes | None = None) -> list[str]:
        """Load an archive in the format of `docker save`; return the names or IDs of the loaded images.

        `on_bytes` is called with the number of bytes of each chunk that was sent.
        """
        return self._send_archive(api_path("images", "load", quiet="1"), archive, on_bytes)

    def import_rootfs(self, archive: Path, name: str, on_bytes: OnBytes | None = None) -> None:
        """Create an image called `name` with one layer from a tar archive of a root file system."""
        # Podman ignores the parameter `tag`, so the tag is part of `repo`.
        self._send_archive(api_path("images", "create", fromSrc="-", repo=name), archive, on_bytes)

    def tag(self, image: str, name: str) -> None:
        repository, _, tag = name.rpartition(":")
        path = api_path("images", image, "tag", repo=repository, tag=tag)
        with reporting_image_errors(f"the container engine cannot tag the image {image}"):
            self.client.call("POST", path, timeout=LOOKUP_SECONDS)

    def _send_archive(self, path: str, archive: Path, on_bytes: OnBytes | None) -> list[str]:
        with (
            archive.open("rb") as file,
            reporting_image_errors("the container engine cannot load the image"),
            self.client.open(
                "POST", path, _CountingReader(file, on_bytes), headers=TAR_HEADERS, timeout=TRANSFER_SECONDS
            ) as response,
        ):
            body = response.read(MAX_RESPONSE_BYTES)
            if response.status != 200:
                raise api_error("POST images", response.status, body)
        loaded = []
        for message in parse_json_lines(body):
            if message.get("error"):
                raise SandboxError(
                    f"the container engine cannot load the image: {str(message['error'])[:500]}",
                    cause="task.image",
                )
            for prefix in ("Loaded image ID: ", "Loaded image: "):
                if str(message.get("stream") or "").startswith(prefix):
                    loaded.append(message["stream"].removeprefix(prefix).strip())
                    break
        return loaded


def parse_json_lines(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a container engine's progress stream; other lines are skipped."""
    for line in body.splitlines():
        try:
            message = msgspec.json.decode(line)
        except (msgspec.MsgspecError, RecursionError):
            continue
        if isinstance(message, dict):
            yield message


class _CountingReader:
    """A file object for a request body that reports to a callback how many bytes were read from it."""

    def __init__(self, file: IO[bytes], on_bytes: OnBytes | None) -> None:
        self._file = file
        self._on_bytes = on_bytes

    def read(self, size: int) -> bytes:
        block = self._file.read(size)
        if self._on_bytes is not None and block:
            self._on_bytes(len(block))
        return block


class EngineSource(LocalSource):
    """Image source: an image in a container engine, which is exported like `docker save` does."""

    def __init__(self, reference: ImageReference, images: EngineImages, directory: Path) -> None:
        self._name = familiar_name(reference.name)
        self._images = images
        self._archive = directory / "saved.tar"

    def resolve(self) -> ResolvedImage:
        image_id = self._images.find_id(self._name)
        if not image_id:
            raise records.unusable_image(self._name, "the container engine has no image of this name")
        self._images.save(self._name, self._archive)
        found = DockerArchiveSource(str(self._archive), "", self._name, "engine").resolve()
        return msgspec.structs.replace(found, digest=image_id)

    def close(self) -> None:
        self._archive.unlink(missing_ok=True)


def has_changed_in_engine(known: ImageName) -> bool:
    """Return whether the container engine now has another image of this name, for example after a rebuild."""
    client = find_running_engine()
    if client is None:
        return False
    try:
        image_id = EngineImages(client).find_id(familiar_name(known.name))
    except SandboxError:
        return False
    return bool(image_id) and image_id != known.digest
