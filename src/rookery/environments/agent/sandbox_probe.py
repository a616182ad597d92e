"""Find out whether a sandbox has what an agent needs: a working directory, Python and required programs.

Runs in a runner process. All sandboxes of a container image have the same content, so each image is probed once
per process. If something is missing, `TaskError` is raised before the agent is started.
"""

import asyncio
import contextlib
from typing import Final, NamedTuple

from msgspec.structs import replace

from rookery.core import SandboxError, SandboxSpec, TaskError
from rookery.environments.agent.installation import PROBE, PythonPlatform, parse_probe_output
from rookery.environments.agent.launchers import Launcher, fill_placeholders
from rookery.environments.context import Context
from rookery.sandboxes.protocol import Command, Process, Sandbox

AGENT_DIRECTORY: Final = "/opt/rookery/agent"
"""Path in a sandbox at which the agent's installation directory is mounted."""
HOME_DIRECTORY: Final = "/tmp/rookery-agent"  # noqa: S108  (inside the sandbox)
UPLOAD_DIRECTORY: Final = f"{HOME_DIRECTORY}/installed"
"""Path to which the agent's installation directory is copied, in sandboxes on other machines."""
CHECK_SECONDS: Final = 120.0
_PROBE_SCRIPT = (
    'cd -- "$1" && pwd -P || exit 1; shift; for p; do command -v -- "$p" || { echo "$p" >&2; exit 3; }; done'
)


class ProbeResult(NamedTuple):
    """Result of probing a sandbox. It holds for all sandboxes of the same image."""

    workdir: str
    """Absolute path of the agent's working directory."""
    python: str
    """Path of `python3`; empty if the agent does not need it."""


class SandboxProbe:
    """Checks sandboxes for what one launcher's agent needs, and caches the results by image."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._pythons: dict[str | None, PythonPlatform] = {}
        self._results: dict[tuple[str | None, ...], ProbeResult] = {}
        self._locks: dict[str | None, asyncio.Lock] = {}

    async def find_python(self, ctx: Context, spec: SandboxSpec) -> PythonPlatform:
        """Return the platform of the `python3` in the image of `spec`, or in sandboxes without an image.

        Raise `TaskError` if there is no Python 3.8 or newer.
        """
        # One lock per image: attempts with another image do not wait while this one is pulled.
        async with self._locks.setdefault(spec.image, asyncio.Lock()):
            python = self._pythons.get(spec.image)
            if python is None:
                python = self._pythons[spec.image] = await self._probe_python(ctx, spec)
            return python

    async def _probe_python(self, ctx: Context, spec: SandboxSpec) -> PythonPlatform:
        sandbox = await ctx.sandbox(replace(spec, network="none", mounts=()))
        try:
            result = await sandbox.exec(Command(argv=("python3", "-I", "-c", PROBE), wall=60.0))
        finally:
            await sandbox.close()
        _check_alive(sandbox, result.status, result.detail)
        python = parse_probe_output(result.stdout) if result.ok else None
        if python is None:
            raise TaskError(
                f"task {ctx.task.id}: the agent {self._launcher.name} needs python3 >= 3.8, but "
                f"{_describe_system(spec)} has no such program",
                cause="agent.missing",
            )
        return python

    async def probe(self, ctx: Context, sandbox: Sandbox, directory: str, agent: str) -> ProbeResult:
        """Check that a sandbox has what the agent needs, and return its working directory and Python.

        `directory` is the working directory, as the task names it, and `agent` that of the agent. Raise
        `TaskError` if a program is missing or the launcher's check fails.
        """
        spec = sandbox.spec
        key = (spec.provider, spec.image, spec.user, spec.workdir, directory)
        if (cached := self._results.get(key)) is not None:
            return cached
        launcher = self._launcher
        needs = [*launcher.needs, *(["python3"] if launcher.needs_python else [])]
        result = await sandbox.exec(Command(argv=("sh", "-c", _PROBE_SCRIPT, "sh", directory, *needs), wall=60.0))
        _check_alive(sandbox, result.status, result.detail)
        if result.exit_code == 3:
            missing = result.stderr.decode(errors="replace").strip()
            raise TaskError(
                f"task {ctx.task.id}: the agent {launcher.name} needs the program {missing}, but "
                f"{_describe_system(spec)} does not have it",
                cause="agent.missing",
            )
        lines = result.stdout.decode("utf-8", "surrogateescape").splitlines()
        if not result.ok or not lines:
            raise SandboxError(f"sandbox {sandbox.id} cannot run an agent: {result.stderr!r:.300}")
        probed = ProbeResult(workdir=lines[0], python=lines[-1] if launcher.needs_python else "")
        if spec.image and launcher.check:
            await self._run_check(ctx, sandbox, probed, agent)
        self._results[key] = probed
        return probed

    async def _run_check(self, ctx: Context, sandbox: Sandbox, probed: ProbeResult, agent: str) -> None:
        """Run the launcher's check command; raise `TaskError` if it fails."""
        values = {
            "agent": agent,
            "python": probed.python,
            "home": HOME_DIRECTORY,
            "workdir": probed.workdir,
        }
        argv = tuple(fill_placeholders(text, values) for text in self._launcher.check)
        result = await sandbox.exec(Command(argv=argv, wall=CHECK_SECONDS))
        _check_alive(sandbox, result.status, result.detail)
        if not result.ok:
            output = (result.stdout + result.stderr).decode(errors="replace").strip()
            raise TaskError(
                f"task {ctx.task.id}: the agent {self._launcher.name} cannot start in the image "
                f"{sandbox.spec.image}: {(output or result.detail or result.status)[-1000:]}",
                cause="agent.missing",
            )


def _describe_system(spec: SandboxSpec) -> str:
    return f"the image {spec.image}" if spec.image else "this system"


def _check_alive(sandbox: Sandbox, status: str, detail: str) -> None:
    if status == "lost":
        raise SandboxError(f"sandbox {sandbox.id} was lost: {detail or 'no detail'}")


async def write_stdin(process: Process, data: bytes) -> None:
    """Write `data` to a process's stdin and close it. Run this as a task: the process may read slowly or never."""
    with contextlib.suppress(BrokenPipeError, SandboxError):  # whoever waits for the process reports how it ended
        await process.send(data, eof=True)


async def read_file(sandbox: Sandbox, path: str, limit: int) -> bytes | str | None:
    """Return the content of a file in the sandbox as bytes, or None if the file does not exist.

    If the file exists but cannot be read, return a message that says why, as a string.
    """
    try:
        return await sandbox.read(path, limit=limit)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"(cannot be read: {error})"
    except SandboxError as error:
        if error.code != "sandbox.refused":
            raise
        return f"(cannot be read: {error})"
