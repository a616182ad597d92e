"""A bash REPL for a model: a persistent shell, with commands that reach us over the sandbox's one address.

Promises:
- the commands are there in every bash that starts, also after `exit`;
- a shell that is gone and cannot be replaced raises `WorkerRecoveryError`, as the Python REPL does;
- nobody is served without the secret, which is the REPL's own;
- requests, connections and what they hold are bounded; all end with the REPL;
- time while a command of ours is under way is not the script's own; one that is stopped leaves its sub-calls to go
  on, and their answers are kept for the next equal call.
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
from rookery.environments.results import render
from rookery.environments.rlm.budgets import BudgetSpent, CallFailed
from rookery.environments.rlm.contexts import MOST_PART, Placed
from rookery.environments.rlm.observing import of_script
from rookery.environments.rlm.options import Options
from rookery.environments.rlm.repl import Observed
from rookery.environments.rlm.verbs import Verbs
from rookery.sandboxes.protocol import Command, Listening, Sandbox, Shell

CONNECTIONS: Final = 256
MOST_BODY: Final = 16 << 20
MOST_HELD: Final = 64 << 20
"""Bytes of all calls under way together."""
MOST_ARGS: Final = 64
HEAD_SECONDS: Final = 30.0
END_SECONDS: Final = 20.0
"""For what is cancelled to end."""
# Bash alone, since an image may have nothing else: arguments and input go out with their lengths, a word and a
# text come back. LC_ALL=C makes lengths bytes.
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
read -r word <&3 || {{ echo "${{0##*/}}: no answer came" >&2; exit 1; }}
if [ "$word" = ok ]; then cat <&3; else cat <&3 >&2; exit 1; fi
"""


class BashRepl:
    """One shell, and who serves its commands."""

    def __init__(self, sandbox: Sandbox, verbs: Verbs, options: Options) -> None:
        self.verbs = verbs
        self._sandbox = sandbox
        self._options = options
        self._secret = secrets.token_hex(16)
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()
        self._shell: Shell | None = None
        self._begin = ""
        self._fault: BaseException | None = None
        """What ends the attempt, found while a command was served."""
        self._faulted = asyncio.Event()
        self._scripts = 0
        """Scripts of the model that were run."""
        self._held = 0
        self._commands = 0
        self._since = 0.0
        self._outside = 0.0

    @classmethod
    async def open(cls, sandbox: Sandbox, verbs: Verbs, placed: Placed, options: Options) -> "BashRepl":
        repl = cls(sandbox, verbs, options)

        async def read_file(name: str) -> bytes:
            return await sandbox.read(name, limit=MOST_PART, timeout=60.0)

        verbs.read_file = read_file
        try:
            await repl._start(placed)
        except BaseException:
            await repl.close()
            raise
        return repl

    async def _start(self, placed: Placed) -> None:
        if not isinstance(self._sandbox, Listening) or not self._sandbox.inside_url:
            raise SandboxError(
                f"sandbox {self._sandbox.id} cannot reach its model alone; use repl=python, or another provider",
                cause="sandbox.refused",
            )
        port = int(self._sandbox.inside_url.rpartition(":")[2].rstrip("/"))
        listener = self._sandbox.listener()
        try:
            self._server = await asyncio.start_server(self._accepted, sock=listener, backlog=1024)
        except BaseException:
            listener.close()
            raise
        script = SCRIPT.format(port=port, secret=self._secret).encode()
        names = ["llm", "answer", "budget", *(["rlm"] if self._options.max_depth >= 2 else []), *self.verbs.tools]
        for name in names:
            await self._sandbox.write(f".rlm/{name}", script, mode=0o755)
        where = await self._sandbox.exec(Command(argv=("bash", "-c", "pwd"), wall=20.0))
        folder = where.stdout.decode("utf-8", "replace").strip()
        if not where.ok or "'" in folder:
            raise SandboxError(f"bash in sandbox {self._sandbox.id} did not tell its folder: {where.detail}")
        context = f" CONTEXT='{folder}/{placed.name}'" if placed.name else ""
        commands = f"'{folder}/.rlm'"
        self._begin = f'case ":$PATH:" in *:{commands}:*) ;; *) export PATH={commands}:"$PATH"{context};; esac\n'
        self._shell = await self._sandbox.shell()
        ready = await self._shell.run(f"{self._begin}type llm", timeout=20.0)
        if not ready.ok:
            raise TaskError(f"the sandbox's bash cannot be used: {ready.stderr.decode('utf-8', 'replace')[:300]}")

    async def run(self, code: str) -> Observed:
        assert self._shell is not None
        wall = self._options.cell_seconds
        before = self.outside()
        running = self._shell.run(self._begin + code, timeout=wall, outside=lambda: self.outside() - before)
        work = asyncio.ensure_future(running)
        fault = asyncio.ensure_future(self._faulted.wait())
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
        reset = "shell was replaced" in result.detail
        return Observed(
            text=of_script(result, self._options.max_output),
            status="ok" if result.ok else result.status,
            late=result.status == "time_limit",
            recovered="reset" if reset else "none",
        )

    def _unrecoverable(self, why: str) -> WorkerRecoveryError:
        """The error for a shell that is gone and cannot be replaced, as the Python REPL has it."""
        error = WorkerRecoveryError(f"no new shell can be started in sandbox {self._sandbox.id}: {why}")
        error.after_cell = self._scripts > 0
        return error

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        talks = list(self._talks)
        for talk in talks:
            talk.cancel()
        if talks:
            await asyncio.wait(talks, timeout=END_SECONDS)
        if self._server is not None:
            with contextlib.suppress(SandboxError, OSError):
                assert isinstance(self._sandbox, Listening)
                self._sandbox.unlisten()
        if self._shell is not None:
            await self._shell.close()

    def outside(self) -> float:
        """Seconds so far in which a command was under way."""
        return self._outside + (time.monotonic() - self._since if self._commands else 0.0)

    @contextlib.contextmanager
    def _command(self) -> Iterator[None]:
        if not self._commands:
            self._since = time.monotonic()
        self._commands += 1
        try:
            yield
        finally:
            self._commands -= 1
            if not self._commands:
                self._outside += time.monotonic() - self._since

    # ---- commands

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._talks) >= CONNECTIONS:
            writer.close()
            return
        self._talks.add(task)
        try:
            await self._talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError, ValueError, asyncio.LimitOverrunError):
            pass  # it does not keep to the form, or went away: there is nobody to tell
        finally:
            self._talks.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with _Room(self) as room:
            await self._heard(reader, writer, room)

    async def _heard(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, room: "_Room") -> None:
        async with asyncio.timeout(HEAD_SECONDS):
            secret, *words = (await reader.readline()).split()
            if not secrets.compare_digest(secret, self._secret.encode()):
                return
            name, count, size = (word.decode() for word in words)
            if int(count) > MOST_ARGS:
                writer.write(f"no\n{name}: more than {MOST_ARGS} words; give the text as one\n".encode())
                return
            args: list[str] = []
            for _ in range(int(count)):
                length = int(await reader.readline())
                if trouble := room.take(length):
                    writer.write(f"no\n{name}: {trouble}\n".encode())
                    return
                args.append((await reader.readexactly(length)).decode("utf-8", "replace"))
            if trouble := room.take(int(size)):
                writer.write(f"no\n{name}: {trouble}\n".encode())
                return
            given = (await reader.readexactly(int(size))).decode("utf-8", "replace")
        work = asyncio.ensure_future(self._done(name, args, given))
        gone = asyncio.ensure_future(reader.read(1))  # who is stopped hangs up
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=END_SECONDS)
        if work.done() and not work.cancelled():
            writer.write(work.result().encode("utf-8", "replace"))
            await writer.drain()

    async def _done(self, name: str, args: list[str], given: str) -> str:
        try:
            with self._command():
                return f"ok\n{await self._verb(name, args, given)}\n"
        except (BudgetSpent, CallFailed, OSError) as error:
            return f"no\n{name}: {error}\n"
        except (RookeryError, Truncation) as error:
            self._fault = error
            self._faulted.set()
            return "no\n"
        except Exception as error:  # noqa: BLE001  (a tool's own; the command tells it)
            return f"no\n{name}: {describe(error)}\n"

    async def _verb(self, name: str, args: list[str], given: str) -> str:
        verbs = self.verbs
        if name == "budget":
            return msgspec.json.encode(await verbs.budget()).decode()
        if name == "answer":
            await verbs.answer(" ".join(args) or given.rstrip("\n"))
            return ""
        if name == "llm":
            options, words = _options(args, {"--system": str, "--max-tokens": int, "--batch": str})
            more = (options.get("--system"), options.get("--max-tokens"))
            if "--batch" in options:
                found = await verbs.llm_batch(_prompts(given), *more)
                return "\n".join(msgspec.json.encode(one.get("text")).decode() for one in found)
            return await verbs.llm(_joined(words, given), *more)
        if name == "rlm":
            if len(args) > 2:
                raise CallFailed("it takes a prompt and a file")
            return await verbs.rlm(args[0] if args else given, file=args[1] if len(args) > 1 else None)
        if name in verbs.tools:
            arguments = _json(args[0] if args else given)
            return render(await verbs.tool(name, (), arguments))
        raise CallFailed("there is no such command")


class _Room:
    """What one call holds of what all may hold."""

    def __init__(self, repl: BashRepl) -> None:
        self._repl = repl
        self._taken = 0

    def take(self, size: int) -> str:
        """So many bytes more; what is wrong with that, or nothing."""
        if size < 0:
            raise ValueError("less than nothing")
        if self._taken + size > MOST_BODY:
            return f"more than {MOST_BODY} bytes"
        if self._repl._held + size > MOST_HELD:
            return f"the calls under way hold {MOST_HELD} bytes together; wait for some of them"
        self._taken += size
        self._repl._held += size
        return ""

    def __enter__(self) -> "_Room":
        return self

    def __exit__(self, *_: object) -> None:
        self._repl._held -= self._taken


def _options(args: list[str], known: dict[str, Callable[[str], Any]]) -> tuple[dict[str, Any], list[str]]:
    """Options at the beginning, and the words after them."""
    found: dict[str, Any] = {}
    while args and args[0] in known:
        if len(args) < 2:
            raise CallFailed(f"{args[0]} needs a value")
        try:
            found[args[0]] = known[args[0]](args[1])
        except ValueError:
            raise CallFailed(f"{args[0]} takes a number, not {args[1]!r:.40}") from None
        args = args[2:]
    return found, args


def _joined(words: list[str], given: str) -> str:
    prompt = "\n\n".join(filter(None, (" ".join(words), given)))
    if not prompt.strip():
        raise CallFailed("there is no prompt; `-` as the last word takes it from the input")
    return prompt


def _prompts(given: str) -> list[str]:
    """Of a file: the texts of a JSON list, or its lines, where a line may be a JSON text."""
    if given.lstrip().startswith("["):
        try:
            return msgspec.json.decode(given, type=list[str])
        except msgspec.MsgspecError:
            pass  # then its lines begin so
    return [_line(line) for line in given.splitlines() if line.strip()]


def _line(line: str) -> str:
    if line.startswith('"'):
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(line, type=str)
    return line


def _json(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise CallFailed(f"its argument must be a JSON object: {error}") from None
