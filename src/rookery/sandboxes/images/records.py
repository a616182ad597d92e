"""Records of the image store, and the parts of an image configuration that sandboxes use.

Guarantees:
- a record is written atomically;
- an image configuration is untrusted: it is read with limits and checked for its shape.
"""

import hashlib
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec

from rookery.core import SandboxError

MAX_ENV = 1000
MAX_LAYERS = 400
"""An overlay mount has at most 500 layers, and a sandbox and its snapshots need some of them."""


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of an image configuration that a sandbox uses. Entry point and command are not used."""

    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image that is completely in the store."""

    id: str
    """Digest of its configuration, without the prefix `sha256:`."""
    layers: tuple[str, ...]
    """Names of the layer directories, lowest first."""
    config: ImageConfig = ImageConfig()
    platform: str = ""
    made: float = 0.0
    uid: int = -1
    """Number of the user that the image wants to run as; -1 if unknown."""
    made_workdir: bool = False
    """Whether the image's working directory exists."""


class ImageName(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One name of an image."""

    name: str
    image: str
    origin: str = ""
    """`registry`, `engine`, `build` or `file`."""
    digest: str = ""
    """The digest or ID by which the origin knows the image."""
    at: float = 0.0


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A layer that is completely unpacked."""

    diff_id: str
    bytes: int
    entries: int = 0
    boot: str = ""
    """Boot ID of the machine when it was written."""
    opaque: bool = False
    """Whether it hides all lower layers."""
    synced: bool = False
    """Whether it was flushed to disk. Until then it is valid only until the next reboot."""


def sha256_digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def chain_id(below: str, diff_id: str) -> str:
    """Return the ChainID of a layer (OCI image specification)."""
    return diff_id if not below else sha256_digest(f"{below} {diff_id}".encode())


def layer_directory_name(chain: str) -> str:
    """Return the name of a layer's directory. It is short, because old kernels limit mount options to one page."""
    return chain.removeprefix("sha256:")[:24]


def write_record(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}.half")
    try:
        temporary.write_bytes(msgspec.json.encode(value))
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_record(path: Path, kind: type[Any]) -> Any:
    """Return the record, or None if it is missing or cannot be decoded."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def unusable_image(name: str, reason: str) -> SandboxError:
    return SandboxError(f"the image {name} cannot be used: {reason}", cause="task.image")


def parse_config(name: str, data: bytes) -> tuple[ImageConfig, list[str], str]:
    """Parse an image configuration: settings for programs, the DiffIDs of its layers, and its platform."""
    try:
        found = msgspec.json.decode(data)
        diff_ids = found["rootfs"]["diff_ids"]
        settings = found.get("config") or {}
        env = [text.partition("=") for text in (settings.get("Env") or [])[:MAX_ENV]]
        config = ImageConfig(
            env={key: value for key, _, value in env if key and "\0" not in key + value},
            workdir=str(settings.get("WorkingDir") or ""),
            user=str(settings.get("User") or ""),
        )
        platform = f"{found.get('os') or 'linux'}/{found.get('architecture') or ''}"
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise unusable_image(name, "its configuration is malformed") from error
    if not isinstance(diff_ids, list) or not all(is_digest(diff_id) for diff_id in diff_ids):
        raise unusable_image(name, "its configuration has no valid list of layers")
    if not diff_ids:
        raise unusable_image(name, "it has no layers")
    if len(diff_ids) > MAX_LAYERS:
        raise unusable_image(name, f"it has {len(diff_ids)} layers; a sandbox supports at most {MAX_LAYERS}")
    if config.workdir and (not config.workdir.startswith("/") or ".." in Path(config.workdir).parts):
        raise unusable_image(name, f"its working directory {config.workdir[:200]!r} is not an absolute path")
    return config, diff_ids, platform


def is_digest(text: object) -> bool:
    return (
        isinstance(text, str)
        and len(text) == 71
        and text.startswith("sha256:")
        and all(char in "0123456789abcdef" for char in text[7:])
    )
