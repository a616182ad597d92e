"""Single calls to an engine, without a loop and without a connection that stays: for checks and the reaper.

Promises:
- an answer that is an error becomes a `SandboxError` that names the call and the engine's own words; an engine
  that cannot be reached is told apart from one that refuses (`EngineGone`, `Refused`);
- nothing heavy is imported: `rookery reap` and the start of a run ask too.
"""

import http.client
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from rookery.core import SandboxError, UsageError

QUICK_SECONDS = 3.0
SLOW_SECONDS = 15.0
"""For what podman takes its time with: telling of itself it asks its programs for their versions, and listing
containers it waits for those that are being made or removed."""
_MEANT = {
    "no such container": 404,
    "no such image": 404,
    "no such exec session": 404,
    "invalid reference format": 400,
}
_USUAL = ("/var/run/docker.sock", "/run/podman/podman.sock")


class EngineGone(SandboxError):  # noqa: N818  (what it is, not what it is called elsewhere)
    """Nobody answers there, or the answer broke off."""

    cause = "sandbox.create"


class Refused(SandboxError):  # noqa: N818
    """The engine says no."""

    cause = "sandbox.create"

    def __init__(self, message: str, *, status: int = 0, **more: Any) -> None:
        super().__init__(message, **more)
        self.status = status


def socket_path() -> str:
    """Of the engine that is meant: `DOCKER_HOST`, else the first of the usual places that is there."""
    named = os.environ.get("DOCKER_HOST", "").strip()
    if named:
        if not named.startswith("unix://"):
            raise UsageError(
                f"DOCKER_HOST is {named!r}: the docker provider needs an engine on this machine, as unix:///path"
            )
        return named.removeprefix("unix://")
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [*_USUAL, *([f"{own}/docker.sock", f"{own}/podman/podman.sock"] if own else [])]
    return next((place for place in places if Path(place).exists()), _USUAL[0])


def path(*parts: str, **query: Any) -> str:
    """Of a call: each part is one name, whatever it is made of (names of images have slashes of their own)."""
    text = "/" + "/".join(quote(part, safe="/:@") for part in parts)
    return f"{text}?{urlencode(query)}" if query else text


def status_of(status: int, text: bytes) -> int:
    """What an answer means. Podman says 500 to much that is no trouble of its own (a container that goes while it
    looks, a name that can be none), and beside it what it is."""
    if status != 500:
        return status
    try:
        cause = str(json.loads(text)["cause"])
    except (ValueError, KeyError, TypeError):
        return status
    return next((meant for words, meant in _MEANT.items() if cause.endswith(words)), status)


def refusal(what: str, status: int, text: bytes) -> Refused:
    try:
        said = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        said = text.decode("utf-8", "replace")
    return Refused(f"the engine answers {what} with {status}: {said.strip()[:500]}", status=status)


class _Connection(http.client.HTTPConnection):
    def __init__(self, place: str, timeout: float) -> None:
        super().__init__("engine", timeout=timeout)
        self._place = place

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._place)


def ask(place: str, method: str, where: str, *, ok: tuple[int, ...] = (), timeout: float = QUICK_SECONDS) -> Any:
    """One call, without a loop and without a connection that stays."""
    what = f"{method} {where.partition('?')[0]}"
    connection = _Connection(place, timeout)
    try:
        connection.request(method, where)
        reply = connection.getresponse()
        text = reply.read()
    except TimeoutError as error:
        raise EngineGone(f"the engine at {place} did not answer {what} within {timeout:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise EngineGone(f"the engine at {place} cannot be reached ({what}): {error}") from error
    finally:
        connection.close()
    status = status_of(reply.status, text)
    if status in ok:
        return None
    if status >= 400:
        raise refusal(what, status, text)
    kind = reply.getheader("Content-Type") or ""
    return json.loads(text) if "json" in kind and text.strip() else text


def filters(**wanted: list[str]) -> Mapping[str, str]:
    """The query that lists only what has these."""
    return {"filters": json.dumps(wanted)}
