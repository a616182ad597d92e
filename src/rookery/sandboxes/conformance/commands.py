"""Conformance checks of commands and background processes: each tests one behaviour of a sandbox provider."""

# One assertion for one property.
# ruff: noqa: PT018

import asyncio
import hashlib
import os
import signal

from rookery.core import SandboxError, SandboxSpec
from rookery.sandboxes.conformance.tools import (
    SPEC,
    Check,
    find_alive,
    open_sandbox,
    run_daemons,
    sh,
    wait_for_file,
)
from rookery.sandboxes.protocol import Command, Provider


async def exit_codes_are_reported(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        for code in (0, 1, 7, 255):
            result = await sh(sandbox, f"exit {code}")
            assert (result.status, result.exit_code) == ("exited", code), result
            assert result.ok == (code == 0)


async def signals_are_reported(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV):
            result = await sh(sandbox, f"kill -{int(number)} $$")
            assert (result.status, result.signal) == ("signaled", int(number)), result


async def a_missing_program_is_a_result(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        for argv in (("no-such-program",), ("/no/such/program",)):
            result = await sandbox.exec(Command(argv=argv))
            assert (result.status, result.exit_code) == ("exited", 127), result
        assert not (await sandbox.exec(Command(argv=("echo", "a\0b")))).ok


async def stdout_and_stderr_are_separate_and_binary(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        script = "import sys; sys.stdout.buffer.write(bytes(range(256))); sys.stderr.buffer.write(b'\\xff\\0')"
        result = await sandbox.exec(Command(argv=("python3", "-c", script)))
        assert (result.stdout, result.stderr) == (bytes(range(256)), b"\xff\0"), result


async def input_arrives_completely(provider: Provider) -> None:
    data = os.urandom(1 << 20) * 8
    async with open_sandbox(provider) as sandbox:
        result = await sandbox.exec(Command(argv=("sha256sum",), stdin=data))
        assert result.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
        assert (await sandbox.exec(Command(argv=("true",), stdin=data))).ok
        assert (await sh(sandbox, "cat")).stdout == b""


async def the_environment_is_clean(provider: Provider) -> None:
    os.environ["ROOKERY_CONFORMANCE_SECRET"] = "hunter2"  # noqa: S105
    try:
        async with open_sandbox(
            provider, SandboxSpec(untrusted_ok=True, env={"GIVEN": "spec", "OTHER": "spec"})
        ) as sandbox:
            result = await sandbox.exec(Command(argv=("env",), env={"OTHER": "command"}))
            lines = result.stdout.decode().splitlines()
            assert "GIVEN=spec" in lines and "OTHER=command" in lines, lines
            assert not [line for line in lines if "SECRET" in line], lines
            parents = await sh(sandbox, "tr '\\0' '\\n' </proc/$PPID/environ; tr '\\0' ' ' </proc/$PPID/cmdline")
            assert b"SECRET" not in parents.stdout
    finally:
        del os.environ["ROOKERY_CONFORMANCE_SECRET"]


async def commands_share_a_working_directory(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox, open_sandbox(provider) as other:
        assert (await sh(sandbox, "mkdir -p sub && echo hi > sub/file && [ -w . ]")).ok
        result = await sandbox.exec(Command(argv=("cat", "file"), cwd="sub"))
        assert result.stdout == b"hi\n", result
        assert not (await sh(other, "[ -e sub ]")).ok
        assert not (await sandbox.exec(Command(argv=("true",), cwd="missing"))).ok


async def a_time_limit_kills_the_whole_tree(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        for wall in (0.5, 2.0, 8.0, 25.0):  # longer limits for slow machines
            result = await run_daemons(sandbox, wall)
            assert result.status == "time_limit", result
            assert result.usage.wall >= wall
            assert await find_alive(sandbox, "pids") == b""
            if (await sh(sandbox, "[ -e ready ]")).ok:
                return
        raise AssertionError("the processes did not start within the longest time limit")


async def a_cancelled_exec_kills_the_whole_tree(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        task = asyncio.create_task(run_daemons(sandbox, 60.0))
        await wait_for_file(sandbox, "ready")
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        assert await find_alive(sandbox, "pids") == b""


async def earlier_commands_survive_the_kill_of_a_later_one(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        process = await sandbox.start(Command(argv=("sh", "-c", "echo $$ > kept; exec sleep 600")))
        assert (await sh(sandbox, "sleep 600 & echo $! > left")).ok
        await wait_for_file(sandbox, "kept")
        assert (await sh(sandbox, "sleep 600", wall=0.2)).status == "time_limit"
        assert await find_alive(sandbox, "kept") != b""
        assert await find_alive(sandbox, "left") != b""
        assert (await process.kill()).status == "signaled"
        assert await find_alive(sandbox, "kept") == b""


async def processor_time_is_limited(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        result = await sandbox.exec(Command(argv=("sh", "-c", "while :; do :; done"), cpu_seconds=1.0))
        assert result.status == "time_limit", result
        assert result.usage.cpu >= 0.5


async def memory_is_limited(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        grow = "x = []\nwhile True: x.append(bytearray(4 << 20))"
        result = await sandbox.exec(Command(argv=("python3", "-c", grow), memory=256 << 20))
        assert not result.ok, result
        assert result.usage.peak_memory < 300 << 20


async def output_is_bounded_and_counted(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        script = "import sys; sys.stdout.write('a' * 10 + 'b' * 50_000 + 'c' * 10)"
        result = await sandbox.exec(Command(argv=("python3", "-c", script), output=1000))
        assert result.ok and len(result.stdout) == 1000, result
        assert result.stdout.startswith(b"a" * 10) and result.stdout.endswith(b"c" * 10)
        assert result.stdout_dropped == 50_020 - 1000


async def endless_output_is_stopped(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        result = await sh(sandbox, "yes", output=1000)
        assert result.status == "output_limit", result
        assert len(result.stdout) == 1000


async def a_process_that_holds_the_pipe_delays_nothing(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        async with asyncio.timeout(20):
            result = await sh(sandbox, "(while :; do echo noise; sleep 0.05; done) & echo $! > pid; echo done")
        assert result.ok and b"done" in result.stdout, result
        assert (await sh(sandbox, "sleep 0.3")).ok
        assert await find_alive(sandbox, "pid") != b"", "the background process was killed by a closed pipe"


async def output_is_streamed_while_the_command_runs(provider: Provider) -> None:
    seen: list[tuple[str, bytes]] = []
    first = asyncio.Event()

    def take(stream: str, data: bytes) -> None:
        seen.append((stream, data))
        first.set()

    async with open_sandbox(provider) as sandbox:
        command = Command(argv=("sh", "-c", "echo one; while [ ! -e go ]; do sleep 0.02; done; echo two >&2"))
        task = asyncio.create_task(sandbox.exec(command, on_output=take))
        async with asyncio.timeout(20):
            await first.wait()
        await sandbox.write("go", b"")
        result = await task
        assert result.ok and seen == [("stdout", b"one\n"), ("stderr", b"two\n")], (result, seen)


async def a_callback_that_raises_ends_the_command(provider: Provider) -> None:
    def take(stream: str, data: bytes) -> None:
        raise LookupError(stream, data)

    async with open_sandbox(provider) as sandbox:
        try:
            await sandbox.exec(Command(argv=("sh", "-c", "echo $$ > pids; echo x; sleep 600")), on_output=take)
        except LookupError:
            pass
        else:
            raise AssertionError("exec() did not raise the exception of its on_output callback")
        assert await find_alive(sandbox, "pids") == b""


async def fifty_commands_run_in_parallel(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        results = await asyncio.gather(*(sh(sandbox, f"echo {n}; exit {n}") for n in range(50)))
        assert [(r.exit_code, r.stdout) for r in results] == [(n, f"{n}\n".encode()) for n in range(50)]


async def a_process_streams_both_ways(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        process = await sandbox.start(Command(argv=("cat",)))
        output = process.output()
        for line in (b"one\n", b"two\n"):
            await process.send(line)
            assert await anext(output) == ("stdout", line)
        try:
            await process.wait(timeout=0.05)
        except TimeoutError:
            pass
        else:
            raise AssertionError("wait() returned although the process has not ended; it must raise TimeoutError")
        await process.send(b"", eof=True)
        assert [chunk async for chunk in output] == []
        result = await process.wait(timeout=10)
        assert result.ok and result.stdout == b"one\ntwo\n", result


async def a_slow_reader_blocks_the_program(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        script = "i=0; while :; do echo $i > count; yes | head -c 65536; i=$((i+1)); done"
        process = await sandbox.start(Command(argv=("sh", "-c", script)))
        output = process.output()
        assert (await anext(output))[1]
        await sh(sandbox, 'last=x; while now=$(cat count); [ "$now" != "$last" ]; do last=$now; sleep 0.3; done')
        assert int(await sandbox.read("count")) < 64
        assert (await process.kill()).status == "signaled"


async def waiting_does_not_require_reading(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        process = await sandbox.start(Command(argv=("sh", "-c", "yes | head -c 3000000"), output=100))
        result = await process.wait(timeout=20)
        assert result.ok and len(result.stdout) + result.stdout_dropped == 3_000_000, result


async def a_prewarmed_python_behaves_like_a_new_one(provider: Provider) -> None:
    script = """import os, sys
print(sys.argv, sorted(os.environ), os.getcwd(), sys.stdin.read(), __name__, sys.flags, sys._getframe().f_back)
sys.exit(len(sys.argv))"""
    async with open_sandbox(provider) as sandbox:
        for last in ("", "raise ValueError('no')", "sys.exit('words')", "os.kill(os.getpid(), 15)"):
            argv = ("python3", "-c", script.replace("sys.exit(len", f"{last}\nsys.exit(len"), "a", "b")
            new, *warm = [
                await sandbox.exec(Command(argv=argv, stdin=b"input", env={"GIVEN": "1"}, warm=warm))
                for warm in (False, True, True, True)
            ]
            for result in warm:
                for one, other in ((result.stdout, new.stdout), (result.stderr, new.stderr)):
                    assert one == other, (one, other)
                assert (result.status, result.exit_code, result.signal) == (new.status, new.exit_code, new.signal)


async def another_user_is_isolated_or_refused(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        try:
            result = await sandbox.exec(Command(argv=("id", "-u"), user="nobody"))
        except SandboxError as error:
            if error.code != "sandbox.refused":
                raise
            return
        assert result.ok and result.stdout != (await sh(sandbox, "id -u")).stdout, result
        kept = await sandbox.start(Command(argv=("sh", "-c", "echo $$; exec sleep 600"), user="nobody"))
        _, pid = await anext(kept.output())
        for what in (f"kill -9 {int(pid)}", f"cat /proc/{int(pid)}/environ", "echo x > /tmp/theirs"):
            made = await sandbox.exec(
                Command(argv=("sh", "-c", "umask 077; echo secret > /tmp/theirs"), user="nobody")
            )
            assert made.ok, made
            assert not (await sh(sandbox, what)).ok, what
        assert (await kept.kill()).signal == signal.SIGKILL


async def closing_is_idempotent_and_final(provider: Provider) -> None:
    sandbox = await provider.create(SPEC, attempt="conformance")
    await sandbox.start(Command(argv=("sleep", "600")))
    await asyncio.gather(sandbox.close(), sandbox.close())
    await sandbox.close()
    for call in (sh(sandbox, "true"), sandbox.read("x"), sandbox.write("x", b"")):
        try:
            await call
        except SandboxError:
            continue
        raise AssertionError(
            "a command, read or write succeeded in a closed sandbox: after close() each must raise SandboxError"
        )


CHECKS: tuple[Check, ...] = (
    exit_codes_are_reported,
    signals_are_reported,
    a_missing_program_is_a_result,
    stdout_and_stderr_are_separate_and_binary,
    input_arrives_completely,
    the_environment_is_clean,
    commands_share_a_working_directory,
    a_time_limit_kills_the_whole_tree,
    a_cancelled_exec_kills_the_whole_tree,
    earlier_commands_survive_the_kill_of_a_later_one,
    processor_time_is_limited,
    memory_is_limited,
    output_is_bounded_and_counted,
    endless_output_is_stopped,
    a_process_that_holds_the_pipe_delays_nothing,
    output_is_streamed_while_the_command_runs,
    a_callback_that_raises_ends_the_command,
    fifty_commands_run_in_parallel,
    a_process_streams_both_ways,
    a_slow_reader_blocks_the_program,
    waiting_does_not_require_reading,
    a_prewarmed_python_behaves_like_a_new_one,
    another_user_is_isolated_or_refused,
    closing_is_idempotent_and_final,
)
