"""Real inference engines on loopback: vLLM and llama.cpp, both serving SmolLM2-135M-Instruct on the CPU.

`make engines` installs them. Both start together when the first test needs one, and are stopped by PID at the end.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

PEERS = Path(__file__).resolve().parents[2] / ".peers"
MODEL = PEERS / "smollm2"
GGUF = MODEL / "SmolLM2-135M-Instruct.Q4_1.gguf"
START_SECONDS = 600.0
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}


class RunningEngine(NamedTuple):
    """A server process, and the URL that it answers at."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as reply:
            return str(reply.read().decode())


class Engines:
    """The engines of one test session. Starts each at most once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, RunningEngine] = {}
        self._logs: list[IO[bytes]] = []

    def start(self, name: str, words: list[str], port: int, environment: dict[str, str]) -> None:
        log = self._folder / f"{name}.log"
        output = log.open("wb")
        self._logs.append(output)
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._started[name] = RunningEngine(process, f"http://127.0.0.1:{port}", log)

    def ready(self, name: str) -> RunningEngine:
        """Wait until the engine answers its health check."""
        engine = self._started[name]
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if engine.process.poll() is not None:
                break
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{engine.url}/health", timeout=5).close()
                return engine
            time.sleep(0.2)
        raise RuntimeError(f"{name} did not start: {engine.log.read_text(errors='replace')[-3_000:]}")

    def stop(self) -> None:
        for engine in self._started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.process.pid, signal.SIGKILL)
            engine.process.wait()
            assert engine.process.stdin is not None
            engine.process.stdin.close()
        for log in self._logs:
            log.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    if not (MODEL / "complete").exists():
        pytest.skip("[probed] this machine has no inference engines (make engines)")
    found = Engines(tmp_path_factory.mktemp("engines"))
    try:
        if (PEERS / "venv-vllm" / "complete").exists():
            port = free_port()
            found.start("vllm", vllm_command(port), port, VLLM_ENVIRONMENT)
        port = free_port()
        found.start("llamacpp", llamacpp_command(port), port, {})
        yield found
    finally:
        found.stop()


def vllm_command(port: int, *more: str) -> list[str]:
    program = str(PEERS / "venv-vllm" / "bin" / "vllm")
    options: dict[str, Any] = {
        "--host": "127.0.0.1",
        "--port": port,
        "--served-model-name": "smollm2",
        "--max-model-len": 2048,
        "--max-num-seqs": 16,
        "--dtype": "float32",
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [program, "serve", str(MODEL / "hf"), *words, "--enforce-eager", "--enable-scale-out", *more]


def llamacpp_command(port: int) -> list[str]:
    program = str(PEERS / "venv-llamacpp" / "bin" / "python")
    return [program, str(Path(__file__).parent / "llamacpp_server.py"), str(GGUF), str(port), "4", "2048"]


@pytest.fixture
def vllm(engines: Engines) -> RunningEngine:
    if not (PEERS / "venv-vllm" / "complete").exists():
        pytest.skip("[probed] vLLM is not installed: its CPU build needs a processor with AVX2 (make engines)")
    return engines.ready("vllm")


@pytest.fixture
def llamacpp(engines: Engines) -> RunningEngine:
    return engines.ready("llamacpp")
