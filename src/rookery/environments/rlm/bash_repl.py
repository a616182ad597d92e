"""The bash REPL of the `rlm` environment: a persistent shell with commands such as `llm`, which calls a sub-model.

Runs in a runner process. The commands are scripts in the sandbox that connect to a server in this process, at the
only address that the sandbox can reach, and authenticate with a secret. The number of connections and the total
size of their requests are limited. Time spent in a command does not count against the time limit of the model's
script. If a script is stopped, its sub-model calls continue, and the next equal call gets their reply.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from rookery.core import RookeryError, SandboxError, TaskError, Truncation, WorkerRecoveryError
from rookery.core.errors import describe
from rookery.environments.rlm.budget import BudgetExhausted, CallFailed
from rookery.environments.rlm.contexts import PlacedContext
from rookery.environments.rlm.functions import ReplFunctions
from rookery.environments.rlm.observations import render_script
from rookery.environments.rlm.options import RlmOptions
from rookery.environments.rlm.python_repl import CellResult
from rookery.environments.text import render
from rookery.sandboxes.protocol import Command, Sandbox, Shell, SupportsModelNetwork

CONNECTIONS: Final = 256
MAX_BODY: Final = 16 << 20
MAX_RESERVED: Final = 64 << 20
"""Maximum bytes of the requests of all running commands together."""
MAX_ARGS: Final = 64
REQUEST_SECONDS: Final = 30.0
"""Time limit, in seconds, for receiving the request of one command."""
END_SECONDS: Final = 20.0
"""Seconds that a cancelled task gets to end."""
# Pure bash, since an image may have nothing else. The request contains the arguments and the input, each with its
# length; the response is a status word and a text. LC_ALL=C makes lengths count bytes.
SCRIPT: Final = """\
#!/bin/bash
LC_ALL=C
input=
for last; do :; done
if [ "$#" -eq 0 ] || [ "$last" = - ] && [ "${{0##*/}}" != budget ]; then
  [ "$#" -eq 0 ] || set -- "${{@:1:$#-1}}"
  input=$(cat; printf x); input=${{input%x}}
fi
at=1
while [ "${{!at}}" = --system ] || [ "${{!at}}" = --max-tokens ]; do at=$((at + 2)); done
if [ "${{0##*/}} ${{!at}}" = "llm --batch" ]; then
  at=$((at + 1))
  input=$(cat -- "${{!at}}" && printf x) || exit 1
  input=${{input%x}}
fi
exec 3<>/dev/tcp/127.0.0.1/{port} || exit 1
{{
  printf '%s %s %d %d\\n' {secret} "${{0##*/}}" $# ${{#input}}
  for one; do printf '%d\\n%s' ${{#one}} "$one"; done
  printf '%s' "$input"
}} >&3
read -r word <&3 || {{ echo "${{0##*/}}: no response" >&2; exit 1; }}
if [ "$word" = ok ]; then cat <&3; else cat <&3 >&2; exit 1; fi
"""


class BashRepl:
    """A persistent shell in a sandbox, and the server in this process for commands such as `llm`."""

    def __init__(self, sandbox: Sandbox, functions: ReplFunctions, options: RlmOptions) -> None:
        self.functions = functions
        self.sandbox = sandbox
        """The sandbox that the shell runs in. The REPL does not close it."""
        self._options = options
        self.secret = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self.requests: set[asyncio.Task[None]] = set()
        self._shell: Shell | None = None
        self._prologue = ""
        self._fault: BaseException | None = None
        """Error of a command that ends the attempt; `run` raises it."""
        self._fault_raised = asyncio.Event()
        self._scripts = 0
        """Number of the model's scripts that have been run."""
        self.reserved_bytes = 0
        self.running_commands = 0
        self._commands_since = 0.0
        self._command_seconds = 0.0

    @classmethod
    async def open(
        cls, sandbox: Sandbox, functions: ReplFunctions, placed: PlacedContext, options: RlmOptions
    ) -> "BashRepl":
        """Install the commands in the sandbox and start the shell. `placed` describes the task's context."""
        repl = cls(sandbox, functions, options)
        try:
            await repl._start(placed)
        except BaseException:
            await repl.close()
            raise
        return repl

    async def _start(self, placed: PlacedContext) -> None:
        if not isinstance(self.sandbox, SupportsModelNetwork) or not self.sandbox.inside_url:
            raise SandboxError(
                f"sandbox {self.sandbox.id} does not support the network 'model': use repl=python",
                cause="sandbox.refused",
            )
        port = int(self.sandbox.inside_url.rpartition(":")[2].rstrip("/"))
        listener = self.sandbox.listener()
        try:
            self._server = await asyncio.start_server(self.on_connection, sock=listener, backlog=1024)
        except BaseException:
            listener.close()
            raise
        script = SCRIPT.format(port=port, secret=self.secret).encode()
        names = [
            "llm",
            "answer",
            "budget",
            *(["rlm"] if self._options.max_depth >= 2 else []),
            *self.functions.tools,
        ]
        for name in names:
            await self.sandbox.write(f".rlm/{name}", script, mode=0o755)
        result = await self.sandbox.exec(Command(argv=("bash", "-c", "pwd"), wall=20.0))
        folder = result.stdout.decode("utf-8", "replace").strip()
        if not result.ok or "'" in folder:
            raise SandboxError(
                f"bash in sandbox {self.sandbox.id} did not report its working directory: {result.detail}"
            )
        context = f" CONTEXT='{folder}/{placed.name}'" if placed.name else ""
        commands = f"'{folder}/.rlm'"
        self._prologue = (
            f'case ":$PATH:" in *:{commands}:*) ;; *) export PATH={commands}:"$PATH"{context};; esac\n'
        )
        self._shell = await self.sandbox.shell()
        ready = await self._shell.run(f"{self._prologue}type llm", timeout=20.0)
        if not ready.ok:
            raise TaskError(f"the sandbox's bash cannot be used: {ready.stderr.decode('utf-8', 'replace')[:300]}")

    async def run(self, code: str) -> CellResult:
        """Run a bash script of the model and return its result; raise errors that end the attempt."""
        assert self._shell is not None
        wall = self._options.cell_seconds
        before = self.command_seconds()
        running = self._shell.run(
            self._prologue + code, timeout=wall, outside=lambda: self.command_seconds() - before
        )
        work = asyncio.ensure_future(running)
        fault = asyncio.ensure_future(self._fault_raised.wait())
        try:
            await asyncio.wait({work, fault}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            fault.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=END_SECONDS)
        if self._fault is not None:
            raise self._fault
        try:
            result = work.result()
        except SandboxError as error:
            if error.code != "sandbox.lost":
                raise
            raise self._unrecoverable(str(error)) from error
        self._scripts += 1
        if result.status == "lost":
            raise self._unrecoverable(result.detail)
        return CellResult(
            text=render_script(result, self._options.max_output),
            status="ok" if result.ok else result.status,
            timed_out=result.status == "time_limit",
            recovered="reset" if result.state_lost else "none",
        )

    def _unrecoverable(self, why: str) -> WorkerRecoveryError:
        """Return the error for a shell that ended and cannot be replaced."""
        error = WorkerRecoveryError(f"no new shell can be started in sandbox {self.sandbox.id}: {why}")
        error.after_cell = self._scripts > 0
        return error

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        requests = list(self.requests)
        for request in requests:
            request.cancel()
        if requests:
            await asyncio.wait(requests, timeout=END_SECONDS)
        if self._server is not None:
            with contextlib.suppress(SandboxError, OSError):
                assert isinstance(self.sandbox, SupportsModelNetwork)
                self.sandbox.refuse_connections()
        if self._shell is not None:
            await self._shell.close()

    def command_seconds(self) -> float:
        """Return the total seconds during which at least one command, such as `llm`, was running."""
        return self._command_seconds + (time.monotonic() - self._commands_since if self.running_commands else 0.0)

    @contextlib.contextmanager
    def _count_command(self) -> Iterator[None]:
        if not self.running_commands:
            self._commands_since = time.monotonic()
        self.running_commands += 1
        try:
            yield
        finally:
            self.running_commands -= 1
            if not self.running_commands:
                self._command_seconds += time.monotonic() - self._commands_since

    # ---- commands

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self.requests) >= CONNECTIONS:
            writer.close()
            return
        self.requests.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError, ValueError, asyncio.LimitOverrunError):
            pass  # an invalid request or a closed connection: nobody is left to inform
        finally:
            self.requests.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with _ByteReservation(self) as reservation:
            await self._handle_request(reader, writer, reservation)

    async def _handle_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reservation: "_ByteReservation"
    ) -> None:
        async with asyncio.timeout(REQUEST_SECONDS):
            secret, *words = (await reader.readline()).split()
            if not secrets.compare_digest(secret, self.secret.encode()):
                return
            name, count, size = (word.decode() for word in words)
            if int(count) > MAX_ARGS:
                writer.write(f"no\n{name}: more than {MAX_ARGS} words; give the text as one\n".encode())
                return
            args: list[str] = []
            for _ in range(int(count)):
                length = int(await reader.readline())
                if problem := reservation.take(length):
                    writer.write(f"no\n{name}: {problem}\n".encode())
                    return
                args.append((await reader.readexactly(length)).decode("utf-8", "replace"))
            if problem := reservation.take(int(size)):
                writer.write(f"no\n{name}: {problem}\n".encode())
                return
            stdin = (await reader.readexactly(int(size))).decode("utf-8", "replace")
        work = asyncio.ensure_future(self._run_command(name, args, stdin))
        disconnected = asyncio.ensure_future(reader.read(1))  # a stopped script closes its connection
        try:
            await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnected.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=END_SECONDS)
        if work.done() and not work.cancelled():
            writer.write(work.result().encode("utf-8", "replace"))
            await writer.drain()

    async def _run_command(self, name: str, args: list[str], stdin: str) -> str:
        try:
            with self._count_command():
                return f"ok\n{await self._call_function(name, args, stdin)}\n"
        except (BudgetExhausted, CallFailed, OSError) as error:
            return f"no\n{name}: {error}\n"
        except (RookeryError, Truncation) as error:
            self._fault = error
            self._fault_raised.set()
            return "no\n"
        except Exception as error:  # noqa: BLE001  (an exception of a tool; the command reports it)
            return f"no\n{name}: {describe(error)}\n"

    async def _call_function(self, name: str, args: list[str], stdin: str) -> str:
        functions = self.functions
        if name == "budget":
            return msgspec.json.encode(await functions.budget()).decode()
        if name == "answer":
            await functions.answer(" ".join(args) or stdin.rstrip("\n"))
            return ""
        if name == "llm":
            options, words = _parse_options(args, {"--system": str, "--max-tokens": int, "--batch": str})
            settings = (options.get("--system"), options.get("--max-tokens"))
            if "--batch" in options:
                results = await functions.llm_batch(parse_batch(stdin), *settings)
                return "\n".join(msgspec.json.encode(result.get("text")).decode() for result in results)
            return await functions.llm(_join_prompt(words, stdin), *settings)
        if name == "rlm":
            if len(args) > 2:
                raise CallFailed("it takes a prompt and a file")
            return await functions.rlm(args[0] if args else stdin, file=args[1] if len(args) > 1 else None)
        if name in functions.tools:
            arguments = _parse_object(args[0] if args else stdin)
            return render(await functions.tool(name, (), arguments))
        raise CallFailed("there is no such command")


class _ByteReservation:
    """Counts the bytes of one command's request against the limit for all commands; a context manager."""

    def __init__(self, repl: BashRepl) -> None:
        self._repl = repl
        self._taken = 0

    def take(self, size: int) -> str:
        """Reserve `size` bytes. Return an error message, or an empty string on success."""
        if size < 0:
            raise ValueError("the length of an argument is negative")
        if self._taken + size > MAX_BODY:
            return f"the arguments and the input have more than {MAX_BODY} bytes"
        if self._repl.reserved_bytes + size > MAX_RESERVED:
            return f"the running calls use {MAX_RESERVED} bytes together; wait for some of them"
        self._taken += size
        self._repl.reserved_bytes += size
        return ""

    def __enter__(self) -> "_ByteReservation":
        return self

    def __exit__(self, *_: object) -> None:
        self._repl.reserved_bytes -= self._taken


def _parse_options(args: list[str], known: dict[str, Callable[[str], Any]]) -> tuple[dict[str, Any], list[str]]:
    """Split a command's arguments into leading options, such as `--system TEXT`, and the remaining words.

    `known` maps the names of options to functions that convert their values.
    """
    options: dict[str, Any] = {}
    while args and args[0] in known:
        if len(args) < 2:
            raise CallFailed(f"{args[0]} needs a value")
        try:
            options[args[0]] = known[args[0]](args[1])
        except ValueError:
            raise CallFailed(f"{args[0]} takes a number, not {args[1]!r:.40}") from None
        args = args[2:]
    return options, args


def _join_prompt(words: list[str], stdin: str) -> str:
    prompt = "\n\n".join(filter(None, (" ".join(words), stdin)))
    if not prompt.strip():
        raise CallFailed("there is no prompt; `-` as the last word takes it from the input")
    return prompt


def parse_batch(stdin: str) -> list[str]:
    """Return the prompts in a batch file: the strings of a JSON list, or else one prompt per non-empty line.

    A line may be a JSON string.
    """
    if stdin.lstrip().startswith("["):
        try:
            return msgspec.json.decode(stdin, type=list[str])
        except (msgspec.MsgspecError, RecursionError):
            pass  # not JSON: lines that happen to start with a bracket
    return [_parse_line(line) for line in stdin.splitlines() if line.strip()]


def _parse_line(line: str) -> str:
    if line.startswith('"'):
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(line, type=str)
    return line


def _parse_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CallFailed(f"its argument must be a JSON object: {error}") from None
