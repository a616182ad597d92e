"""Texts and images of messages in ATIF trajectories, which refer to images by path or URL.

- An image of a data URL is written to a file beside the trajectories. Without a file of trajectories, as on
  standard output, its path is the data URL.
- An imported image must be in the directory of its trajectory or below it. A file that is missing stays a path.
"""

import base64
import binascii
import mimetypes
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from rookery.core import UsageError

MAX_IMAGE: Final = 64 << 20
TYPES: Final = {"image/png": ".png", "image/jpeg": ".jpg", "image/gif": ".gif", "image/webp": ".webp"}
"""The types of images that ATIF has, with the suffixes of their files."""
_DATA: Final = "data:"


class ConversationImages:
    """Writes the images of trajectories to a directory, each once."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is created with the first image. None leaves images in their data URLs."""
        self._folder = folder

    def store(self, url: str, kind: str) -> str:
        """Return the path of an image, relative to the file of trajectories; or its URL if it is not stored."""
        head, _, data = url.partition(",")
        if self._folder is None or not head.startswith(_DATA) or not head.endswith(";base64"):
            return url
        try:
            image = base64.b64decode(data, validate=True)
        except binascii.Error:
            return url
        name = blake2b(image, digest_size=16).hexdigest() + TYPES[kind]
        self._folder.mkdir(exist_ok=True)
        if not (self._folder / name).exists():
            (self._folder / name).write_bytes(image)
        return f"{self._folder.name}/{name}"


def format_content(content: str | Sequence[dict[str, Any]] | None, images: ConversationImages) -> tuple[Any, bool]:
    """Return the content of a message in ATIF, and whether it is complete.

    Text and images are complete. Other parts, such as audio, are left out.
    """
    if content is None or isinstance(content, str):
        return content or "", True
    parts: list[dict[str, Any]] = []
    for part in content:
        if part.keys() == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str):
            parts.append({"type": "text", "text": part["text"]})
        elif (found := _format_image(part, images)) is not None:
            parts.append(found)
    return parts or "", len(parts) == len(content) > 0


def _format_image(part: dict[str, Any], images: ConversationImages) -> dict[str, Any] | None:
    image = part.get("image_url")
    if part.keys() != {"type", "image_url"} or not isinstance(image, dict) or image.keys() != {"url"}:
        return None
    url = str(image["url"])
    kind = url[len(_DATA) :].partition(";")[0] if url.startswith(_DATA) else mimetypes.guess_type(url)[0]
    if kind not in TYPES:
        return None
    return {"type": "image", "source": {"media_type": kind, "path": images.store(url, kind)}}


def parse_content(content: str | Sequence[Any] | None, folder: Path) -> str | tuple[dict[str, Any], ...]:
    """Return the content of a message from ATIF. `folder` is the directory of the trajectory.

    Raise `UsageError` for an image outside of this directory, and `ValueError` for an invalid part.
    """
    if not isinstance(content, list):
        return str(content or "")
    return tuple(_parse_part(part, folder) for part in content)


def _parse_part(part: Any, folder: Path) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image", "source": {"path": str(path), **source}}:
            kind = str(source.get("media_type") or mimetypes.guess_type(path)[0] or "image/png")
            return {"type": "image_url", "image_url": {"url": _load_image(path, kind, folder)}}
    raise ValueError(f"a part of a message is neither a text nor an image: {part!r:.100}")


def _load_image(path: str, kind: str, folder: Path) -> str:
    if path.startswith((_DATA, "http://", "https://")):
        return path
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise UsageError(f"the image {path!r:.200} is not in the directory of its trajectory, {folder}")
    if not file.is_file():
        return path
    if file.stat().st_size > MAX_IMAGE:
        raise UsageError(f"the image {file} is larger than {MAX_IMAGE >> 20} MB")
    return f"{_DATA}{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
