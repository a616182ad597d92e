"""`rookery serve` as a process, with the client of `examples/`."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import SECONDS, environ, rookery, start_command, wait_for_end

ROOT = Path(__file__).parents[2]
SERVE = ("serve", "arithmetic", "--protocol", "nemo-gym")


@pytest.mark.long
async def test_serve_runs_the_rows_of_its_package_and_ends_on_sigterm(tmp_path: Path) -> None:
    written = await rookery(*SERVE, "-n", "2", "--package", "gym", cwd=tmp_path)
    assert (written.code, written.out.split()) == (0, ["gym/rookery.yaml", "gym/tasks.jsonl"])
    async with start_command(*SERVE, "--policy", "embedded", "--port", "0", cwd=tmp_path) as process:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), SECONDS)).decode()
        url = line.rpartition(" ")[2].strip()
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ROOT / "examples" / "nemo_gym_client.py"), "gym/tasks.jsonl", "--url", url),
            cwd=tmp_path,
            env=environ(),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(client.communicate(), SECONDS)
        assert client.returncode == 0
        assert out.decode().count("reward ") == 2
        assert "mean/reward" in out.decode()
        process.send_signal(signal.SIGTERM)
        assert (await wait_for_end(process)).code == 0
    shown = await rookery("ls", cwd=tmp_path)
    assert shown.code == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("serve", "arithmetic", "--protocol", "dance"), "--protocol"),
        (("serve", "arithmetic", "--speak", "nemo-gym"), "--policy"),
        (("serve", "--protocol", "verifiers"), "ENV"),
        (SERVE, "--policy"),
    ],
)
async def test_invalid_settings_are_refused(arguments: tuple[str, ...], named: str, tmp_path: Path) -> None:
    (await rookery(*arguments, cwd=tmp_path)).assert_refused(named)
