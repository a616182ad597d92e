"""Find the container engine that the user has chosen: a local socket, TCP with or without TLS, or SSH.

The rules are those of Docker's own command: `DOCKER_HOST`, else the context in `DOCKER_CONTEXT`, else the current
context of Docker's configuration, else a default socket. `CONTAINER_HOST` of Podman comes after `DOCKER_HOST`.
"""

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from rookery.core import UsageError

if TYPE_CHECKING:
    import ssl

CONNECT_SECONDS = 3.0
DEFAULT_SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")


class EngineEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a container engine."""

    path: str = ""
    """Path of its Unix socket, on this machine or, with `ssh`, on the other one. Empty for TCP."""
    host: str = ""
    port: int = 0
    certificates: str = ""
    """Directory with ca.pem, cert.pem and key.pem for TLS; empty for TCP without TLS."""
    verify: bool = True
    """True if the certificate of the container engine is checked."""
    ssh: tuple[str, ...] = ()
    """Arguments with which `ssh` connects to the machine of the container engine: a destination after options."""

    @property
    def remote(self) -> bool:
        """True if the container engine may run on another machine."""
        return bool(self.host or self.ssh)

    def __str__(self) -> str:
        if self.ssh:
            return f"ssh://{self.ssh[-1]}{self.path}"
        return f"tcp://{self.host}:{self.port}" if self.host else self.path

    def make_ssl_context(self) -> "ssl.SSLContext | None":
        """Return the TLS settings of a connection; None without TLS. Raise `UsageError` if a file is unusable."""
        if not self.certificates:
            return None
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        directory = Path(self.certificates)
        try:
            if self.verify:
                context.load_verify_locations(directory / "ca.pem")
            else:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            if (directory / "cert.pem").exists():
                context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"the files ca.pem, cert.pem and key.pem for the container engine in {directory} cannot be used: "
                f"{error}"
            ) from error
        return context


def find_endpoint() -> EngineEndpoint:
    """Return the container engine that the user has chosen. Raise `UsageError` if the choice is invalid."""
    for variable in ("DOCKER_HOST", "CONTAINER_HOST"):
        if value := os.environ.get(variable, "").strip():
            certificates = _find_certificates() if os.environ.get("DOCKER_TLS_VERIFY") else ""
            return _parse(value, variable, certificates)
    if (context := _find_context()) is not None:
        return context
    return EngineEndpoint(path=_find_default_socket())


def _find_certificates() -> str:
    return os.environ.get("DOCKER_CERT_PATH") or str(_config_directory())


def _parse(value: str, source: str, certificates: str = "", *, verify: bool = True) -> EngineEndpoint:
    """Return the endpoint of a URL that comes from `source`, a variable or a context."""
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{source} is {value!r}, which is not a URL: {error}") from error
    if parts.password:
        raise UsageError(f"{source} contains a password, which is not supported: log in with a key")
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return EngineEndpoint(path=parts.path)
    if parts.scheme == "ssh" and parts.hostname:
        return EngineEndpoint(path=parts.path or DEFAULT_SOCKETS[0], ssh=_ssh_arguments(parts, port))
    if parts.scheme in ("tcp", "http", "https") and parts.hostname and parts.path in ("", "/"):
        if parts.scheme == "https" and not certificates:
            certificates = _find_certificates()
        default = 2376 if certificates else 2375
        return EngineEndpoint(host=parts.hostname, port=port or default, certificates=certificates, verify=verify)
    raise UsageError(
        f"{source} is {value!r}; use unix:///PATH, tcp://HOST:PORT (with DOCKER_TLS_VERIFY=1 and DOCKER_CERT_PATH "
        "for TLS) or ssh://USER@HOST"
    )


def _ssh_arguments(parts: SplitResult, port: int | None) -> tuple[str, ...]:
    from rookery.sandboxes.ssh_provider import check_destination

    destination = f"{parts.username}@{parts.hostname}" if parts.username else str(parts.hostname)
    check_destination(destination)
    return (*(("-p", str(port)) if port else ()), destination)


def _config_directory() -> Path:
    return Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")


def _find_context() -> EngineEndpoint | None:
    """Return the endpoint of Docker's chosen context; None if there is none or it is the default."""
    directory = _config_directory()
    name = os.environ.get("DOCKER_CONTEXT", "").strip()
    source = "DOCKER_CONTEXT"
    if not name:
        source = f"currentContext in {directory / 'config.json'}"
        name = str(_read_json(directory / "config.json").get("currentContext") or "")
    if name in ("", "default"):
        return None
    identity = hashlib.sha256(name.encode()).hexdigest()
    meta = _read_json(directory / "contexts" / "meta" / identity / "meta.json")
    endpoint = (meta.get("Endpoints") or {}).get("docker") or {}
    if not endpoint.get("Host"):
        raise UsageError(
            f"{source} names the Docker context {name!r}, which does not exist: see `docker context ls`"
        )
    tls = directory / "contexts" / "tls" / identity / "docker"
    certificates = str(tls) if tls.is_dir() else ""
    verify = not endpoint.get("SkipTLSVerify")
    return _parse(str(endpoint["Host"]), f"the Docker context {name!r}", certificates, verify=verify)


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object of a file; empty if there is no such file or it contains something else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _find_default_socket() -> str:
    """Return the first default path at which a server accepts connections, or the first one if none does."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    own = [f"{runtime}/docker.sock", f"{runtime}/podman/podman.sock"] if runtime else []
    candidates = [path for path in (*DEFAULT_SOCKETS, *own) if Path(path).exists()]
    return next((path for path in candidates if accepts_connections(path)), [*candidates, *DEFAULT_SOCKETS][0])


def accepts_connections(path: str) -> bool:
    """Return whether a server listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(CONNECT_SECONDS)
        try:
            sock.connect(path)
        except OSError:
            return False
    return True
