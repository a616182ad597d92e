"""Records of the image store (JSON files), and the parts of an image configuration that sandboxes use.

Guarantees:
- an image configuration is not trusted: its size is limited, and its structure is checked.

A record is written to a temporary file, which is then renamed.
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
"""Largest number of layers of an image. An overlay mount has at most 500 layers, and a sandbox and its snapshots
need some of them."""


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of an image's configuration that a sandbox uses. Entry point and command are ignored."""

    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of an image that is completely in the store."""

    id: str
    """Digest of the image's configuration, without the prefix `sha256:`."""
    layers: tuple[str, ...]
    """Names of the layer directories, lowest first."""
    config: ImageConfig = ImageConfig()
    platform: str = ""
    made: float = 0.0
    """Unix time at which the image was installed."""
    uid: int = -1
    """User ID of the user that the image's configuration names; -1 if it is unknown."""
    made_workdir: bool = False
    """True if the working directory of the image's configuration exists in its layers."""


class ImageName(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of one name of an image."""

    name: str
    image: str
    """ID of the image that has the name."""
    origin: str = ""
    """The source of the image: `registry`, `engine` (a container engine), `build` or `file`."""
    digest: str = ""
    """The digest or ID by which the origin knows the image."""
    at: float = 0.0
    """Unix time at which the name was recorded."""


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of a layer that is completely unpacked in the store."""

    diff_id: str
    bytes: int
    entries: int = 0
    boot: str = ""
    """Boot ID of the machine when the layer was written; empty if it is unknown."""
    opaque: bool = False
    """True if the layer hides all lower layers."""
    synced: bool = False
    """True if the layer was flushed to disk. A layer that was not is invalid after a reboot."""


def sha256_digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def chain_id(below: str, diff_id: str) -> str:
    """Return the ChainID (OCI image specification) of a layer; `below` is that of the layer below, or empty."""
    return diff_id if not below else sha256_digest(f"{below} {diff_id}".encode())


def layer_directory_name(chain: str) -> str:
    """Return the directory name of the layer with the ChainID `chain`.

    The name is short, because old kernels limit the options of a mount to one memory page.
    """
    return chain.removeprefix("sha256:")[:24]


def write_record(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}.half")
    try:
        temporary.write_bytes(msgspec.json.encode(value))
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_record(path: Path, kind: type[Any]) -> Any:
    """Return the record of type `kind` in a file, or None if the file is missing or cannot be decoded."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def unusable_image(name: str, reason: str) -> SandboxError:
    return SandboxError(f"the image {name} cannot be used: {reason}", cause="task.image")


def parse_config(name: str, data: bytes) -> tuple[ImageConfig, list[str], str]:
    """Parse an image configuration. Return the settings for programs, the DiffIDs of the layers, and the platform.

    Raise `SandboxError(task.image)`, with `name` in the message, if the configuration is invalid.
    """
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
    except (msgspec.MsgspecError, RecursionError, KeyError, TypeError, AttributeError, ValueError) as error:
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
