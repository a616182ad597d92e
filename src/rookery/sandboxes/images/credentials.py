"""Find registry credentials in Docker's configuration. Runs in the child process that fetches an image.

Guarantees:
- credentials that `docker login` stored are found, in the file or through the credential helper that it names;
- a secret never appears in a message, a log or a `repr`.

A credential helper gets only the name of the registry, on standard input, and must answer within `HELPER_SECONDS`.
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


class RegistryLogin:
    """Credentials for a registry: a user name and a secret, or an identity token that is exchanged for others."""

    def __init__(self, user: str = "", secret: str = "", identity_token: str = "") -> None:
        self.user = user
        self.secret = secret
        self.identity_token = identity_token

    def __repr__(self) -> str:
        return "RegistryLogin(…)"

    def basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode()


def config_path() -> Path:
    return Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser() / "config.json"


def find_login(registry: str) -> RegistryLogin | None:
    """Return the stored credentials for a registry; None if none are stored, which suffices for public images."""
    try:
        with config_path().open("rb") as file:
            config = msgspec.json.decode(file.read(MAX_FILE))
    except (OSError, msgspec.MsgspecError):
        return None
    if not isinstance(config, dict):
        return None
    keys = [HUB_KEY, HUB, f"index.{HUB}", f"registry-1.{HUB}"] if registry == HUB else [registry]
    for key in keys:
        helper = (config.get("credHelpers") or {}).get(key) or config.get("credsStore")
        if isinstance(helper, str) and helper and (login := _ask_helper(helper, key)):
            return login
    auths = config.get("auths") or {}
    for stored, entry in auths.items() if isinstance(auths, dict) else ():
        if (
            isinstance(entry, dict)
            and _parse_host(str(stored)) in {_parse_host(key) for key in keys}
            and (login := _parse_entry(entry))
        ):
            return login
    return None


def _parse_host(key: str) -> str:
    return key.removeprefix("https://").removeprefix("http://").partition("/")[0]


def _parse_entry(entry: dict[str, Any]) -> RegistryLogin | None:
    identity_token = str(entry.get("identitytoken") or "")
    user, secret = str(entry.get("username") or ""), str(entry.get("password") or "")
    if auth := entry.get("auth"):
        try:
            user, _, secret = base64.b64decode(str(auth)).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return None
    secret = secret.rstrip("\0")
    return RegistryLogin(user, secret, identity_token) if identity_token or (user and secret) else None


def _ask_helper(helper: str, key: str) -> RegistryLogin | None:
    program = shutil.which(f"docker-credential-{helper}") if _HELPER.fullmatch(helper) else None
    if program is None:
        return None
    try:
        entry = subprocess.run(
            [program, "get"], input=key.encode(), capture_output=True, timeout=HELPER_SECONDS, check=False
        )
        config = msgspec.json.decode(entry.stdout[:MAX_FILE]) if entry.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError):
        return None
    if not isinstance(config, dict) or not config.get("Secret"):
        return None
    user, secret = str(config.get("Username") or ""), str(config["Secret"])
    return RegistryLogin(identity_token=secret) if user == _TOKEN_USER else RegistryLogin(user, secret)
