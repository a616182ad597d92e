"""Keys for registries, from Docker's own configuration.

Promises:
- what `docker login` stored is found: in the file, or by the helper program that the file names for the registry;
- a secret is never in a message, a log or a representation;
- a helper is started with the registry's name as its input and nothing else of ours but the environment; it has
  seconds to answer.
"""

import base64
import binascii
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from rookery.sandboxes.images.references import HUB

HUB_KEY = f"https://index.{HUB}/v1/"
HELPER_SECONDS = 30.0
MAX_FILE = 4 << 20
_HELPER = re.compile(r"[A-Za-z0-9_.-]+")
_TOKEN_USER = "<token>"  # noqa: S105  (what helpers write in place of a name)


class Login:
    """A name and a secret, or a token to get others with."""

    __slots__ = ("identity", "secret", "user")

    def __init__(self, user: str = "", secret: str = "", identity: str = "") -> None:
        self.user = user
        self.secret = secret
        self.identity = identity

    def __repr__(self) -> str:
        return "Login(…)"

    def basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode()


def config_path() -> Path:
    return Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser() / "config.json"


def login_for(registry: str) -> Login | None:
    """None where nothing is stored: many images can be had without."""
    try:
        with config_path().open("rb") as file:
            found = msgspec.json.decode(file.read(MAX_FILE))
    except (OSError, msgspec.MsgspecError):
        return None
    if not isinstance(found, dict):
        return None
    keys = [HUB_KEY, HUB, f"index.{HUB}", f"registry-1.{HUB}"] if registry == HUB else [registry]
    for key in keys:
        helper = (found.get("credHelpers") or {}).get(key) or found.get("credsStore")
        if isinstance(helper, str) and helper and (login := _helped(helper, key)):
            return login
    auths = found.get("auths") or {}
    for stored, said in auths.items() if isinstance(auths, dict) else ():
        if (
            isinstance(said, dict)
            and _host(str(stored)) in {_host(key) for key in keys}
            and (login := _stored(said))
        ):
            return login
    return None


def _host(key: str) -> str:
    return key.removeprefix("https://").removeprefix("http://").partition("/")[0]


def _stored(said: dict[str, Any]) -> Login | None:
    identity = str(said.get("identitytoken") or "")
    user, secret = str(said.get("username") or ""), str(said.get("password") or "")
    if auth := said.get("auth"):
        try:
            user, _, secret = base64.b64decode(str(auth)).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return None
    secret = secret.rstrip("\0")
    return Login(user, secret, identity) if identity or (user and secret) else None


def _helped(helper: str, key: str) -> Login | None:
    program = shutil.which(f"docker-credential-{helper}") if _HELPER.fullmatch(helper) else None
    if program is None:
        return None
    try:
        said = subprocess.run(
            [program, "get"], input=key.encode(), capture_output=True, timeout=HELPER_SECONDS, check=False
        )
        found = msgspec.json.decode(said.stdout[:MAX_FILE]) if said.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError):
        return None
    if not isinstance(found, dict) or not found.get("Secret"):
        return None
    user, secret = str(found.get("Username") or ""), str(found["Secret"])
    return Login(identity=secret) if user == _TOKEN_USER else Login(user, secret)
