"""Run other systems for comparison, each in its own virtual environment below `.peers/` (`make peers`).

Guarantees:
- no code of a peer is imported into our process;
- a peer that is missing, fails or takes too long yields a note instead of a figure;
- the program of a peer and all its descendants are killed before we return, also after a cancellation.
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
"""Root of the checkout."""
VERIFIERS = "verifiers 0.4.0"
_TAIL = 4_000


class PeerFigure(NamedTuple):
    """The figure that a peer measured, or a note that says why there is none."""

    figure: float | None
    note: str = ""
    runs: tuple[float, ...] = ()


def peers_folder() -> Path:
    """Return the directory of installed peers: `ROOKERY_PEERS`, or `.peers` in the checkout."""
    return Path(os.environ.get("ROOKERY_PEERS") or ROOT / ".peers")


async def verifiers_cpu_ms(
    url: str, *, case: str = "single", n: int, repeat: int, concurrency: int, timeout: float
) -> PeerFigure:
    """Measure CPU-ms per rollout of verifiers, driven in-process: the median of `repeat` runs of `n` rollouts."""
    args = {"--case": case, "--url": url, "--n": n, "--repeat": repeat, "--concurrency": concurrency}
    options = [str(word) for pair in args.items() for word in pair]
    answer = await run_peer("verifiers", "verifiers_overhead.py", options, timeout=timeout)
    if isinstance(answer, str):
        return PeerFigure(None, answer)
    if answer["peer"] != VERIFIERS:
        return PeerFigure(None, f"the installed peer is {answer['peer']}, not {VERIFIERS}: run `make peers` again")
    runs = tuple(float(run["cpu_ms"]) for run in answer["runs"])
    return PeerFigure(median(runs), runs=runs)


def peer_command(peer: str, script: str) -> list[str] | str:
    """Return the command that runs a file of `peer_scripts/` in the environment of a peer, or why it cannot."""
    python = peers_folder() / f"venv-{peer}" / "bin" / "python"
    program = ROOT / "benchmarks" / "peer_scripts" / script
    if not python.exists():
        return f"the peer {peer} is not installed: run `make peers` in a checkout"
    if not program.exists():
        return f"the peer {peer} needs a checkout: {program} does not exist"
    return [str(python), str(program)]


def peer_environment(python: str, home: str) -> dict[str, str]:
    """Return the environment variables of a peer. Its home is empty, so no user setting changes the figures."""
    return {"HOME": home, "PATH": f"{Path(python).parent}:{os.defpath}", "TMPDIR": home, "LC_ALL": "C.UTF-8"}


async def run_peer(peer: str, script: str, args: list[str], *, timeout: float) -> dict[str, Any] | str:
    """Run `benchmarks/peer_scripts/SCRIPT` in the peer's environment.

    Returns the JSON object on the last line of its output, or a message that says why there is none.
    """
    command = peer_command(peer, script)
    if isinstance(command, str):
        return command
    with tempfile.TemporaryDirectory(prefix="rookery-peer-") as home, tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            *args,
            env=peer_environment(command[0], home),
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
            return f"the peer {peer} did not finish within {timeout:g} s"
        finally:
            await _kill_group(process)
        return _last_object(output.fileno(), peer, process.returncode)


async def _kill_group(process: asyncio.subprocess.Process) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the usual case: all of its processes have ended
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
