"""Find the Kubernetes API server and the user's credentials: a kubeconfig file or the service account of a pod.

Supported are bearer tokens, token files, client certificates and credential plug-ins (`exec`). Names of files are
relative to the kubeconfig file, as for kubectl. Reading such a file needs PyYAML.
"""

import asyncio
import base64
import contextlib
import datetime as dt
import json
import os
import ssl
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rookery.core import UsageError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PLUGIN_SECONDS = 60.0
TOKEN_FILE_SECONDS = 60.0
"""A token file is read again after this time, because the kubelet replaces it before the token expires."""
EXPIRY_MARGIN = 30.0
"""A credential plug-in is asked again this many seconds before its credentials expire."""


class ClusterAccess:
    """The address of an API server and the credentials for it."""

    def __init__(
        self, cluster: Mapping[str, Any], user: Mapping[str, Any], *, namespace: str = "default", folder: Path
    ) -> None:
        """Use the entries `cluster` and `user` of a kubeconfig file in the directory `folder`."""
        self.server = str(cluster.get("server", "")).rstrip("/")
        if not self.server.startswith(("https://", "http://")):
            raise UsageError(f"the address of the Kubernetes cluster is {self.server!r}; use https://HOST:PORT")
        self.proxy: str | None = cluster.get("proxy-url") or None
        self.server_name: str | None = cluster.get("tls-server-name") or None
        self.namespace = namespace
        self._cluster, self._user, self._folder = cluster, user, folder
        self._plugin_answer: Mapping[str, Any] = {}
        self._token, self._valid_until = "", 0.0
        self._lock = asyncio.Lock()

    async def make_headers(self) -> dict[str, str]:
        """Return the HTTP headers that authenticate a request. Raise `UsageError` if a credential is missing."""
        async with self._lock:
            if time.time() >= self._valid_until:
                await self._refresh()
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    async def _refresh(self) -> None:
        user, valid_until = self._user, float("inf")
        if plugin := user.get("exec"):
            self._plugin_answer = await self._run_plugin(plugin)
            self._token = str(self._plugin_answer.get("token") or "")
            if expiry := self._plugin_answer.get("expirationTimestamp"):
                valid_until = dt.datetime.fromisoformat(expiry).timestamp() - EXPIRY_MARGIN
        elif user.get("tokenFile"):
            self._token = (await asyncio.to_thread(self._read, user["tokenFile"])).decode().strip()
            valid_until = time.time() + TOKEN_FILE_SECONDS
        else:
            self._token = str(user.get("token") or "")
        self._valid_until = valid_until  # last: after a failure, the next request tries again

    def renew(self) -> bool:
        """Forget credentials that the server refused. Return whether there may be newer ones."""
        self._valid_until = 0.0
        return bool(self._user.get("exec") or self._user.get("tokenFile"))

    async def _run_plugin(self, plugin: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run a credential plug-in, a program that prints an `ExecCredential` object, and return its status."""
        spec = {"interactive": False}
        info = {"apiVersion": plugin.get("apiVersion"), "kind": "ExecCredential", "spec": spec}
        env = {**os.environ, "KUBERNETES_EXEC_INFO": json.dumps(info)}
        env |= {pair["name"]: pair["value"] for pair in plugin.get("env") or ()}
        command = [str(plugin["command"]), *map(str, plugin.get("args") or ())]
        if "/" in command[0]:
            command[0] = str(self._folder / command[0])
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            async with asyncio.timeout(PLUGIN_SECONDS):
                output, errors = await process.communicate()
            status = json.loads(output)["status"]
            if process.returncode == 0 and isinstance(status, dict):
                return status
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"the credential plug-in {command[0]} failed: {error}") from error
        finally:
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
        text = errors.decode("utf-8", "replace").strip()[-300:]
        raise UsageError(f"the credential plug-in {command[0]} failed: {text}")

    def make_ssl_context(self) -> ssl.SSLContext:
        """Return the TLS settings of connections to the server. Call `make_headers` first."""
        cluster, user = self._cluster, {**self._user, **self._plugin_answer}
        try:
            authority = self._load(cluster, "certificate-authority")
            context = ssl.create_default_context(cadata=authority.decode() if authority else None)
            if cluster.get("insecure-skip-tls-verify"):
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            certificate = user.get("clientCertificateData") or self._load(user, "client-certificate")
            if certificate:
                key = user.get("clientKeyData") or self._load(user, "client-key")
                _load_certificate(context, certificate, key)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise UsageError(f"the certificates for {self.server} cannot be loaded: {error}") from error
        return context

    def _load(self, entry: Mapping[str, Any], name: str) -> bytes:
        """Return the content of a field that holds either base64 text (`…-data`) or the name of a file."""
        if data := entry.get(f"{name}-data"):
            return base64.b64decode(data)
        return self._read(entry[name]) if entry.get(name) else b""

    def _read(self, name: str) -> bytes:
        try:
            return (self._folder / Path(name).expanduser()).read_bytes()
        except OSError as error:
            raise UsageError(f"a file that the kubeconfig file names cannot be read: {error}") from error


def _load_certificate(context: ssl.SSLContext, certificate: str | bytes, key: str | bytes) -> None:
    """Add a client certificate to TLS settings. Python's `ssl` reads certificates only from files."""
    with tempfile.NamedTemporaryFile(prefix="rookery-certificate-") as file:  # readable by this user only
        for part in (certificate, key):
            file.write((part.encode() if isinstance(part, str) else part) + b"\n")
        file.flush()
        context.load_cert_chain(file.name)


def find_cluster(context: str = "") -> ClusterAccess:
    """Return access to the cluster that kubectl would use, or to that of the kubeconfig context `context`.

    Without a kubeconfig file the service account of this pod is used. Raise `UsageError` if there is neither.
    """
    names = os.environ.get("KUBECONFIG", "")
    paths = [Path(name) for name in names.split(os.pathsep) if name] or [Path("~/.kube/config").expanduser()]
    merged: dict[str, dict[str, tuple[Mapping[str, Any], Path]]] = {"clusters": {}, "users": {}, "contexts": {}}
    current = context
    found = [path for path in paths if path.is_file()]
    for path in found:
        config = load_yaml(path)
        current = current or str(config.get("current-context") or "")
        for kind, entries in merged.items():
            for entry in config.get(kind) or ():
                # For each name, the first file wins.
                entries.setdefault(str(entry["name"]), (entry.get(kind[:-1]) or {}, path.parent.absolute()))
    if not found:
        if SERVICE_ACCOUNT.is_dir():
            return _find_service_account()
        raise UsageError(
            "no Kubernetes cluster is configured: there is neither a kubeconfig file nor a service account"
        )
    if current not in merged["contexts"]:
        raise UsageError(
            f"the kubeconfig file has no context {current!r}; choose one that `kubectl config get-contexts` lists"
        )
    chosen = merged["contexts"][current][0]
    try:
        cluster, folder = merged["clusters"][chosen["cluster"]]
        user, user_folder = merged["users"].get(chosen.get("user", ""), ({}, folder))
    except KeyError as error:
        raise UsageError(
            f"the context {current!r} of the kubeconfig file names a cluster that it does not have"
        ) from error
    cluster = _with_absolute_paths(cluster, folder)
    return ClusterAccess(cluster, user, namespace=str(chosen.get("namespace") or "default"), folder=user_folder)


def _with_absolute_paths(cluster: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    authority = cluster.get("certificate-authority")
    return {**cluster, "certificate-authority": str(folder / authority)} if authority else cluster


def _find_service_account() -> ClusterAccess:
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    namespace = "default"
    with contextlib.suppress(OSError):
        namespace = (SERVICE_ACCOUNT / "namespace").read_text().strip()
    cluster = {
        "server": f"https://{f'[{host}]' if ':' in host else host}:{port}",
        "certificate-authority": str(SERVICE_ACCOUNT / "ca.crt"),
    }
    return ClusterAccess(cluster, {"tokenFile": "token"}, namespace=namespace, folder=SERVICE_ACCOUNT)


def load_yaml(path: Path) -> dict[str, Any]:
    """Return the object in a YAML or JSON file. Raise `UsageError` if it cannot be read."""
    try:
        value = msgspec.yaml.decode(path.read_bytes())  # every JSON text is YAML
    except ImportError:
        raise UsageError(f"{path} cannot be read without PyYAML: pip install 'rookery-rl[kubernetes]'") from None
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} does not contain a YAML or JSON object")
    return value
