"""What the store knows of an image, and what an image says about itself.

Promises:
- a record is written whole or not at all;
- what an image says is data: read with bounds, and believed only where it has the right shape.
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
"""Under a box's own layer and those of its snapshots; an overlay takes 500."""


class Config(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of what an image says, that which a sandbox uses. Its entry point and command are not: we start programs."""

    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image of the store: whole, with all of its layers."""

    id: str
    """The digest of its configuration, without the kind of digest."""
    layers: tuple[str, ...]
    """Names of folders, lowest first."""
    config: Config = Config()
    platform: str = ""
    made: float = 0.0
    uid: int = -1
    """Of the user that it wants to run as; -1: none that we know the number of."""
    made_workdir: bool = False
    """Whether the working folder that it names is there."""


class Name(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A name of an image."""

    name: str
    image: str
    origin: str = ""
    """Where it came from: registry, engine, file."""
    digest: str = ""
    """By which the origin knows it."""
    at: float = 0.0


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A layer that is whole."""

    diff: str
    bytes: int
    entries: int = 0
    boot: str = ""
    """Of the machine's run in which it was written."""
    opaque: bool = False
    """Whether it hides all that is below it."""
    synced: bool = False
    """Whether it has reached the disk: before that it is whole only as long as the machine runs."""


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def chain_of(below: str, diff: str) -> str:
    """The identity of a layer on top of others."""
    return diff if not below else digest_of(f"{below} {diff}".encode())


def folder_of(chain: str) -> str:
    """Short: an overlay of a hundred layers has room for a page of names on older kernels."""
    return chain.removeprefix("sha256:")[:24]


def write(path: Path, value: Any) -> None:
    half = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}.half")
    try:
        half.write_bytes(msgspec.json.encode(value))
        half.rename(path)
    finally:
        half.unlink(missing_ok=True)


def read(path: Path, kind: type[Any]) -> Any:
    """None where there is none, or none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def broken(name: str, why: str) -> SandboxError:
    return SandboxError(f"the image {name} cannot be used: {why}", cause="task.image")


def config_of(name: str, data: bytes) -> tuple[Config, list[str], str]:
    """What a configuration says: for programs, the digests of its layers, its platform."""
    try:
        found = msgspec.json.decode(data)
        diffs = found["rootfs"]["diff_ids"]
        said = found.get("config") or {}
        env = [text.partition("=") for text in (said.get("Env") or [])[:MAX_ENV]]
        config = Config(
            env={key: value for key, _, value in env if key and "\0" not in key + value},
            workdir=str(said.get("WorkingDir") or ""),
            user=str(said.get("User") or ""),
        )
        platform = f"{found.get('os') or 'linux'}/{found.get('architecture') or ''}"
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise broken(name, "its configuration cannot be read") from error
    if not isinstance(diffs, list) or not all(is_digest(diff) for diff in diffs):
        raise broken(name, "its configuration does not name its layers")
    if not diffs:
        raise broken(name, "it has no layers")
    if len(diffs) > MAX_LAYERS:
        raise broken(name, f"it has {len(diffs)} layers, and {MAX_LAYERS} is the most that a sandbox can have")
    if config.workdir and (not config.workdir.startswith("/") or ".." in Path(config.workdir).parts):
        raise broken(name, f"its working folder {config.workdir[:200]!r} is no path")
    return config, diffs, platform


def is_digest(text: object) -> bool:
    return (
        isinstance(text, str)
        and len(text) == 71
        and text.startswith("sha256:")
        and all(char in "0123456789abcdef" for char in text[7:])
    )
