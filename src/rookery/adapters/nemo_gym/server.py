"""HTTP server that is an agent server of NeMo Gym. It runs in the process of `rookery serve`."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.adapters.compatibility import check_version, parse_sampling
from rookery.adapters.nemo_gym.metrics import aggregate_metrics
from rookery.adapters.nemo_gym.responses import make_response, refuse
from rookery.adapters.rollout_service import QueueFullError, RolloutService
from rookery.core import RookeryError, Task, UsageError
from rookery.core.errors import BatchError
from rookery.gateway.http_messages import Request, ResponseWriter
from rookery.gateway.server import Server
from rookery.upstreams.listeners import bind_listener

TESTED: Final = ("nemo-gym", "0.7", "0.8")
MAX_BODY: Final = 64 << 20
AGENT: Final = {"type": "responses_api_agents", "name": "rookery"}
SAMPLING: Final = {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_output_tokens"}
"""Names of sampling parameters in Rookery and in Gym's `responses_create_params`."""
CONFIG: Final = """\
# Configuration of NeMo Gym for a server that it does not start: there is no `entrypoint`.
# Start it with `rookery serve ENV --protocol nemo-gym --policy URL --port {port}`.
rookery:
  responses_api_agents:
    rookery:
      host: {host}
      port: {port}
# NeMo Gym 0.7 reaches an agent through an environment server. That is the same server.
rookery_environment_server:
  environment_servers:
    rookery:
      host: {host}
      port: {port}
      agent_server:
        type: responses_api_agents
        name: rookery
"""


class _RunRequest(msgspec.Struct):
    responses_create_params: dict[str, Any]
    rookery: dict[str, Any]


class NemoGymServer:
    """Agent server for NeMo Gym and NeMo RL (HTTP)."""

    name = "nemo-gym"
    scheme = "http"
    default_port = 8600

    async def serve(
        self, service: RolloutService, host: str, port: int, ready: Callable[[str], None], stop: asyncio.Event
    ) -> None:
        """Serve until `stop` is set. `ready` is called with the server's URL when it accepts connections."""
        if not service.has_policy:
            raise UsageError(
                "--protocol nemo-gym needs --policy: the URL of NeMo RL's generation server (set "
                "policy.generation.vllm_cfg.expose_http_server) or of a model server of NeMo Gym"
            )
        check_version(*TESTED)
        self._service = service
        sock = bind_listener(host, port)
        server = Server(self._handle, _admit, format_error=_format_error, internal_error=_format_error(500, "bug"))
        try:
            await server.listen(sock)
        except BaseException:
            sock.close()
            raise
        try:
            shown = f"[{host}]" if ":" in host else host
            ready(f"http://{shown}:{sock.getsockname()[1]}")
            await stop.wait()
        finally:
            await server.close(grace=0.0)

    async def _handle(self, request: Request, out: ResponseWriter) -> None:
        if request.method == "GET":
            out.send(200, msgspec.json.encode({"status": "ok", "unfinished": self._service.unfinished}))
        elif request.path == "/aggregate_metrics":
            out.send(200, msgspec.json.encode(aggregate_metrics(_decode(request.body, dict[str, Any]))))
        else:
            out.send(200, msgspec.json.encode(await self._run(request.body)))

    async def _run(self, body: bytes) -> dict[str, Any]:
        row = _decode(body, _RunRequest)
        try:
            params = {ours: row.responses_create_params.get(theirs) for ours, theirs in SAMPLING.items()}
            task, sampling = msgspec.convert(row.rookery, Task), parse_sampling(params)
        except msgspec.ValidationError as error:
            raise refuse(422, f"the row is not valid: {error}") from error
        try:
            finished = await self._service.run(task, sampling=sampling)
        except QueueFullError as error:
            raise refuse(429, str(error)) from error
        except (UsageError, BatchError) as error:
            raise refuse(422, str(error)) from error
        except RookeryError as error:
            raise refuse(503, str(error)) from error
        return make_response(finished, row.responses_create_params)

    @staticmethod
    def write_package(tasks: list[Task], folder: Path, name: str, url: str) -> list[Path]:
        """Write the data set and the configuration of NeMo Gym; return the files."""
        folder.mkdir(parents=True, exist_ok=True)
        host, _, port = url.partition("://")[2].rpartition(":")
        rows = [
            {
                "responses_create_params": {
                    "input": [{"role": one.role, "content": one.text} for one in task.prompt],
                },
                "agent_ref": AGENT,
                "environment": name,
                "rookery": task,
            }
            for task in tasks
        ]
        files = {
            folder / "rookery.yaml": CONFIG.format(host=host, port=port).encode(),
            folder / "tasks.jsonl": b"".join(msgspec.json.encode(row) + b"\n" for row in rows),
        }
        for path, data in files.items():
            path.write_bytes(data)
        return list(files)


def _admit(request: Request) -> int:
    if "origin" in request.headers:  # otherwise any website could run tasks on the user's machine
        raise refuse(403, "requests of web pages are refused")
    paths = {"/run": "POST", "/aggregate_metrics": "POST", "/": "GET", "/health": "GET"}
    if request.path not in paths:
        raise refuse(404, f"no such path {request.path[:200]}: this agent server has /run and /aggregate_metrics")
    if request.method != paths[request.path]:
        raise refuse(405, f"{request.path} accepts only {paths[request.path]}")
    return MAX_BODY if request.method == "POST" else 0


def _decode(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise refuse(
            422, f"the body is not valid: {error}. Rows are written by `rookery serve --package`"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refuse(400, f"the body is not valid JSON: {error}") from error


def _format_error(status: int, text: str) -> bytes:
    return msgspec.json.encode({"error": {"message": text or str(status), "cause": ""}})
