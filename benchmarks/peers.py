"""Runs other systems for comparison, each in its own environment below `.peers/` (`make peers`).

Promises:
- nothing of a peer is imported into our process;
- a peer that is not there, fails or takes too long gives a note and no figure: never a guess;
- a peer's program and everything it started is gone when we return, also when we are cancelled.
"""

import asyncio
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import orjson

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
VERIFIERS = "verifiers 0.4.0"
_TAIL = 4_000


class PeerFigure(NamedTuple):
    """What a peer measured, or why there is nothing."""

    figure: float | None
    note: str = ""
    runs: tuple[float, ...] = ()


def peers_folder() -> Path:
    """`ROOKERY_PEERS`, or `.peers` of the checkout."""
    return Path(os.environ.get("ROOKERY_PEERS") or ROOT / ".peers")


async def verifiers_cpu_ms(
    url: str, *, case: str = "single", n: int, repeat: int, concurrency: int, timeout: float
) -> PeerFigure:
    """CPU-ms for one rollout of verifiers driven in-process: the median of `repeat` times `n` rollouts."""
    args = {"--case": case, "--url": url, "--n": n, "--repeat": repeat, "--concurrency": concurrency}
    words = [str(word) for pair in args.items() for word in pair]
    answer = await run_peer("verifiers", "verifiers_overhead.py", words, timeout=timeout)
    if isinstance(answer, str):
        return PeerFigure(None, answer)
    if answer["peer"] != VERIFIERS:
        return PeerFigure(None, f"the peer is {answer['peer']}, not {VERIFIERS}: `make peers` makes it again")
    runs = tuple(float(run["cpu_ms"]) for run in answer["runs"])
    return PeerFigure(median(runs), runs=runs)


async def run_peer(peer: str, script: str, args: list[str], *, timeout: float) -> dict[str, Any] | str:
    """Run `benchmarks/peer_scripts/SCRIPT` in the peer's environment.

    Returns the JSON object on the last line of its output, or a message that says why there is none.
    """
    python = peers_folder() / f"venv-{peer}" / "bin" / "python"
    program = ROOT / "benchmarks" / "peer_scripts" / script
    if not python.exists():
        return f"the peer {peer} is missing: `make peers` in a checkout makes it"
    if not program.exists():
        return f"the peer {peer} needs a checkout: {script} is not part of an installation"
    with tempfile.TemporaryDirectory(prefix="rookery-peer-") as home, tempfile.TemporaryFile() as output:
        # Its home is empty: neither settings of the user nor leftovers change what is measured.
        env = {"HOME": home, "PATH": f"{python.parent}:{os.defpath}", "TMPDIR": home, "LC_ALL": "C.UTF-8"}
        process = await asyncio.create_subprocess_exec(
            python,
            program,
            *args,
            env=env,
            cwd=home,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout):
                await process.wait()
        except TimeoutError:
            return f"the peer {peer} did not end within {timeout:g} s"
        finally:
            await _end(process)
        return _last_object(output.fileno(), peer, process.returncode)


async def _end(process: asyncio.subprocess.Process) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the usual case: it ended, with everything it started
    finally:
        await process.wait()


def _last_object(descriptor: int, peer: str, status: int | None) -> dict[str, Any] | str:
    size = os.lseek(descriptor, 0, os.SEEK_END)
    tail = os.pread(descriptor, _TAIL, max(0, size - _TAIL)).decode(errors="replace").strip()
    last = tail.rsplit("\n", 1)[-1]
    if status == 0:
        with suppress(orjson.JSONDecodeError):
            answer = orjson.loads(last)
            if isinstance(answer, dict):
                return answer
    return f"the peer {peer} failed with status {status}: {last[:500]}"
