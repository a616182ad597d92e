"""`rookery exec`: output, exit codes, consent and cleanup of one command in a sandbox."""

import asyncio
import json
import os
import re
import select
import shlex
import signal
import subprocess
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.cli.exec import _HELP, get_exit_code
from rookery.cli.options import Size, format_size
from rookery.cli.sandbox_command import TerminalFilter
from rookery.core import ExecResult, ExecStatus
from rookery.sandboxes.reaper import SCRATCH_PREFIX
from tests.cli.helpers import COMMAND, CommandResult, environ, rookery, start_command, wait_for_end
from tests.cli.sandbox_kit import cgroups_of, local_sandboxes, own_folder, run_cli, run_cli_as, without_isolation
from tests.cli.test_cli_terminal import Terminal

__all__ = ["local_sandboxes", "own_folder", "without_isolation"]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directory for temporary files of commands; it must be empty after the test."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def result(done: CommandResult) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    return found


# ---- output and exit codes


@pytest.mark.usefixtures("local_sandboxes")
def test_output_and_exit_code_are_those_of_the_command(tmp_path: Path) -> None:
    done = run_cli("exec", "--", "sh", "-c", "echo out; echo err >&2; exit 7", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (7, "out\n", "err\n")


@pytest.mark.usefixtures("local_sandboxes")
def test_command_runs_in_an_isolated_sandbox(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    done = run_cli("exec", "--", "sh", "-c", f"pwd; cat {secret}; ls /sys /root", cwd=tmp_path)
    assert done.out.startswith("/work\n")
    assert "mine" not in done.out


@pytest.mark.usefixtures("local_sandboxes")
def test_input_and_output_are_streamed_while_the_command_runs(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "exec", "--", "cat"],
        cwd=tmp_path,
        env=environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for word in (b"one\n", b"two\n"):  # each line is echoed before the next one is sent
            process.stdin.write(word)
            process.stdin.flush()
            assert process.stdout.readline() == word
        process.stdin.close()
        assert process.stdout.read() == b""
        assert process.wait() == 0


@pytest.mark.usefixtures("local_sandboxes")
def test_bytes_pass_unchanged(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    done = subprocess.run(
        [*COMMAND, "exec", "--", "cat"], input=data, capture_output=True, env=environ(), check=True
    )
    assert done.stdout == data


@pytest.mark.usefixtures("local_sandboxes")
def test_command_that_does_not_read_its_input_ends(tmp_path: Path) -> None:
    done = run_cli("exec", "--", "true", cwd=tmp_path, stdin=b"x" * (4 << 20))
    assert (done.code, done.out, done.err) == (0, "", "")


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
def test_closed_standard_streams_do_not_affect_the_command(tmp_path: Path) -> None:
    for shut in ("0<&-", "1>&-", "2>&-"):
        line = [*("sh", "-c", f'exec "$@" {shut}', "sh"), *COMMAND, "exec", "--", "sh", "-c", "cat; exit 3"]
        done = subprocess.run(line, env=environ(), stdin=subprocess.DEVNULL, capture_output=True, check=False)
        assert done.returncode == 3, (shut, done.stderr)


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
@pytest.mark.parametrize(
    ("args", "code", "named"),
    [
        (["--wall", "0.3", "--", "sleep", "60"], 124, "0.3"),
        (["--", "sh", "-c", "kill -TERM $$"], 128 + 15, ""),
        (["--", "no-such-program"], 127, "No such file"),
        (["--", "/etc"], 126, ""),
        (["--disk", "1M", "--", "head", "-c", "9000000", "/dev/zero"], 0, ""),
        (["--disk", "1M", "--", "sh", "-c", "head -c 9000000 /dev/zero > f"], 1, "error: "),
        (["--output", "1K", "--", "yes"], 1, " 4194304 "),
        (["--", "sh", "-c", "sleep 600 & exit 5"], 5, ""),
        (["sh", "-c", "exit 4"], 4, ""),
    ],
)
def test_exit_code_says_how_the_command_ended(args: list[str], code: int, named: str, tmp_path: Path) -> None:
    done = run_cli("exec", *args, cwd=tmp_path)
    assert done.code == code, done.err
    assert named in done.err


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
def test_command_over_its_memory_limit_exits_with_137(tmp_path: Path) -> None:
    from rookery.sandbox_runtime import cgroups

    manager = cgroups.find_cgroups()
    manager.close()
    if cgroups.MEMORY in manager.missing_controllers:
        pytest.skip("[probed] no memory control group is ours")
    hungry = ("--memory", "64M", "--", "python3", "-c", "x = bytearray(500 << 20)")
    done = run_cli("exec", *hungry, cwd=tmp_path)
    assert done.code == 137
    assert "memory" in done.err
    assert result(run_cli("exec", "--json", *hungry, cwd=tmp_path))["status"] == "memory_limit"


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (ExecResult(status="exited", exit_code=0), 0),
        (ExecResult(status="exited", exit_code=255), 255),
        (ExecResult(status="signaled", signal=11), 139),
        (ExecResult(status="time_limit", signal=9), 124),
        (ExecResult(status="memory_limit", exit_code=1), 137),
        (ExecResult(status="output_limit", signal=9), 1),
        (ExecResult(status="process_limit", exit_code=2), 2),
        (ExecResult(status="disk_limit", signal=25), 1),
        (ExecResult(status="lost"), 125),
    ],
)
def test_every_status_has_its_exit_code(ending: ExecResult, code: int) -> None:
    assert get_exit_code(ending) == code


def test_all_statuses_are_tested() -> None:
    from typing import get_args

    for status in get_args(ExecStatus):
        assert 0 <= get_exit_code(ExecResult(status=status)) < 256


# ---- --json


@pytest.mark.usefixtures("local_sandboxes")
def test_exec_json_is_the_last_line_and_complete(tmp_path: Path) -> None:
    done = run_cli("exec", "--json", "--", "sh", "-c", "echo out; echo err >&2; exit 7", cwd=tmp_path)
    assert done.code == 7
    assert done.err == ""
    found = result(done)
    usage = found.pop("usage")
    assert set(usage) == {"wall", "cpu", "peak_memory"}
    assert found == {
        "status": "exited",
        "exit_code": 7,
        "signal": None,
        "stdout": "out\n",
        "stderr": "err\n",
        "dropped": {"stdout": 0, "stderr": 0},
        "detail": "",
        "provider": "local",
        "isolated": True,
    }


@pytest.mark.usefixtures("local_sandboxes")
def test_json_contains_head_and_tail_and_counts_dropped_bytes(tmp_path: Path) -> None:
    done = run_cli("exec", "--json", "--output", "10", "--", "sh", "-c", "printf 0123456789abcdef", cwd=tmp_path)
    found = result(done)
    assert (found["stdout"], found["dropped"]) == ("01234bcdef", {"stdout": 6, "stderr": 0})


@pytest.mark.usefixtures("local_sandboxes")
def test_json_result_is_one_line_for_any_output(tmp_path: Path) -> None:
    text = "a\nb\r\u2028c\u0085\x1b[2J"
    done = run_cli("exec", "--json", "--", "cat", cwd=tmp_path, stdin=text.encode() + b"\xff\x00")
    assert len(done.out.splitlines()) == 1
    assert result(done)["stdout"] == f"{text}\ufffd\0"


# ---- consent


@pytest.mark.usefixtures("local_sandboxes")
def test_default_provider_is_the_best_that_isolates(tmp_path: Path) -> None:
    assert result(run_cli("exec", "--json", "--", "true", cwd=tmp_path))["provider"] == "local"


def test_naming_a_provider_without_isolation_is_consent_and_warns_once(tmp_path: Path) -> None:
    done = run_cli("exec", "--provider", "subprocess", "--", "sh", "-c", "echo hi; exit 3", cwd=tmp_path)
    assert (done.code, done.out) == (3, "hi\n")
    assert done.err.startswith("warning: subprocess ")
    assert done.err.count("\n") == 1
    by_variable = run_cli("exec", "--json", "--", "true", cwd=tmp_path, ROOKERY_SANDBOX="subprocess")
    assert (result(by_variable)["provider"], result(by_variable)["isolated"]) == ("subprocess", False)


@pytest.mark.long
def test_exec_without_isolation_is_refused_with_the_next_step(
    tmp_path: Path, without_isolation: tuple[str, ...]
) -> None:
    done = run_cli("exec", "--", "true", cwd=tmp_path, before=without_isolation)
    done.assert_refused("max_user_namespaces", "rookery doctor", "--unsafe", code=125)
    done = run_cli("exec", "--json", "--", "true", cwd=tmp_path, before=without_isolation)
    assert done.code == 125
    assert (result(done)["status"], result(done)["exit_code"]) == ("error", None)
    assert "--unsafe" in result(done)["detail"]


@pytest.mark.long
def test_unsafe_runs_without_isolation_with_a_warning(tmp_path: Path, without_isolation: tuple[str, ...]) -> None:
    done = run_cli("exec", "--unsafe", "--", "sh", "-c", "exit 6", cwd=tmp_path, before=without_isolation)
    assert done.code == 6
    assert done.err.startswith("warning: subprocess ")
    done = run_cli("exec", "--", "sh", "-c", "exit 6", cwd=tmp_path, before=without_isolation, ROOKERY_UNSAFE="1")
    assert done.code == 6


@pytest.mark.usefixtures("local_sandboxes")
def test_unsafe_still_isolates_if_possible(tmp_path: Path) -> None:
    done = run_cli("exec", "--unsafe", "--json", "--", "true", cwd=tmp_path)
    assert (result(done)["provider"], done.err) == ("local", "")


# ---- invalid input


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "ARGV"),
        (["--"], "ARGV"),
        (["--memory", "lots", "--", "true"], "'lots'"),
        (["--memory", "-1", "--", "true"], "'-1'"),
        (["--memory", "1K", "--", "true"], "--memory ... 1M"),
        (["--memory", "9999999T", "--", "true"], "--memory"),
        (["--disk", "nan", "--", "true"], "'nan'"),
        (["--output", "0", "--", "true"], "--output"),
        (["--pids", "1", "--", "true"], "--pids ... 2"),
        (["--pids", "2.5", "--", "true"], "'2.5'"),
        (["--cpus", "0", "--", "true"], "--cpus ... 0.01"),
        (["--cpus", "nan", "--", "true"], "--cpus"),
        (["--wall", "0", "--", "true"], "--wall ... 0"),
        (["--wall", "inf", "--", "true"], "--wall ... 0"),
        (["--network", "some", "--", "true"], "none"),
        (["--provider", "nosuch", "--", "true"], "'nosuch' ... docker, kubernetes, local"),
        (["--provider", "subprocess", "--cpus", "1", "--", "true"], "subprocess ... CPUs"),
        (["--nosuch", "--", "true"], "--nosuch"),
    ],
)
def test_invalid_input_is_one_sentence_and_exit_code_125(args: list[str], named: str, tmp_path: Path) -> None:
    done = run_cli("exec", *args, cwd=tmp_path)
    assert (done.code, done.out) == (125, "")
    lines = [line for line in done.err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert all(name in lines[0] for name in named.split(" ... "))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512K", 512 << 10),
        ("128M", 128 << 20),
        ("1G", 1 << 30),
        ("2T", 2 << 40),
        ("1.5k", 1536),
        ("64MiB", 64 << 20),
        ("64MB", 64 << 20),
        (" 7 ", 7),
        ("0.5M", 1 << 19),
    ],
)
def test_size_is_parsed(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size
    assert Size().convert(format_size(size), None, None) == size


@pytest.mark.parametrize("text", ["", "M", "1X", "1e9", "0x10", "1 2", "1KK", "--", "٣M", "1" * 40])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Size().convert(text, None, None)


async def test_exec_help_names_the_exit_codes(tmp_path: Path) -> None:
    done = await rookery("exec", "--help", cwd=tmp_path)
    assert done.code == 0
    for word in ("124", "137", "125", "--provider", "--image", "--unsafe", "--json"):
        assert word in done.out


# ---- interrupts and cleanup


async def _runs(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        assert await process.stdout.readline() == b"started\n"


TRAPPED = ("exec", "--", "sh", "-c", "trap '' INT TERM HUP; setsid sleep 600 & echo started; sleep 600")


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_interrupt_ends_the_command_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    async with start_command(*TRAPPED, cwd=tmp_path) as process:
        await _runs(process)
        process.send_signal(number)
        done = await wait_for_end(process)
    assert done.code == 128 + number, done.err
    assert "Traceback" not in done.err
    assert cgroups_of(process.pid) == []


@pytest.mark.usefixtures("local_sandboxes")
async def test_closed_output_pipe_ends_the_command(tmp_path: Path) -> None:
    async with start_command("exec", "--", "yes", cwd=tmp_path) as process:
        assert process.stdout is not None
        await process.stdout.readline()
        process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            assert await process.wait() == 128 + signal.SIGPIPE
    assert cgroups_of(process.pid) == []


@pytest.mark.usefixtures("local_sandboxes")
async def test_interrupt_works_while_the_output_is_not_read(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "exec", "--output", "1G", "--", "yes"], env=environ(), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        select.select([process.stdout], [], [], 60)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
async def test_reap_removes_leftovers_of_a_killed_exec(tmp_path: Path, scratch: Path) -> None:
    async with start_command(*TRAPPED, cwd=tmp_path) as process:
        await _runs(process)
        (left,) = scratch.glob(f"{SCRATCH_PREFIX}*")
        done = run_cli("reap", "--json", cwd=tmp_path)
        assert json.loads(done.out)["ended"] == 0, "it touched a live command's sandbox"
        assert left.exists()
        process.kill()
        await process.wait()
    done = run_cli("reap", cwd=tmp_path)
    assert done.code == 0, done.err
    assert not left.exists()
    assert cgroups_of(process.pid) == []


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
async def test_next_exec_removes_leftovers_of_a_killed_one(tmp_path: Path, scratch: Path) -> None:
    async with start_command(*TRAPPED, cwd=tmp_path) as process:
        await _runs(process)
        process.kill()
        await process.wait()
    assert list(scratch.glob(f"{SCRATCH_PREFIX}*"))
    assert run_cli("exec", "--", "true", cwd=tmp_path).code == 0
    assert list(scratch.iterdir()) == []
    assert cgroups_of(process.pid) == []


# ---- unprivileged users


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
def test_unprivileged_user_can_run_exec(own_folder: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, user = own_folder
    monkeypatch.setenv("TMPDIR", str(folder))
    done = run_cli_as(user, "exec", "--json", "--", "sh", "-c", "id -u; cat; exit 9", cwd=folder, stdin=b"in")
    assert done.code == 9, done.err
    assert (result(done)["stdout"], result(done)["isolated"]) == ("1000\nin", True)
    assert run_cli_as(user, "exec", "--wall", "0.3", "--", "sleep", "60", cwd=folder).code == 124
    assert list(folder.iterdir()) == []


# ---- uploads


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
def test_uploads_are_in_the_working_directory_under_their_names(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("print(open('data/a').read())")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("from a file")
    done = run_cli("exec", "--upload", "main.py", "--upload", "data/", "--", "python3", "main.py", cwd=tmp_path)
    assert (done.code, done.out, done.err) == (0, "from a file\n", "")
    done = run_cli("exec", "--upload", "main.py:deep/er.py", "--", "cat", "deep/er.py", cwd=tmp_path)
    assert done.out == "print(open('data/a').read())"
    (tmp_path / "link.py").symlink_to("main.py")
    assert run_cli("exec", "--upload", "link.py", "--", "cat", "link.py", cwd=tmp_path).code == 0


@pytest.mark.usefixtures("local_sandboxes")
def test_missing_upload_is_refused_before_the_command_runs(tmp_path: Path) -> None:
    done = run_cli("exec", "--upload", "nowhere.py", "--", "echo", "ran", cwd=tmp_path)
    assert (done.code, done.out) == (125, "")
    assert "nowhere.py" in done.err
    plain = result(run_cli("exec", "--json", "--upload", "nowhere.py", "--", "true", cwd=tmp_path))
    assert plain["status"] == "error"


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
def test_documented_exec_examples_work(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("print('main')")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho $1")
    program.chmod(0o755)
    docs = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    examples = {
        line.strip("`. ")
        for text in (_HELP, docs)
        for line in re.findall(r"(?:^|`)\s*(rookery exec (?:.* )?-- [^`\n]+)", text, re.MULTILINE)
    }
    assert len(examples) >= 3
    for example in examples:
        done = run_cli(*shlex.split(example)[1:], cwd=tmp_path)
        assert done.code == 0, (example, done.err)


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
@pytest.mark.parametrize("name", ["no-such-program", "./no-such-program"])
def test_missing_program_is_reported(name: str, tmp_path: Path) -> None:
    done = run_cli("exec", "--", name, cwd=tmp_path)
    assert done.code == 127
    assert repr(name) in done.err
    assert repr(name) in result(run_cli("exec", "--json", "--", name, cwd=tmp_path))["detail"]


# ---- terminals

PAINT = ("sh", "-c", r"printf '\033[2Jred\r\nhidden\rshown \302\233 \377 \303\251\007\n'")


@pytest.mark.usefixtures("local_sandboxes")
async def test_program_cannot_control_the_terminal(tmp_path: Path) -> None:
    terminal = Terminal("exec", "--", *PAINT, cwd=tmp_path)
    assert await terminal.end() == 0
    assert terminal.output.replace("\r\n", "\n") == "\\x1b[2Jred\nhidden\\rshown \\x9b \\xff é\\x07\n"


@pytest.mark.usefixtures("local_sandboxes")
async def test_raw_output_passes_control_characters_to_the_terminal(tmp_path: Path) -> None:
    terminal = Terminal("exec", "--raw-output", "--", *PAINT, cwd=tmp_path)
    assert await terminal.end() == 0
    assert terminal.output.startswith("\x1b[2Jred")


@given(st.lists(st.binary(max_size=6), max_size=8))
def test_filtered_output_does_not_depend_on_chunk_boundaries(parts: list[bytes]) -> None:
    filtered, whole = TerminalFilter(), TerminalFilter()
    shown = b"".join(filtered.feed(part) for part in parts) + filtered.feed(b"", final=True)
    assert shown == whole.feed(b"".join(parts), final=True)
    controls = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    assert all(char in "\n\t" or unicodedata.category(char) not in controls for char in shown.decode())
