"""A strict stand-in for a Kubernetes cluster, whose pods are containers of a private Docker engine.

It serves the part of the API that sandboxes need, over TLS and with authentication: pods with watches, deletion
with a grace period and `exec` over WebSockets, network policies, claims of agent-sandbox, and discovery for
kubectl. Manifests are validated against the official schemas, and unknown fields are refused. Tests can let
requests fail, set a quota, and change the state of a pod as a node or a scheduler would.
"""

import asyncio
import contextlib
import copy
import datetime as dt
import json
import secrets
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from rookery.sandboxes.docker.client import EngineAPIError, EngineClient, api_path
from tests.sandboxes.kubernetes.manifest_validation import KINDS, Refused, validate

TOKEN = "stand-in-token"
NAMESPACE = "sandboxes"
LABEL = "stand-in-pod"
CLAIM_LABEL_DOMAIN = "sandbox.users.io/"
"""Prefix of the labels that a claim may give to its pod, as agent-sandbox is configured by default."""
_HEADER = struct.Struct(">BxxxI")


def now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class StandInCluster:
    """The API server, scheduler and only node of a cluster."""

    def __init__(self, engine: str, certificates: Path) -> None:
        self._engine = EngineClient(engine)
        self._certificates = certificates
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.version = 1000
        self.oldest = 0
        """Watches from an older resource version than this are refused with 410."""
        self._events: list[tuple[int, str, str, dict[str, Any]]] = []
        self._changed = asyncio.Condition()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._containers: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self.answer: Callable[[str, str], Refused | None] = lambda _method, _path: None
        """Called with the method and path of each request; the returned error is the answer."""
        self.loses_answers = 0
        """Number of created objects for which the client gets an error although they exist."""
        self.quota: int | None = None
        self.schedulable = True
        self.warm_pools: dict[str, str] = {}
        """Images of warm pools by name. While there are none, the agent-sandbox project is not installed."""
        self.labels_claimed_pods = asyncio.Event()
        """The labels of a claim are added to its pod, which is ready before, when this is set."""
        self.labels_claimed_pods.set()
        self._sockets: set[web.WebSocketResponse] = set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    # ---- the server

    async def start(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        folder = self._certificates
        context.load_cert_chain(folder / "server-cert.pem", folder / "server-key.pem")
        context.load_verify_locations(folder / "ca.pem")
        context.verify_mode = ssl.CERT_OPTIONAL
        app = web.Application(middlewares=[self._middleware])
        app.router.add_get("/version", self._discover)
        app.router.add_get("/{kind:apis?}", self._discover)
        app.router.add_get("/api/v1", self._discover)
        app.router.add_get("/apis/{group}/{version}", self._discover)
        for prefix in ("/api/v1", "/apis/{group}/{version}"):
            where = f"{prefix}/namespaces/{{namespace}}/{{resource}}"
            app.router.add_get(where, self._list)
            app.router.add_post(where, self._create)
            app.router.add_get(f"{where}/{{name}}", self._get)
            app.router.add_put(f"{where}/{{name}}", self._replace)
            app.router.add_patch(f"{where}/{{name}}", self._patch)
            app.router.add_delete(f"{where}/{{name}}", self._delete)
            app.router.add_route("*", f"{where}/{{name}}/exec", self._exec)
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=context)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop_server(self) -> None:
        """Stop the API server and its connections. Pods continue."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def close(self) -> None:
        await self.stop_server()
        for name, task in self._tasks.items():
            if not name.startswith("delete "):
                task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for container in self._containers.values():
            await self._remove(container)
        await self._engine.close()

    def write_kubeconfig(self, path: Path, *, user: Mapping[str, Any] | None = None) -> Path:
        """Write a kubeconfig file, with a token unless `user` has other credentials."""
        named = {"cluster": "stand-in", "user": "tester", "namespace": NAMESPACE}
        cluster = {
            "server": f"https://127.0.0.1:{self.port}",
            "certificate-authority": str(self._certificates / "ca.pem"),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": named}],
            "clusters": [{"name": "stand-in", "cluster": cluster}],
            "users": [{"name": "tester", "user": user if user is not None else {"token": TOKEN}}],
        }
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        return path

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        try:
            certificate = request.transport.get_extra_info("peercert") if request.transport else None
            if request.headers.get("Authorization") != f"Bearer {TOKEN}" and not certificate:
                raise Refused(401, "Unauthorized", "Unauthorized")
            if refused := self.answer(request.method, request.path):
                raise refused
            namespace = request.match_info.get("namespace", NAMESPACE)
            if namespace != NAMESPACE:
                raise Refused(403, "Forbidden", f"the tester cannot use the namespace {namespace}")
            if (resource := request.match_info.get("resource", "pods")) not in KINDS:
                raise Refused(404, "NotFound", "the server could not find the requested resource")
            if "agents" in KINDS[resource][0] and not self.warm_pools:
                raise Refused(404, "NotFound", "the server could not find the requested resource")
            response: web.StreamResponse = await handler(request)
        except Refused as refused:
            return web.json_response(refused.status(), status=refused.code, headers=refused.headers)
        return response

    async def _discover(self, request: web.Request) -> web.Response:
        path = request.path
        if path == "/version":
            return web.json_response({"major": "1", "minor": "32", "gitVersion": "v1.32.0"})
        if path == "/api":
            return web.json_response({"kind": "APIVersions", "versions": ["v1"]})
        groups = {
            api_version for api_version, _ in KINDS.values() if "agents" not in api_version or self.warm_pools
        }
        if path == "/apis":
            listed = []
            for group_version in sorted(groups - {"v1"}):
                group, version = group_version.split("/")
                entry = {"groupVersion": group_version, "version": version}
                listed.append({"name": group, "versions": [entry], "preferredVersion": entry})
            return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": listed})
        group_version = path.removeprefix("/apis/").removeprefix("/api/")
        if group_version not in groups:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        resources = [
            {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
            for name, (found, kind) in KINDS.items()
            if found == group_version
        ]
        return web.json_response(
            {"kind": "APIResourceList", "groupVersion": group_version, "resources": resources}
        )

    # ---- objects

    def find(self, resource: str, name: str) -> dict[str, Any]:
        try:
            return self.objects[resource, name]
        except KeyError:
            raise Refused(404, "NotFound", f'{resource} "{name}" not found') from None

    def pods(self) -> list[dict[str, Any]]:
        return [found for (resource, _), found in self.objects.items() if resource == "pods"]

    async def store(self, resource: str, found: dict[str, Any], event: str = "MODIFIED") -> None:
        """Store a new state of an object and tell the watches."""
        async with self._changed:
            self.version += 1
            found["metadata"]["resourceVersion"] = str(self.version)
            key = (resource, found["metadata"]["name"])
            if event == "DELETED":
                self.objects.pop(key, None)
            else:
                self.objects[key] = found
            self._events.append((self.version, event, resource, copy.deepcopy(found)))
            self._changed.notify_all()

    async def set_status(self, name: str, **status: Any) -> None:
        """Change the status of a pod, as its node does."""
        found = self.objects.get(("pods", name))
        if found is not None:
            found["status"] = {**found["status"], **status}
            await self.store("pods", found)

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self.find(request.match_info["resource"], request.match_info["name"]))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        resource, query = request.match_info["resource"], request.query
        if query.get("watch") in ("1", "true"):
            return await self._watch(request)
        items = [
            found
            for (kind, _), found in sorted(self.objects.items())
            if kind == resource and _is_selected(found, query)
        ]
        start, limit = int(query.get("continue") or 0), int(query.get("limit") or 0)
        metadata = {"resourceVersion": str(self.version)}
        if limit and len(items) > start + limit:
            metadata["continue"] = str(start + limit)
        items = items[start : start + limit] if limit else items
        api_version, kind = KINDS[resource]
        return web.json_response(
            {"kind": f"{kind}List", "apiVersion": api_version, "metadata": metadata, "items": items}
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        resource, query = request.match_info["resource"], request.query
        seen = int(query.get("resourceVersion") or 0)
        if seen < self.oldest:
            raise Refused(410, "Expired", f"too old resource version: {seen} ({self.oldest})")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        end = asyncio.get_running_loop().time() + float(query.get("timeoutSeconds") or 60)
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout_at(end):
                while True:
                    if seen < self.oldest:  # the history was compacted during the watch
                        status = Refused(410, "Expired", "too old resource version").status()
                        await _send_line(response, {"type": "ERROR", "object": status})
                        return response
                    for version, event, kind, found in list(self._events):
                        if version > seen:
                            seen = version
                            if kind == resource and _is_selected(found, query):
                                await _send_line(response, {"type": event, "object": found})
                    if query.get("allowWatchBookmarks") == "true":
                        api_version, kind = KINDS[resource]
                        metadata = {"resourceVersion": str(seen), "creationTimestamp": None}
                        bookmark = {"kind": kind, "apiVersion": api_version, "metadata": metadata}
                        await _send_line(response, {"type": "BOOKMARK", "object": bookmark})
                    async with self._changed:
                        while self.version <= seen:
                            await self._changed.wait()
        return response

    async def expire_history(self) -> None:
        """Forget all events, so that running watches and those from an older version end with 410."""
        async with self._changed:
            self.version += 1
            self._events.clear()
            self.oldest = self.version
            self._changed.notify_all()

    async def _create(self, request: web.Request) -> web.Response:
        resource, body = request.match_info["resource"], await request.json()
        validate(body, resource)
        name = body["metadata"]["name"]
        if (resource, name) in self.objects:
            raise Refused(409, "AlreadyExists", f'{resource} "{name}" already exists')
        if resource in ("pods", "sandboxclaims") and self.quota is not None and len(self.pods()) >= self.quota:
            used = f"requested: pods=1, used: pods={len(self.pods())}, limited: pods={self.quota}"
            raise Refused(403, "Forbidden", f'pods "{name}" is forbidden: exceeded quota: team, {used}')
        body["metadata"] |= {
            "namespace": NAMESPACE,
            "uid": secrets.token_hex(16),
            "creationTimestamp": now(),
        }
        if resource == "pods":
            body["status"] = {"phase": "Pending"}
        await self.store(resource, body, "ADDED")
        if resource == "pods":
            self._tasks[name] = asyncio.ensure_future(self._run_pod(name))
        elif resource == "sandboxclaims":
            self._tasks[f"claim {name}"] = asyncio.ensure_future(self._bind_claim(name))
        if self.loses_answers:
            self.loses_answers -= 1
            raise Refused(504, "Timeout", "the request did not complete within the allotted time")
        return web.json_response(body, status=201)

    async def _bind_claim(self, name: str) -> None:
        """Give a claim a pod, as the controller of agent-sandbox does."""
        claim = self.objects["sandboxclaims", name]

        async def report(ready: bool, reason: str, message: str = "") -> None:
            condition = {"type": "Ready", "status": str(ready), "reason": reason, "message": message}
            claim["status"] = {
                **claim.get("status", {}),
                "conditions": [{**condition, "lastTransitionTime": now()}],
            }
            await self.store("sandboxclaims", claim)

        labels = (claim["spec"].get("additionalPodMetadata") or {}).get("labels") or {}
        image = self.warm_pools.get(claim["spec"]["warmPoolRef"]["name"])
        if wrong := [label for label in labels if not label.startswith(CLAIM_LABEL_DOMAIN)]:
            await report(False, "InvalidMetadata", f"label {wrong[0]!r} is not in an allowed domain")
            return
        if image is None:
            await report(False, "WarmPoolNotFound", "SandboxWarmPool not found")
            return
        await report(False, "SandboxNotReady")
        pod_name, sandbox_name = f"warm-{secrets.token_hex(4)}", f"sandbox-{name}"
        pod = {
            "metadata": {"name": pod_name, "labels": {"pool": claim["spec"]["warmPoolRef"]["name"]}},
            "spec": {"containers": [{"name": "main", "image": image, "command": ["sleep", "100000"]}]},
            "status": {"phase": "Pending"},
        }
        await self.store("pods", pod, "ADDED")
        self._tasks[pod_name] = asyncio.ensure_future(self._run_pod(pod_name))
        async with self._changed:
            await self._changed.wait_for(lambda: pod["status"]["phase"] == "Running")
        annotations = {"agents.x-k8s.io/pod-name": pod_name}
        sandbox = {"metadata": {"name": sandbox_name, "annotations": annotations}}
        await self.store("sandboxes", sandbox, "ADDED")
        claim["status"]["sandbox"] = {"name": sandbox_name, "podIPs": []}
        await report(True, "Ready")
        await self.labels_claimed_pods.wait()
        pod["metadata"]["labels"] |= labels
        await self.store("pods", pod)

    async def _replace(self, request: web.Request) -> web.Response:
        resource, body = request.match_info["resource"], await request.json()
        validate(body, resource)
        found = self.find(resource, request.match_info["name"])
        if body["metadata"].get("resourceVersion") not in (None, found["metadata"]["resourceVersion"]):
            raise Refused(409, "Conflict", "the object has been modified; please apply your changes to the latest")
        body["metadata"] = {**found["metadata"], **body["metadata"]}
        await self.store(resource, body)
        return web.json_response(body)

    async def _patch(self, request: web.Request) -> web.Response:
        resource = request.match_info["resource"]
        if request.content_type != "application/merge-patch+json":
            raise Refused(415, "UnsupportedMediaType", f"{request.content_type} is not supported")
        found = self.find(resource, request.match_info["name"])
        patch = await request.json()
        if resource == "pods" and set(patch) != {"metadata"}:
            raise Refused(422, "Invalid", "a pod may not change these fields")
        _merge(found, patch)
        if resource == "sandboxclaims":
            validate(found, resource)
        await self.store(resource, found)
        return web.json_response(found)

    async def _delete(self, request: web.Request) -> web.Response:
        resource, name = request.match_info["resource"], request.match_info["name"]
        found = self.find(resource, name)
        options = await request.json() if request.can_read_body else {}
        if resource != "pods":
            await self.store(resource, found, "DELETED")
            sandbox = ((found.get("status") or {}).get("sandbox") or {}).get("name")
            if sandbox is not None:  # a claim: its objects are deleted with it
                owned = self.objects.pop(("sandboxes", sandbox))
                await self.delete_pod(owned["metadata"]["annotations"]["agents.x-k8s.io/pod-name"])
            return web.json_response(found)
        grace = options.get("gracePeriodSeconds", found["spec"].get("terminationGracePeriodSeconds", 30))
        if "deletionTimestamp" not in found["metadata"]:
            await self.delete_pod(name, grace)
        return web.json_response(found)

    async def delete_pod(self, name: str, grace: int = 1) -> None:
        """Delete a pod, as any client can."""
        found = self.find("pods", name)
        found["metadata"] |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": grace}
        await self.store("pods", found)
        self._tasks[f"delete {name}"] = asyncio.ensure_future(self._end_pod(name, grace))

    # ---- the node

    async def _end_pod(self, name: str, grace: int) -> None:
        task = self._tasks.get(name)
        container = self._containers.pop(name, None)
        if container is not None:
            with contextlib.suppress(EngineAPIError):
                await self._engine.call(
                    "POST", api_path("containers", container, "stop", t=str(grace)), ok=(304, 404)
                )
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        container = container or self._containers.pop(name, None)
        if container is not None:
            await self._remove(container)
        await self.store("pods", self.objects["pods", name], "DELETED")

    async def schedule_again(self, name: str) -> None:
        """Start a pod that could not be scheduled."""
        self.schedulable = True
        self._tasks[name] = asyncio.ensure_future(self._run_pod(name))

    async def kill_container(self, name: str, reason: str = "") -> None:
        """Kill the container of a pod, as its node does. `reason` is reported instead of the real one."""
        self._reasons[name] = reason
        await self._engine.call("POST", api_path("containers", self._containers[name], "kill"), ok=(404, 409))

    async def _remove(self, container: str) -> None:
        await self._engine.call("DELETE", api_path("containers", container, force="1", v="1"), ok=(404, 409))

    async def _run_pod(self, name: str) -> None:
        """Schedule a pod, start its container and report its state until the container ends."""
        pod = self.objects["pods", name]
        scheduled = {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": now()}
        if not self.schedulable:
            scheduled |= {"status": "False", "reason": "Unschedulable", "message": "0/1 nodes: Insufficient cpu."}
            await self.set_status(name, conditions=[scheduled])
            return
        container = pod["spec"]["containers"][0]
        pod["spec"]["nodeName"] = "only-node"

        def report(state: dict[str, Any]) -> list[dict[str, Any]]:
            base = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
            return [{**base, "ready": "running" in state, "state": state}]

        waiting = {"waiting": {"reason": "ContainerCreating"}}
        await self.set_status(name, conditions=[scheduled], containerStatuses=report(waiting))
        try:
            body = self._make_container(pod)
            made = await self._engine.call("POST", api_path("containers", "create"), body)
        except EngineAPIError as error:
            for reason in ("ErrImagePull", "ImagePullBackOff"):
                state = {"waiting": {"reason": reason, "message": f"failed to pull image: {error}"}}
                await self.set_status(name, containerStatuses=report(state))
            return
        self._containers[name] = made["Id"]
        try:
            await self._engine.call("POST", api_path("containers", made["Id"], "start"))
        except EngineAPIError as error:
            ended = {"exitCode": 128, "reason": "StartError", "message": str(error)}
            await self.set_status(name, phase="Failed", containerStatuses=report({"terminated": ended}))
            return
        await self.set_status(
            name, phase="Running", containerStatuses=report({"running": {"startedAt": now()}}), startTime=now()
        )
        limit = pod["spec"].get("activeDeadlineSeconds")
        try:
            async with asyncio.timeout(limit):
                path = api_path("containers", made["Id"], "wait")
                code = (await self._engine.call("POST", path, timeout=100_000))["StatusCode"]
        except TimeoutError:
            await self._engine.call("POST", api_path("containers", made["Id"], "kill"), ok=(404, 409))
            await self.set_status(
                name, phase="Failed", reason="DeadlineExceeded", message="Pod was active too long"
            )
            return
        state = (await self._engine.call("GET", api_path("containers", made["Id"], "json")))["State"]
        real = "OOMKilled" if state["OOMKilled"] else "Error" if code else "Completed"
        reason = self._reasons.get(name) or real
        ended = {"exitCode": code, "reason": reason, "finishedAt": now()}
        await self.set_status(
            name, phase="Failed" if code else "Succeeded", containerStatuses=report({"terminated": ended})
        )

    def _make_container(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        spec = pod["spec"]
        container = spec["containers"][0]
        security = {**(spec.get("securityContext") or {}), **(container.get("securityContext") or {})}
        limits = (container.get("resources") or {}).get("limits") or {}
        policies = [
            found["spec"]
            for (kind, _), found in self.objects.items()
            if kind == "networkpolicies"
            and found["spec"]["podSelector"].get("matchLabels", {}).items() <= pod["metadata"]["labels"].items()
        ]
        closed = bool(policies) and not any(policy.get("egress") for policy in policies)
        host = {
            "NetworkMode": "none" if closed else "host",
            "CapDrop": (security.get("capabilities") or {}).get("drop") or [],
            "SecurityOpt": [] if security.get("allowPrivilegeEscalation", True) else ["no-new-privileges"],
            "LogConfig": {"Type": "none"},
            "Memory": int(limits.get("memory", 0)),
            "MemorySwap": int(limits.get("memory", 0)),
            "NanoCpus": int(str(limits.get("cpu", "0m")).removesuffix("m")) * 1_000_000,
        }
        return {
            "Image": container["image"],
            "Entrypoint": container["command"],
            "Cmd": container.get("args") or [],
            "Env": [f"{pair['name']}={pair['value']}" for pair in container.get("env") or ()],
            "User": f"{security.get('runAsUser', 0)}:{security.get('runAsGroup', 0)}",
            "Labels": {LABEL: pod["metadata"]["name"]},
            "HostConfig": host,
        }

    # ---- exec

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        name, query = request.match_info["name"], request.query
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise Refused(400, "BadRequest", "only WebSockets are supported")
        pod = self.find("pods", name)
        if query.get("container", pod["spec"]["containers"][0]["name"]) != pod["spec"]["containers"][0]["name"]:
            raise Refused(400, "BadRequest", f"container {query['container']} is not valid for pod {name}")
        if pod["status"]["phase"] != "Running":
            raise Refused(500, "InternalError", "container not found")
        body = {
            "Cmd": query.getall("command"),
            **{f"Attach{stream.title()}": query.get(stream) == "true" for stream in ("stdin", "stdout", "stderr")},
        }
        made = await self._engine.call("POST", api_path("containers", self._containers[name], "exec"), body)
        reader, writer = await self._engine.hijack(api_path("exec", made["Id"], "start"), {"Detach": False})
        socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io", "v4.channel.k8s.io"), max_msg_size=1 << 20)
        await socket.prepare(request)
        self._sockets.add(socket)
        try:
            if socket.ws_protocol is None:
                await socket.close(code=1002)
                return socket
            await socket.send_bytes(b"\x01")  # real servers tell clients so that the connection is established
            output = asyncio.ensure_future(self._send_output(socket, reader, made["Id"]))
            try:
                await self._read_input(socket, writer)
            finally:
                output.cancel()
                await asyncio.gather(output, return_exceptions=True)
        finally:
            self._sockets.discard(socket)
            writer.close()
        return socket

    async def _read_input(self, socket: web.WebSocketResponse, writer: asyncio.StreamWriter) -> None:
        async for message in socket:
            if message.type is not WSMsgType.BINARY or not message.data:
                raise AssertionError("a message of an exec connection must be binary and have a channel")
            channel, data = message.data[0], message.data[1:]
            if channel == 0:
                writer.write(data)
                await writer.drain()
            elif channel == 255 and socket.ws_protocol == "v5.channel.k8s.io" and data == b"\0":
                writer.write_eof()
            elif channel != 4:  # the size of the terminal
                raise AssertionError(f"unexpected channel {channel}")

    async def _send_output(self, socket: web.WebSocketResponse, reader: asyncio.StreamReader, job: str) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                channel, size = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                await socket.send_bytes(bytes((channel,)) + await reader.readexactly(size))
        code = (await self._engine.call("GET", api_path("exec", job, "json"), ok=(404,)) or {}).get("ExitCode")
        status: dict[str, Any] = {"metadata": {}, "status": "Success"}
        if code != 0:
            causes = [{"reason": "ExitCode", "message": str(137 if code is None else code)}]
            status = {
                "metadata": {},
                "status": "Failure",
                "reason": "NonZeroExitCode",
                "message": f"command terminated with non-zero exit code: exit status {code}",
                "details": {"causes": causes},
            }
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(b"\x03" + json.dumps(status).encode())
            await socket.close()

    async def break_connections(self) -> None:
        """Break all exec connections without a status, as a restart of the API server does."""
        for socket in list(self._sockets):
            transport = socket._req.transport if socket._req is not None else None
            if transport is not None:
                transport.abort()


def _is_selected(found: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    """Return whether an object matches the label selector and the field selector of a request."""
    metadata = found["metadata"]
    for part in filter(None, query.get("labelSelector", "").split(",")):
        name, equals, value = part.partition("=")
        if name not in metadata.get("labels", {}) or (equals and metadata["labels"][name] != value.lstrip("=")):
            return False
    for part in filter(None, query.get("fieldSelector", "").split(",")):
        name, _, value = part.partition("=")
        if name != "metadata.name":
            raise Refused(400, "BadRequest", f"unknown field selector {part}")
        if metadata["name"] != value:
            return False
    return True


def _merge(found: dict[str, Any], patch: Mapping[str, Any]) -> None:
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        elif isinstance(value, dict):
            _merge(found.setdefault(name, {}), value)
        else:
            found[name] = value


async def _send_line(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await response.write(json.dumps(event).encode() + b"\n")


@contextlib.asynccontextmanager
async def run_cluster(engine: str, certificates: Path) -> AsyncIterator[StandInCluster]:
    cluster = StandInCluster(engine, certificates)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.close()
