"""Real inference engines on loopback: vLLM and llama.cpp, both serving SmolLM2-135M-Instruct on the CPU.

`make engines` installs them. Both start together when the first test needs one, and are stopped by PID at the end.
Tests that need no vLLM come first, because vLLM takes a minute to start.
"""

import contextlib
import os
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.servers import free_port
from tests.waiting import block_until

PEERS = Path(__file__).resolve().parents[2] / ".peers"
MODEL = PEERS / "smollm2"
WEIGHTS = MODEL / "hf"
GGUF = MODEL / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPLATE = Path(__file__).parent / "chatml_tools.jinja"
"""SmolLM2's chat template, extended by tools."""
START_SECONDS = 600.0
SEQUENCES = 8
"""Number of requests that vLLM samples at the same time."""
QUEUE = 12
"""Number of requests that vLLM accepts, running and waiting together. It answers 503 to more."""
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "DEBUG",  # the log contains the token IDs of requests and replies
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # with two, a busy machine makes each wait for the other at every layer
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent == TEMPLATE.parent and "vllm" in item.nodeid)


class LoggedRequest(NamedTuple):
    """A request as vLLM logged it. `sampled` is None for streamed replies, which vLLM does not log."""

    prompt: list[int]
    sampled: list[int] | None


class RunningEngine:
    """A server process, started in its own process group, and the URL at which it answers."""

    def __init__(self, command: list[str], port: int, environment: dict[str, str], log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as reply:
            return str(reply.read().decode())

    def metric(self, name: str) -> float:
        """Return the sum of a Prometheus metric over its labels."""
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert values, f"the server has no metric {name}"
        return sum(map(float, values))

    def logged_requests(self) -> dict[str, LoggedRequest]:
        """Return the requests in vLLM's log by their IDs."""
        text = self.log.read_text(errors="replace")
        prompts = re.findall(r"Request (\S+) details: .*?prompt_token_ids: \[([\d, ]*)\]", text, re.DOTALL)
        replies = re.findall(r"Generated response (\S+?) details: output_token_ids: [\[(]([\d, ]*)[\])]", text)
        sampled = {name: [int(token) for token in ids.split(",") if token.strip()] for name, ids in replies}
        return {
            name: LoggedRequest([int(token) for token in ids.split(",")], sampled.get(name))
            for name, ids in prompts
        }

    def wait_until_ready(self) -> None:
        """Wait until the server answers its health check."""

        def healthy() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"a server did not start: {self.log.read_text(errors='replace')[-3_000:]}")
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{self.url}/health", timeout=30).close()
                return True
            return False

        block_until(healthy, START_SECONDS)

    def kill(self) -> None:
        """Kill the server and its child processes, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


def start_vllm(log: Path, port: int | None = None, *flags: str) -> RunningEngine:
    port = port or free_port()
    options: dict[str, Any] = {
        "--host": "127.0.0.1",
        "--port": port,
        "--served-model-name": "smollm2",
        "--max-model-len": 4096,
        "--max-num-seqs": SEQUENCES,
        "--max-num-queued-reqs": QUEUE,
        "--dtype": "float32",
        "--chat-template": TEMPLATE,
        "--tool-call-parser": "hermes",
    }
    switches = (
        "--enforce-eager",
        "--enable-scale-out",
        "--enable-auto-tool-choice",
        "--enable-log-requests",
        "--enable-log-outputs",
    )
    program = str(PEERS / "venv-vllm" / "bin" / "vllm")
    words = [str(word) for pair in options.items() for word in pair]
    return RunningEngine([program, "serve", str(WEIGHTS), *words, *switches, *flags], port, VLLM_ENVIRONMENT, log)


def start_llamacpp(log: Path) -> RunningEngine:
    program, port = str(PEERS / "venv-llamacpp" / "bin" / "python"), free_port()
    command = [program, str(Path(__file__).parent / "llamacpp_server.py"), str(GGUF), str(port), "4", "2048"]
    return RunningEngine(command, port, {}, log)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningEngine]]:
    """The servers of this test session by their kind. They may still be starting."""
    if not (MODEL / "complete").exists():
        pytest.skip("[probed] this machine has no inference engines (make engines)")
    folder = tmp_path_factory.mktemp("engines")
    started: dict[str, RunningEngine] = {}
    try:
        if (PEERS / "venv-vllm" / "complete").exists():
            started["vllm"] = start_vllm(folder / "vllm.log")
        started["llamacpp"] = start_llamacpp(folder / "llamacpp.log")
        yield started
    finally:
        for engine in started.values():
            engine.kill()


@pytest.fixture
def vllm(engines: dict[str, RunningEngine]) -> RunningEngine:
    if "vllm" not in engines:
        pytest.skip("[probed] vLLM is not installed: its CPU build needs a processor with AVX2 (make engines)")
    engines["vllm"].wait_until_ready()
    return engines["vllm"]


@pytest.fixture
def llamacpp(engines: dict[str, RunningEngine]) -> RunningEngine:
    engines["llamacpp"].wait_until_ready()
    return engines["llamacpp"]
