"""What is asked of an agent's box.

Promises:
- what the agent needs and the box lacks is named, as the task's fault, before the agent is started;
- boxes of one image are alike: one of them is asked, and only once in a process;
- what an agent left in place of a file is words in the record, never a failure.
"""

import asyncio
import contextlib
from typing import Final, NamedTuple

from msgspec.structs import replace

from rookery.core import SandboxError, SandboxSpec, TaskError
from rookery.environments.agent.installing import PROBE, PythonOf, python_of
from rookery.environments.agent.launchers import Launcher, filled
from rookery.environments.context import Context
from rookery.sandboxes.protocol import Command, Process, Sandbox

AGENT: Final = "/opt/rookery/agent"
"""In a box: where the agent is installed."""
HOME: Final = "/tmp/rookery-agent"  # noqa: S108  (the box's own)
CHECK_SECONDS: Final = 120.0
_LOOK = 'cd -- "$1" && pwd -P || exit 1; shift; for p; do command -v -- "$p" || { echo "$p" >&2; exit 3; }; done'


class Seen(NamedTuple):
    """What is known of the boxes of an image."""

    workdir: str
    python: str


class Boxes:
    """What a process knows of them, for one launcher."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._pythons: dict[str, PythonOf] = {}
        self._seen: dict[tuple[str | None, ...], Seen] = {}
        self._asking: dict[str, asyncio.Lock] = {}

    async def python_in(self, ctx: Context, spec: SandboxSpec) -> PythonOf:
        """Of an image."""
        assert spec.image is not None
        # One image may have to be fetched first: the others do not wait for it.
        async with self._asking.setdefault(spec.image, asyncio.Lock()):
            found = self._pythons.get(spec.image)
            if found is None:
                found = self._pythons[spec.image] = await self._probed(ctx, spec)
            return found

    async def _probed(self, ctx: Context, spec: SandboxSpec) -> PythonOf:
        box = await ctx.sandbox(replace(spec, network="none", mounts=()))
        try:
            said = await box.exec(Command(argv=("python3", "-I", "-c", PROBE), wall=60.0))
        finally:
            await box.close()
        _alive(box, said.status, said.detail)
        found = python_of(said.stdout) if said.ok else None
        if found is None:
            raise TaskError(
                f"task {ctx.task.id}: the agent {self._launcher.name} needs a python3 of 3.8 or later, and the "
                f"image {spec.image} has none that answers",
                cause="agent.missing",
            )
        return found

    async def looked(self, ctx: Context, box: Sandbox, folder: str) -> Seen:
        """Whether a box has what the agent needs, and where."""
        spec = box.spec
        key = (spec.provider, spec.image, spec.user, spec.workdir, folder)
        if (known := self._seen.get(key)) is not None:
            return known
        launcher = self._launcher
        needs = [*launcher.needs, *(["python3"] if launcher.needs_python else [])]
        said = await box.exec(Command(argv=("sh", "-c", _LOOK, "sh", folder, *needs), wall=60.0))
        _alive(box, said.status, said.detail)
        if said.exit_code == 3:
            lacking = said.stderr.decode(errors="replace").strip()
            where = f"the image {spec.image}" if spec.image else "this system"
            raise TaskError(
                f"task {ctx.task.id}: the agent {launcher.name} needs {lacking} in its box, and {where} has none",
                cause="agent.missing",
            )
        lines = said.stdout.decode("utf-8", "surrogateescape").splitlines()
        if not said.ok or not lines:
            raise SandboxError(f"sandbox {box.id} cannot be used for an agent: {said.stderr!r:.300}")
        seen = Seen(workdir=lines[0], python=lines[-1] if launcher.needs_python else "")
        if spec.image and launcher.check:
            await self._checked(ctx, box, seen)
        self._seen[key] = seen
        return seen

    async def _checked(self, ctx: Context, box: Sandbox, seen: Seen) -> None:
        """Whether the agent can start there."""
        values = {"agent": AGENT, "python": seen.python, "home": HOME, "workdir": seen.workdir}
        argv = tuple(filled(text, values) for text in self._launcher.check)
        said = await box.exec(Command(argv=argv, wall=CHECK_SECONDS))
        _alive(box, said.status, said.detail)
        if not said.ok:
            words = (said.stdout + said.stderr).decode(errors="replace").strip() or said.detail or said.status
            raise TaskError(
                f"task {ctx.task.id}: the agent {self._launcher.name} cannot start in the image {box.spec.image}: "
                f"{words[-1000:]}",
                cause="agent.missing",
            )


def _alive(box: Sandbox, status: str, detail: str) -> None:
    if status == "lost":
        raise SandboxError(f"sandbox {box.id} was lost: {detail or 'no detail'}")


async def fed(process: Process, data: bytes) -> None:
    """Its whole input and the end of it; beside the waiting, since it may read slowly or never."""
    with contextlib.suppress(BrokenPipeError, SandboxError):  # how it ended is told by who waits for it
        await process.send(data, eof=True)


async def read_file(box: Sandbox, path: str, limit: int) -> bytes | str | None:
    """A file of the box; what is wrong with it in words; None where it is not there."""
    try:
        return await box.read(path, limit=limit)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"(cannot be read: {error})"
    except SandboxError as error:
        if error.code != "sandbox.refused":
            raise
        return f"(cannot be read: {error})"
