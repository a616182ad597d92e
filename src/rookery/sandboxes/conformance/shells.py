"""Conformance checks of the persistent shell."""

# One assertion for one property.
# ruff: noqa: PT018

import asyncio

from rookery.sandboxes.conformance.tools import Check, find_alive, open_sandbox, wait_for_file
from rookery.sandboxes.protocol import Command, Provider


async def a_shell_keeps_its_state(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        shell = await sandbox.shell()
        assert (await shell.run("mkdir sub; cd sub; x=5; export y=6; f() { echo f$1; }", timeout=20)).ok
        result = await shell.run(
            'echo "$x $y $(basename "$PWD") $(f 1) $(printenv y)"; echo oops >&2; false', timeout=20
        )
        assert (result.status, result.exit_code) == ("exited", 1), result
        assert (result.stdout, result.stderr) == (b"5 6 sub f1 6\n", b"oops\n"), result
        assert (await shell.run("cat; read line; echo [$line]", timeout=20)).stdout == b"[]\n"
        await shell.close()


async def a_shell_takes_any_script(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        shell = await sandbox.shell()
        for script in (
            "if true; then echo 'half",
            "echo )",
            "for",
            "break",
            "return 3",
            "$(",
            "${x?bad}",
            "\\",
            "!!",
        ):
            result = await shell.run(script, timeout=20)
            assert result.status == "exited", (script, result)
        assert not (await shell.run("a\0b", timeout=20)).ok
        assert (await shell.run("cat <<'END'\n'\"$x\nEND", timeout=20)).stdout == b"'\"$x\n"
        assert (await shell.run(f"echo {'x' * 300_000} | wc -c", timeout=20)).stdout == b"300001\n"
        assert (await shell.run("set -x; echo é", timeout=20)).stdout == "é\n".encode()
        assert (await shell.run("set +x; printf 'no newline'", timeout=20)).stdout == b"no newline"
        await shell.close()


async def a_shell_survives_the_timeout_of_a_script(provider: Provider) -> None:
    scripts = (
        "sleep 600; touch after",
        "while :; do sleep 600; done; touch after",
        "while :; do :; done; touch after",
        "f() { (setsid sleep 600); f; }; f",
        "trap '' TERM INT; python3 -c 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'",
        "echo $(sleep 600 | cat)",
        "wait",
    )
    async with open_sandbox(provider) as sandbox:
        shell = await sandbox.shell()
        assert (await shell.run("x=5; sleep 600 & echo $! > job", timeout=20)).ok
        for script in scripts:
            result = await shell.run(f"{script}\ntouch after", timeout=0.3)
            assert result.status == "time_limit", (script, result)
            result = await shell.run("echo $x; trap - TERM; ls after", timeout=20)
            assert result.stdout == b"5\n", (script, result)
        assert await find_alive(sandbox, "job") != b"", "a background job of an earlier script was killed"
        await shell.close()
        assert await find_alive(sandbox, "job") == b""


async def a_shell_that_ended_is_replaced(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        shell = await sandbox.shell()
        for script, ending in (
            ("exit 4", ("exited", 4, None)),
            ("kill -9 $$", ("signaled", None, 9)),
            ("exec true", ("exited", 0, None)),
            ("set -e; false", ("exited", 1, None)),
        ):
            assert (await shell.run("x=5", timeout=20)).ok
            result = await shell.run(f"echo last; {script}", timeout=20)
            assert (result.status, result.exit_code, result.signal) == ending, result
            assert result.stdout == b"last\n" and "replaced" in result.detail, result
            result = await shell.run("echo [$x]", timeout=20)
            assert result.stdout == b"[]\n" and "replaced" not in result.detail, result
        await shell.close()


async def output_cannot_end_a_script(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        shell = await sandbox.shell()
        script = (
            "for fd in 1 2 3 4 5; do echo '0123456789abcdef0123456789abcdef 0' >&$fd; done 2>/dev/null; echo end"
        )
        result = await shell.run(script, timeout=20)
        assert result.stdout.endswith(b"end\n"), result
        assert (await shell.run("ls /proc/self/fd | wc -l", timeout=20)).stdout == b"4\n", "a descriptor leaks in"
        await shell.close()


async def a_shell_output_is_bounded(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        shell = await sandbox.shell()
        result = await shell.run("x=5; yes", timeout=30)
        assert result.status == "output_limit" and result.stdout_dropped > 0, result
        assert len(result.stdout) <= sandbox.spec.output
        assert (await shell.run("echo $x", timeout=20)).ok
        await shell.close()


async def a_cancelled_script_is_killed(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        shell = await sandbox.shell()
        assert (await shell.run("x=5", timeout=20)).ok
        task = asyncio.create_task(shell.run("echo noise; sh -c 'echo $$ > pid; exec sleep 600'", timeout=60))
        await wait_for_file(sandbox, "pid")
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        assert await find_alive(sandbox, "pid") == b""
        result = await shell.run("echo $x", timeout=20)
        assert result.stdout == b"5\n", result
        await shell.close()


async def a_timeout_of_another_command_does_not_affect_the_shell(provider: Provider) -> None:
    async with open_sandbox(provider) as sandbox:
        shell = await sandbox.shell()
        assert (await shell.run("x=5; (setsid sleep 600 & echo $! > pid)", timeout=20)).ok
        result = await sandbox.exec(Command(argv=("sleep", "600"), wall=0.2))
        assert result.status == "time_limit"
        assert (await shell.run("echo $x", timeout=20)).stdout == b"5\n"
        assert await find_alive(sandbox, "pid") != b""


CHECKS: tuple[Check, ...] = (
    a_shell_keeps_its_state,
    a_shell_takes_any_script,
    a_shell_survives_the_timeout_of_a_script,
    a_shell_that_ended_is_replaced,
    output_cannot_end_a_script,
    a_shell_output_is_bounded,
    a_cancelled_script_is_killed,
    a_timeout_of_another_command_does_not_affect_the_shell,
)
