"""The `agent` environment: a command-line agent of anybody's, in a box whose only network is the gateway."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from msgspec.structs import replace

from rookery.core import (
    Limits,
    Mount,
    RookeryError,
    SandboxError,
    SandboxSpec,
    Task,
    TaskError,
    Truncation,
    UsageError,
)
from rookery.core.errors import boundary, describe
from rookery.environments.agent import kinds
from rookery.environments.agent.boxes import AGENT, HOME, Boxes, fed, read_file
from rookery.environments.agent.following import Ended, follow
from rookery.environments.agent.installing import folder_of, installed, own_python, problems
from rookery.environments.agent.kinds import Kind
from rookery.environments.agent.launchers import Launcher, filled, find_launcher
from rookery.environments.agent.mcp import mcp_text
from rookery.environments.agent.start import check_start
from rookery.environments.base import Environment, Score, reward_bounds
from rookery.environments.code.limits import OWN
from rookery.environments.context import Context
from rookery.environments.results import clip
from rookery.gateway.door import Door
from rookery.sandboxes import is_isolated
from rookery.sandboxes.protocol import Command, Process, Sandbox
from rookery.scoring.grading import Forms
from rookery.tasks.swe import KEY, SweTask, limits_with_test_timeout, swe_task, with_test_timeout

MAX_ARGUMENT: Final = 120_000
"""Bytes of one argument of a program; the kernel's own limit is a little above."""
MAX_FILE: Final = 64 << 10
MAX_FILES: Final = 16
MAX_SCRIPT: Final = 4 << 20
RESERVE: Final = 5.0
"""Seconds of the run's time that are kept for ending and collecting, or a tenth of it where that is less."""
END_SECONDS: Final = 3.0
"""For the last words with the gateway of an attempt that is failing or cancelled."""


class AgentEnvironment(Environment):
    """Starts an agent with a task and scores what it left, for plain, `code` and `swe` tasks alike."""

    name = "agent"
    sandbox = SandboxSpec(network="model", memory=2 << 30, pids=512, wall=600.0)
    limits = Limits(turns=200, setup=2100.0, run=3600.0, score=1800.0)
    needs_gateway = "the agent's model calls"
    own_limits: ClassVar[frozenset[str]] = OWN

    def __init__(
        self,
        launcher: str | Path | Mapping[str, Any] | Launcher,
        *,
        script: str | Path | None = None,
        args: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        model: str = "policy",
        timeout: float | None = None,
        grace: float = 5.0,
        instructions: bool = True,
        partial: bool = False,
        max_log: int = 16_384,
        test_timeout: float | None = None,
    ) -> None:
        self.launcher = find_launcher(launcher)
        self.script = _script(self.launcher, script)
        if isinstance(args, str) or not all(isinstance(one, str) for one in args):
            raise UsageError(f"args must be a list of texts, not {args!r:.80}")
        self.args = tuple(args)
        self.environment = {str(name): str(value) for name, value in (environment or {}).items()}
        if not model:
            raise UsageError("model must be a name: that of the model, or policy")
        self.model = model
        given = (("timeout", timeout, 0.0), ("test_timeout", test_timeout, 0.0), ("grace", grace, -1.0))
        for name, value, least in given:
            if value is not None and not least < value < math.inf:
                raise UsageError(f"{name} must be a finite number of seconds, not {value!r:.80}")
        if max_log < 64:
            raise UsageError(f"max_log must be at least 64 bytes, not {max_log!r}")
        self.timeout = timeout
        """Seconds for the agent; None: what the run's stage has, or what a step of its task says."""
        self.test_timeout = test_timeout
        """Seconds for one run of the tests of `swe` tasks that do not say it themselves."""
        self.grace = grace
        """Seconds that an agent with a spent budget gets to end by itself."""
        self.instructions = instructions
        """Whether the prompt is followed by where to leave what is scored."""
        self.partial = partial
        self.max_log = max_log
        self._forms = Forms()
        self._boxes = Boxes(self.launcher)

    @property
    def needs_sandbox(self) -> bool:
        return True

    def limits_for(self, task: Task, run: Limits) -> Limits:
        """Return the limits of a rollout, with stages that are long enough for the tests of a `swe` task."""
        said = super().limits_for(task, run)
        return limits_with_test_timeout(task, said, run, self.test_timeout) if KEY in task.data else said

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        """What cannot work in the run's sandboxes, in sentences; starts nothing."""
        said = []
        if spec.provider and not is_isolated(spec.provider):
            said.append(
                f"an agent needs a sandbox with folders of its own, and {spec.provider} has this machine's"
            )
        if spec.network not in ("model", "all"):
            said.append(
                "an agent reaches the gateway by the network 'model' (or 'all', at its public address), and the "
                f"sandbox's network is {spec.network!r}"
            )
        install = self.launcher.install
        if not install.nothing and not (folder_of(self.launcher, own_python()) / "start.py").is_file():
            said += [f"the agent {self.launcher.name}: {one}" for one in problems(install)]
        return said

    async def ready(self, say: Callable[[str], None]) -> None:
        """Installs the agent for boxes without an image, so that a run does not begin with it."""
        if not self.launcher.install.nothing:
            await installed(self.launcher, own_python(), say=say)

    # ---- setup

    async def setup(self, ctx: Context) -> None:
        """The box, the agent in it, and all that it is started with. What fails here is never the policy's."""
        kind = ctx.state["kind"] = kinds.kind_of(ctx)
        task = swe_task(ctx.task) if kind == "swe" else None
        if task is not None:
            task = with_test_timeout(task, ctx.limits.test_timeout, self.test_timeout)
        ctx.state["task"] = task
        ctx.state["step"], ctx.state["grades"] = 0, []
        ctx.state["mcp"] = mcp_text(self.launcher, task, ctx.log) if task is not None else ""
        spec = ctx.spec if task is None else _box_of(task, ctx.spec)
        if task is not None and task.network != "none":
            ctx.log.warning(
                "the task asks for a network; its box has the model's and no other", asked=task.network
            )
        ctx.spec = await self._with_agent(ctx, spec)
        box = await ctx.sandbox()
        if task is not None:
            ctx.state["prepared"] = await kinds.prepared(ctx, box, task)
        await self._laid_out(ctx, box, kind, task)

    async def _with_agent(self, ctx: Context, spec: SandboxSpec) -> SandboxSpec:
        """The spec with the agent's folder in it, which is made where it is not there yet."""
        launcher = self.launcher
        if launcher.install.nothing:
            return spec
        python = None
        if launcher.install.python or launcher.install.python_alone:
            python = own_python() if spec.image is None else await self._boxes.python_in(ctx, spec)
        folder = await ctx.working("sandbox", installed(launcher, python, say=ctx.log.info))
        return replace(spec, mounts=(*spec.mounts, Mount(source=str(folder), target=AGENT)))

    async def _laid_out(self, ctx: Context, box: Sandbox, kind: Kind, task: SweTask | None) -> None:
        """Writes the agent's files, and fills in what is known before its door opens."""
        launcher = self.launcher
        folder = task.workdir if task is not None else "."
        seen = await self._boxes.looked(ctx, box, folder)
        values = {
            "workdir": seen.workdir,
            "home": HOME,
            "agent": AGENT,
            "python": seen.python,
            "model": self.model,
            "prompt_file": f"{HOME}/prompt.txt",
            "driver": f"{HOME}/{launcher.driver or 'driver.py'}",
            "script": f"{HOME}/{self.script.name}" if self.script is not None else "",
            "mcp_file": "",
        }
        if launcher.mcp is not None:
            values["mcp_file"] = filled(launcher.mcp.file, values)
        ctx.state["values"] = values
        await self._programs_laid(box, values)
        ctx.state["prompt"] = kinds.asked(ctx, kind, values["workdir"], told=self.instructions)

    async def _programs_laid(self, box: Sandbox, values: Mapping[str, str]) -> None:
        if self.launcher.driver_text:
            await box.write(values["driver"], self.launcher.driver_text.encode())
        if self.script is not None:
            with boundary(UsageError, f"the script {self.script} cannot be read", OSError, cause="agent.start"):
                data = await asyncio.to_thread(self.script.read_bytes)
            await box.write(values["script"], data, mode=0o755)

    # ---- run

    async def run(self, ctx: Context) -> None:
        box = await ctx.sandbox()
        task: SweTask | None = ctx.state["task"]
        inside = box.spec.network == "model"
        # Between two steps the stage's clock may stand, and a session's would not.
        timed = task is None or len(task.steps) == 1
        async with ctx.door(box if inside else None, timed=timed) as door:
            try:
                late = await self._steps(ctx, box, door, task)
            except BaseException:
                # What it sampled until then is the attempt's all the same.
                with contextlib.suppress(RookeryError):
                    await door.end(timeout=END_SECONDS)
                raise
            record = await door.end()
            ctx.metrics["agent/turns"] = float(len(record.turns))
            if not record.turns:
                ctx.log.warning("the agent ended without a call of a model", launcher=self.launcher.name)
        if late:
            raise Truncation("time", "the agent's time is over")

    async def _steps(self, ctx: Context, box: Sandbox, door: Door, task: SweTask | None) -> bool:
        """The agent, once for each step of its task. Whether its time is over."""
        low, high = reward_bounds(self)
        steps = task.steps if task is not None else (None,)
        for number, step in enumerate(steps):
            if number and task is not None and step is not None:
                from rookery.scoring.swe import prepare_step

                ctx.state["step"], ctx.state["prompt"] = number, step.instruction
                await prepare_step(box, task, step, timeout=max(1.0, ctx.remaining))
            command = await self._begun(ctx, box, door, number)
            if command is None:
                break
            ended = await self._played(ctx, box, door, command, step.timeout if step is not None else None)
            if ended.why != "exited":
                return ended.why == "deadline"
            if step is not None and number + 1 < len(steps):
                if await door.look() is not None:  # it ended because its calls were refused
                    break
                score = await kinds.box_graded(ctx, number, low, high)
                if not kinds.enough(step, score):
                    ctx.log.info("the next steps are not begun: the reward of this one is too low", step=step.name)
                    break
        return False

    async def _begun(self, ctx: Context, box: Sandbox, door: Door, number: int) -> Command | None:
        """The command of a step, with its files in place; None where an agent before left no room for them."""
        try:
            if number:  # the agent of another step could change them
                await self._programs_laid(box, ctx.state["values"])
            return await self._command(ctx, box, door)
        except (OSError, SandboxError) as error:
            lost = isinstance(error, SandboxError) and error.code != "sandbox.refused"
            if not number or lost or isinstance(error, TimeoutError):
                raise
            # There was room when the attempt began: what is in the way is the policy's own doing.
            about = {"launcher": self.launcher.name, "why": "unstarted", "detail": describe(error)}
            ctx.info.setdefault("agents", []).append(about)
            return None

    async def _played(
        self, ctx: Context, box: Sandbox, door: Door, command: Command, limit: float | None
    ) -> Ended:
        """One agent, from its start to its end, and what it left."""
        left = _deadline(ctx, min((one for one in (limit, self.timeout) if one is not None), default=math.inf))
        process = await box.start(command)
        stdin = ctx.state["prompt"].encode() if self.launcher.prompt == "stdin" else b""
        ended = await ctx.working("tool", self._followed(process, stdin, door, left))
        result = ended.result
        ctx.metrics["agent/seconds"] = ctx.metrics.get("agent/seconds", 0.0) + ended.seconds
        well = result.status == "exited" and result.exit_code in self.launcher.ok
        ctx.metrics["agent/ended_well"] = float(well and ended.why == "exited")
        stdout = result.stdout.decode("utf-8", "replace")
        ctx.state["printed"] = stdout
        about = {
            "launcher": self.launcher.name,
            "why": ended.why,
            "status": result.status,
            "exit_code": result.exit_code,
            "signal": result.signal,
            "killed": ended.killed,
            "seconds": round(ended.seconds, 3),
            "detail": result.detail,
            "stdout": clip(stdout, self.max_log, result.stdout_dropped),
            "stderr": clip(result.stderr.decode("utf-8", "replace"), self.max_log, result.stderr_dropped),
            "files": await self._collected(ctx, box),
        }
        ctx.info.setdefault("agents", []).append({key: value for key, value in about.items() if value != ""})
        if (path := kinds.file_of(ctx, ctx.state["kind"])) != "":
            data = await read_file(box, path, kinds.MAX_ANSWER)
            if isinstance(data, bytes):
                ctx.state["submission"] = data.decode("utf-8", "replace")
        if not well:
            if ended.why == "exited":
                await door.check_upstream()  # with the evidence, where its model server hangs
            check_start(self.launcher.name, ended, await door.status(), box.spec)
        return ended

    async def _followed(self, process: Process, stdin: bytes, door: Door, left: Callable[[], float]) -> Ended:
        feeding = asyncio.create_task(fed(process, stdin), name="agent's input")
        try:
            return await follow(process, door, left, grace=self.grace)
        finally:
            feeding.cancel()
            await asyncio.wait({feeding})
            if not feeding.cancelled():
                feeding.result()

    async def _command(self, ctx: Context, box: Sandbox, door: Door) -> Command:
        """What is started, with its files in place."""
        launcher, prompt = self.launcher, ctx.state["prompt"]
        values = {
            **ctx.state["values"],
            "prompt": prompt,
            "openai_url": f"{door.url}/v1",
            "anthropic_url": door.url,
            "key": door.key,
        }
        task: SweTask | None = ctx.state["task"]
        servers: str = ctx.state["mcp"]
        files = {filled(path, values): filled(text, values) for path, text in launcher.files.items()}
        if servers and launcher.mcp is not None:
            path = values["mcp_file"]
            files[path] = f"{files.get(path, '')}\n{servers}" if launcher.mcp.append else servers
        files[values["prompt_file"]] = prompt  # always: the agent's folder is there then
        for path, text in files.items():
            await box.write(path, text.encode())
        extra = launcher.mcp.arguments if servers and launcher.mcp is not None else ()
        argv = tuple(filled(text, values) for text in (*launcher.command, *extra)) + self.args
        if any(len(text.encode()) > MAX_ARGUMENT for text in argv):
            raise TaskError(
                f"task {ctx.task.id}: its prompt has more than {MAX_ARGUMENT} bytes, and an argument of a program "
                f"holds no more: use a launcher whose prompt goes by file or stdin, not {launcher.name}"
            )
        env = {name: filled(text, values) for name, text in launcher.environment.items()}
        if any("\0" in text for text in (*argv, *env.values())):
            raise TaskError(
                f"task {ctx.task.id}: its prompt has a NUL, which no argument of a program can hold: use a "
                f"launcher whose prompt goes by file or stdin, not {launcher.name}"
            )
        return Command(
            argv=argv,
            # A task's own key for some model must not lead the agent away from its door.
            env={**(task.env if task is not None else {}), **door.environment(), **env, **self.environment},
            cwd=values["workdir"],
            output=4 * self.max_log,
        )

    async def _collected(self, ctx: Context, box: Sandbox) -> dict[str, str]:
        files = {}
        wanted = [filled(path, ctx.state["values"]) for path in self.launcher.collect]
        named = ctx.task.data.get("collect", ())
        wanted += [path for path in named if isinstance(path, str)] if isinstance(named, list) else []
        for path in wanted[:MAX_FILES]:
            data = await read_file(box, path, 16 * MAX_FILE)
            if data is not None:
                files[path] = clip(data.decode("utf-8", "replace"), MAX_FILE) if isinstance(data, bytes) else data
        return files

    # ---- score

    async def score(self, ctx: Context) -> Score:
        low, high = reward_bounds(self)
        kind: Kind = ctx.state["kind"]
        if kind == "plain":
            return kinds.answered(ctx, low, high)
        if kind == "code":
            return await kinds.programmed(ctx, low, high, partial=self.partial, forms=self._forms)
        from rookery.environments.swe.rewards import total

        if len(ctx.state["grades"]) <= ctx.state["step"]:
            await kinds.box_graded(ctx, ctx.state["step"], low, high)
        scored: Score = total(ctx.state["task"], ctx.state["grades"], low)
        return scored


def _box_of(task: SweTask, spec: SandboxSpec) -> SandboxSpec:
    from rookery.environments.swe import sandbox_for

    made: SandboxSpec = sandbox_for(task, spec, network="run")
    return made


def _deadline(ctx: Context, limit: float) -> Callable[[], float]:
    """Seconds that are left, of the run's stage and of the agent's own limit; neither counts pauses."""
    began = ctx.remaining
    at = asyncio.get_running_loop().time()
    reserve = min(RESERVE, 0.1 * began) if math.isfinite(began) else 0.0

    def left() -> float:
        now = ctx.remaining
        used = began - now if math.isfinite(began) else asyncio.get_running_loop().time() - at
        return min(now - reserve, limit - used)

    return left


def _script(launcher: Launcher, script: str | Path | None) -> Path | None:
    if launcher.script != (script is not None):
        said = "needs a program of yours: give script=FILE" if launcher.script else "takes no script"
        raise UsageError(f"the launcher {launcher.name} {said}")
    if script is None:
        return None
    path = Path(script).expanduser().absolute()
    try:
        if path.stat().st_size > MAX_SCRIPT:
            raise UsageError(f"the script {path} is larger than {MAX_SCRIPT} bytes")
        if not path.is_file():
            raise UsageError(f"the script {path} is not a regular file")
        path.open("rb").close()
    except OSError as error:
        raise UsageError(f"the script {path} cannot be read: {error.strerror}") from None
    return path
