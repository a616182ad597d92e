"""Run the commands of the README and the tutorials in the order in which a reader pastes them.

A page is read from top to bottom: a Python or bash block that names a file is saved, the lines after `$ cat FILE`
are saved as that file, and every other command is executed in an empty directory. Commands that install something
are left out. Pages that need an installed agent or PyTorch are covered by the tests that `LEFT_OUT` names.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.helpers import environ
from tests.docs.test_docs import ROOT
from tests.servers import free_port

TUTORIALS = ROOT / "docs" / "tutorials"
LEFT_OUT = {
    "agent.md": "tests/environments/agent/test_real_agents.py",
    "train-the-embedded-policy.md": "tests/training/test_docs.py",
}
PAGES = [ROOT / "README.md", *sorted(page for page in TUTORIALS.glob("*.md") if page.name not in LEFT_OUT)]
EXIT_CODES = {
    # One of the tasks is invalid, as the page explains.
    "rookery run arithmetic --tasks mine.jsonl --policy embedded -k 4": 3,
}
INSTALLATION = ("pip install", ". .venv/bin/activate")
SECONDS = 300


PORT = free_port()


def read_steps(page: Path) -> Iterator[tuple[str, str]]:
    """Yield what a reader does: (file name, content) for files to save, ("$", command) for commands."""
    text = page.read_text()
    blocks = re.finditer(r"^```(python|bash|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for block in blocks:
        language, body = block[1], block[2]
        if language == "console":
            yield from read_console(body)
            continue
        named = re.match(r"# (\w+\.py)\n", body)
        if match := named or re.search(r"Save this as `([\w./-]+)`:\n\n$", text[: block.start()]):
            yield match[1], body


def read_console(body: str) -> Iterator[tuple[str, str]]:
    for command, output in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE):
        if match := re.fullmatch(r"cat (\S+)", command):
            yield match[1], output
        elif not command.startswith(INSTALLATION):
            yield "$", command.partition("  #")[0].strip()


def adapt(command: str) -> str:
    """Use the installed command instead of a new installation, the embedded policy instead of a server, and one
    training step instead of 15 minutes."""
    command = re.sub(r"^make demo$", "rookery demo", command).replace(".venv/bin/rookery", "rookery")
    command = command.replace("8123", str(PORT)).replace("--minutes 15", "--steps 1 --groups 2 --eval-tasks 4")
    return command.replace("--policy http://localhost:8000", "--policy embedded")


@contextmanager
def serve(command: str, folder: Path, env: dict[str, str]) -> Iterator[None]:
    """Run a server until the page ends."""
    words = shlex.split(command)
    with subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "serving" in process.stdout.readline()
            yield
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_work_in_the_order_of_the_page(page: Path, tmp_path: Path) -> None:
    env = environ(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    ran = 0
    server = None
    try:
        for name, content in read_steps(page):
            if name != "$":
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(content)
                continue
            command = adapt(content)
            if command.startswith("rookery serve-"):
                server = serve(command, tmp_path, env)
                server.__enter__()
                continue
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
            assert done.returncode == EXIT_CODES.get(content, 0), (command, done.stdout, done.stderr)
            ran += 1
    finally:
        if server is not None:
            server.__exit__(None, None, None)
    assert ran > 2


def test_pages_that_are_left_out_name_an_existing_test() -> None:
    assert all((ROOT / test).is_file() and (TUTORIALS / page).is_file() for page, test in LEFT_OUT.items())


@pytest.mark.long
def test_the_first_tutorial_prints_what_the_demo_prints(tmp_path: Path) -> None:
    """The seed of the demo is fixed, so everything but times, speeds and names of runs is the same."""
    page = (TUTORIALS / "first-run.md").read_text()
    printed = re.search(r"^\$ make demo\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert printed
    command = [sys.executable, "-m", "rookery.cli", "demo"]
    done = subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, check=True)
    variable = re.compile(r"^(run |  (tokens|rollouts)/s|loading|\d+/\d+|.* at once)")
    shown = [line for line in printed[1].splitlines() if line and not variable.match(line)]
    real = (done.stdout + done.stderr).splitlines()
    assert [line for line in shown if line not in real] == []
