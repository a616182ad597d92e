"""Tests of running peers, with small programs in their place."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from benchmarks import peers


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one peer `made`, which runs with this Python."""
    python = tmp_path / ".peers" / "venv-made" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "benchmarks" / "peer_scripts").mkdir(parents=True)
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.delenv("ROOKERY_PEERS", raising=False)
    return tmp_path


def script(checkout: Path, text: str) -> None:
    (checkout / "benchmarks" / "peer_scripts" / "made.py").write_text(text)


async def test_last_output_line_is_the_result(checkout: Path) -> None:
    script(checkout, "import sys, json\nprint('noise')\nprint(json.dumps({'args': sys.argv[1:]}))")
    assert await peers.run_peer("made", "made.py", ["--n", "3"], timeout=60) == {"args": ["--n", "3"]}


async def test_missing_peer_yields_a_note(checkout: Path) -> None:
    answer = await peers.run_peer("other", "made.py", [], timeout=60)
    assert isinstance(answer, str)
    assert "make peers" in answer


async def test_missing_peer_script_yields_a_note(checkout: Path) -> None:
    answer = await peers.run_peer("made", "made.py", [], timeout=60)
    assert isinstance(answer, str)
    assert "peer_scripts" in answer


@pytest.mark.parametrize("text", ["raise SystemExit('broken')", "print('no object')", "print('{half')"])
async def test_failing_peer_yields_a_note(checkout: Path, text: str) -> None:
    script(checkout, text)
    answer = await peers.run_peer("made", "made.py", [], timeout=60)
    assert isinstance(answer, str)
    assert "made" in answer
    assert "status" in answer


async def test_slow_peer_yields_a_note(checkout: Path) -> None:
    script(checkout, "event = __import__('threading').Event().wait()")
    answer = await peers.run_peer("made", "made.py", [], timeout=0.2)
    assert isinstance(answer, str)
    assert "0.2 s" in answer


async def test_cancelled_peer_is_killed_with_its_descendants(checkout: Path) -> None:
    fifo = checkout / "fifo"
    os.mkfifo(fifo)
    # Only the grandchild holds the FIFO open, so the reader sees its end when the grandchild is gone.
    grandchild = "import sys, threading; held = open(sys.argv[1], 'wb'); threading.Event().wait()"
    script(
        checkout, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {grandchild!r}, sys.argv[1]])"
    )
    running = asyncio.create_task(peers.run_peer("made", "made.py", [str(fifo)], timeout=60))
    async with asyncio.timeout(60):
        with await asyncio.to_thread(open, fifo, "rb") as pipe:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert await asyncio.to_thread(pipe.read) == b""


async def test_other_version_of_verifiers_is_refused(checkout: Path) -> None:
    (checkout / ".peers" / "venv-made").rename(checkout / ".peers" / "venv-verifiers")
    target = checkout / "benchmarks" / "peer_scripts" / "verifiers_overhead.py"
    target.write_text('print(\'{"peer": "verifiers 9", "runs": [{"cpu_ms": 1}]}\')')
    peer = await peers.verifiers_cpu_ms("http://x/v1", n=1, repeat=1, concurrency=1, timeout=60)
    assert peer.figure is None
    assert "verifiers 9" in peer.note
