"""The `agent` environment: run a command-line agent in a sandbox that can reach only the gateway.

The gateway is Rookery's HTTP service for model calls. This module runs in a runner process, outside of the
sandbox.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from msgspec.structs import replace

from rookery.core import (
    Limits,
    Message,
    Mount,
    Rollout,
    RookeryError,
    SandboxError,
    SandboxSpec,
    Task,
    TaskError,
    Truncation,
    UsageError,
)
from rookery.core.errors import describe, wrap_errors
from rookery.environments.agent import task_kinds
from rookery.environments.agent.installation import find_problems, host_python, install_agent, install_dir
from rookery.environments.agent.launchers import Launcher, fill_placeholders, find_launcher
from rookery.environments.agent.mcp_config import render_mcp_config
from rookery.environments.agent.process import AgentExit, AgentSession, check_exit, wait_for_exit
from rookery.environments.agent.sandbox_probe import (
    AGENT_DIRECTORY,
    HOME_DIRECTORY,
    UPLOAD_DIRECTORY,
    SandboxProbe,
    read_file,
    write_stdin,
)
from rookery.environments.agent.task_kinds import Kind
from rookery.environments.base import Environment, Score, reward_bounds
from rookery.environments.code_environment.limits import PROGRAM_LIMITS
from rookery.environments.context import Context
from rookery.environments.swe.environment import combine_scores, may_continue, sandbox_for
from rookery.environments.swe.stored_submissions import find_submission_problem, restore_submissions
from rookery.environments.text import clip
from rookery.environments.tool_environment import SUBMISSION
from rookery.sandboxes import is_isolated, is_remote
from rookery.sandboxes.protocol import Command, Process, Sandbox
from rookery.scoring.grading import IsolationCache
from rookery.scoring.swe import prepare, prepare_step
from rookery.tasks.swe import DATA_KEY, SweTask, get_swe_task, limits_with_test_timeout, with_test_timeout
from rookery.telemetry.operations import observe_agent

MAX_ARGUMENT: Final = 120_000
"""Maximum bytes of one command-line argument. The limit of the Linux kernel is slightly higher."""
MAX_FILE: Final = 64 << 10
MAX_FILES: Final = 16
MAX_SCRIPT: Final = 4 << 20
MAX_UPLOAD_SECONDS: Final = 600.0
"""Time limit, in seconds, for copying the agent's installation directory to another machine."""
RESERVE: Final = 5.0
"""Seconds reserved for stopping the agent and collecting files, but at most a tenth of the time left."""
END_SECONDS: Final = 3.0
"""Time limit, in seconds, for ending the gateway session of an attempt that failed or was cancelled."""


class AgentEnvironment(Environment):
    """Environment that starts a command-line agent with a task's prompt and scores its result.

        AgentEnvironment("mini-swe-agent", timeout=600)
        AgentEnvironment("openai-sdk", script="my_agent.py")

    A launcher says how to install and start an agent. `launcher` is the name of a built-in or installed one, the
    path of a TOML file, a dict with the same keys, or a `Launcher`. A task may have an expected answer
    (`data.answer`), or be a task of the environments `code` or `swe`.
    """

    name = "agent"
    sandbox = SandboxSpec(network="model", memory=2 << 30, pids=512, wall=600.0)
    limits = Limits(turns=200, setup=2100.0, run=3600.0, score=1800.0)
    needs_gateway = "the agent's model calls"
    can_run_unrecorded = True
    own_limits: ClassVar[frozenset[str]] = PROGRAM_LIMITS

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
        self.script = _check_script(self.launcher, script)
        if isinstance(args, str) or not all(isinstance(argument, str) for argument in args):
            raise UsageError(f"args must be a list of strings, not {args!r:.80}")
        self.args = tuple(args)
        self.environment = {str(name): str(value) for name, value in (environment or {}).items()}
        if not model:
            raise UsageError("model must not be empty: pass the model's name, or policy")
        self.model = model
        durations = (("timeout", timeout, 0.0), ("test_timeout", test_timeout, 0.0), ("grace", grace, -1.0))
        for name, value, least in durations:
            if value is not None and not least < value < math.inf:
                raise UsageError(
                    f"{name} must be a finite number of seconds above 0 (grace may be 0), not {value!r:.80}"
                )
        if max_log < 64:
            raise UsageError(f"max_log must be at least 64 bytes, not {max_log!r}")
        self.timeout = timeout
        """Time limit in seconds of one execution of the agent, or None. The limits of the run stage and of the
        step of a `swe` task apply in any case."""
        self.test_timeout = test_timeout
        """Time limit in seconds for the tests of `swe` tasks that do not set one."""
        self.grace = grace
        """Seconds that an agent gets to exit after a budget of its rollout is exhausted; then it is killed."""
        self.instructions = instructions
        """True to add an instruction to the prompt that names the file to be scored; never for `swe` tasks."""
        self.partial = partial
        self.max_log = max_log
        self._isolation = IsolationCache()
        self._probe = SandboxProbe(self.launcher)

    @property
    def needs_sandbox(self) -> bool:
        return True

    def limits_for(self, task: Task, run: Limits) -> Limits:
        """Return the limits of a rollout. For a `swe` task, stages are made long enough for its test timeout."""
        limits = super().limits_for(task, run)
        return limits_with_test_timeout(task, limits, run, self.test_timeout) if DATA_KEY in task.data else limits

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        """Return the reasons why the agent cannot run in sandboxes of `spec`, one sentence each."""
        problems = []
        if spec.provider and not is_isolated(spec.provider):
            problems.append(
                f"an agent needs an isolated file system, but the provider {spec.provider} uses this machine's"
            )
        if spec.network not in ("model", "all"):
            problems.append(
                "an agent needs the network 'model' (or 'all', with a public gateway address), but the "
                f"sandbox's network is {spec.network!r}"
            )
        install = self.launcher.install
        if not install.is_empty and not (install_dir(self.launcher, host_python()) / "start.py").is_file():
            problems += [f"the agent {self.launcher.name}: {problem}" for problem in find_problems(install)]
        return problems

    async def prepare(self, spec: SandboxSpec, report: Callable[[str], None]) -> None:
        """Install the agent for this machine's Python, unless the run's sandboxes have another one.

        In that case each attempt's `setup` installs the packages that fit the Python of the sandbox.
        """
        if spec.image is None and not self.launcher.install.is_empty and not _is_remote(spec):
            await install_agent(self.launcher, host_python(), report=report)

    # ---- setup

    async def setup(self, ctx: Context) -> None:
        """Create the sandbox and write everything that the agent needs into it."""
        kind = ctx.state["kind"] = task_kinds.get_task_kind(ctx)
        task = get_swe_task(ctx.task) if kind == "swe" else None
        if task is not None:
            task = with_test_timeout(task, ctx.limits.test_timeout, self.test_timeout)
        ctx.state["task"] = task
        ctx.state["step"], ctx.state["grades"] = 0, []
        ctx.state["mcp"] = render_mcp_config(self.launcher, task, ctx.log) if task is not None else ""
        spec = ctx.spec if task is None else sandbox_for(task, ctx.spec, network="run")
        if task is not None and task.network != "none":
            ctx.log.warning(
                "the task requests a network, but its sandbox can only reach the gateway", requested=task.network
            )
        directory = AGENT_DIRECTORY
        installed = await self._install(ctx, spec)
        if installed is not None and _is_remote(spec):
            directory = UPLOAD_DIRECTORY
        elif installed is not None:
            spec = replace(spec, mounts=(*spec.mounts, Mount(source=str(installed), target=directory)))
        ctx.spec = spec
        sandbox = await ctx.sandbox()
        if installed is not None and directory == UPLOAD_DIRECTORY:
            await sandbox.upload(installed, directory, timeout=min(ctx.remaining, MAX_UPLOAD_SECONDS))
        if task is not None:
            ctx.state["prepared"] = await prepare(sandbox, task, timeout=ctx.remaining)
        await self._write_files(ctx, sandbox, kind, task, directory)

    async def _install(self, ctx: Context, spec: SandboxSpec) -> Path | None:
        """Install the agent on this machine if necessary, and return its directory; None if there is nothing."""
        launcher = self.launcher
        if launcher.install.is_empty:
            return None
        python = None
        if launcher.install.python or launcher.install.python_no_deps:
            own = spec.image is None and not _is_remote(spec)
            python = host_python() if own else await self._probe.find_python(ctx, spec)
        return await ctx.charge_policy("sandbox", install_agent(launcher, python, report=ctx.log.info))

    async def _write_files(
        self, ctx: Context, sandbox: Sandbox, kind: Kind, task: SweTask | None, directory: str
    ) -> None:
        """Write the agent's programs, and store the prompt and the launcher's placeholder values in `ctx.state`.

        The values that depend on the gateway session (URLs and key) are added later, by `_make_command`.
        """
        launcher = self.launcher
        folder = task.workdir if task is not None else "."
        probed = await self._probe.probe(ctx, sandbox, folder, directory)
        values = {
            "workdir": probed.workdir,
            "home": HOME_DIRECTORY,
            "agent": directory,
            "python": probed.python,
            "model": self.model,
            "prompt_file": f"{HOME_DIRECTORY}/prompt.txt",
            "driver": f"{HOME_DIRECTORY}/{launcher.driver or 'driver.py'}",
            "script": f"{HOME_DIRECTORY}/{self.script.name}" if self.script is not None else "",
            "mcp_file": "",
        }
        if launcher.mcp is not None:
            values["mcp_file"] = fill_placeholders(launcher.mcp.file, values)
        ctx.state["values"] = values
        await self._write_programs(sandbox, values)
        ctx.state["prompt"] = task_kinds.build_prompt(ctx, kind, values["workdir"], instruct=self.instructions)

    async def _write_programs(self, sandbox: Sandbox, values: Mapping[str, str]) -> None:
        if self.launcher.driver_text:
            await sandbox.write(values["driver"], self.launcher.driver_text.encode())
        if self.script is not None:
            with wrap_errors(UsageError, f"the script {self.script} cannot be read", OSError, cause="agent.start"):
                data = await asyncio.to_thread(self.script.read_bytes)
            await sandbox.write(values["script"], data, mode=0o755)

    # ---- run

    async def run(self, ctx: Context) -> None:
        sandbox = await ctx.sandbox()
        task: SweTask | None = ctx.state["task"]
        with observe_agent(self.launcher.name):
            timed_out = await self._run_with_session(ctx, sandbox, task)
        if timed_out:
            raise Truncation("time", "the agent exceeded its time limit")

    async def _run_with_session(self, ctx: Context, sandbox: Sandbox, task: SweTask | None) -> bool:
        """Run the agent in a gateway session. Return whether it exceeded its time limit."""
        inside = sandbox.spec.network == "model"
        # The stage's clock is paused while a step is graded, but the deadline of a timed session is not.
        timed = task is None or len(task.steps) == 1
        reachable = sandbox if inside else None
        if not ctx.recorded:
            ctx.info["recorded"] = False
            async with ctx.direct_session(reachable) as direct:
                return await self._run_steps(ctx, sandbox, direct, task)
        async with ctx.gateway_session(reachable, timed=timed) as session:
            try:
                timed_out = await self._run_steps(ctx, sandbox, session, task)
            except BaseException:
                # Record the turns that were sampled until then.
                with contextlib.suppress(RookeryError):
                    await session.end(timeout=END_SECONDS)
                raise
            record = await session.end()
            ctx.metrics["agent/turns"] = float(len(record.turns))
            if not record.turns:
                ctx.log.warning("the agent ended without a model call", launcher=self.launcher.name)
        return timed_out

    async def _run_steps(
        self, ctx: Context, sandbox: Sandbox, session: AgentSession, task: SweTask | None
    ) -> bool:
        """Run the agent once for each step of the task, or once if the task has none.

        Return whether the agent exceeded its time limit.
        """
        low, high = reward_bounds(self)
        steps = task.steps if task is not None else (None,)
        for number, step in enumerate(steps):
            if number and task is not None and step is not None:
                ctx.state["step"], ctx.state["prompt"] = number, step.instruction
                await prepare_step(sandbox, task, step, timeout=max(1.0, ctx.remaining))
            command = await self._prepare_step(ctx, sandbox, session, number)
            if command is None:
                break
            ended = await self._run_agent(
                ctx, sandbox, session, command, step.timeout if step is not None else None
            )
            if ended.reason != "exited":
                return ended.reason == "deadline"
            if step is not None and number + 1 < len(steps):
                if await session.truncation() is not None:  # the budget is exhausted
                    break
                score = await task_kinds.grade_current_step(ctx, low, high)
                if not may_continue(step, score):
                    ctx.log.info(
                        "the remaining steps are skipped: the reward of this one is too low", step=step.name
                    )
                    break
        return False

    async def _prepare_step(
        self, ctx: Context, sandbox: Sandbox, session: AgentSession, number: int
    ) -> Command | None:
        """Write the files for one step and return the command that starts the agent.

        Return None if the files cannot be written because of what the agent did in an earlier step.
        """
        try:
            if number:  # the agent of the previous step may have changed them
                await self._write_programs(sandbox, ctx.state["values"])
            return await self._make_command(ctx, sandbox, session)
        except (OSError, SandboxError) as error:
            lost = isinstance(error, SandboxError) and error.code != "sandbox.refused"
            if not number or lost or isinstance(error, TimeoutError):
                raise
            # Writing was possible in the first step, so the policy caused the failure.
            record = {"launcher": self.launcher.name, "reason": "unstarted", "detail": describe(error)}
            ctx.info.setdefault("agents", []).append(record)
            return None

    async def _run_agent(
        self, ctx: Context, sandbox: Sandbox, session: AgentSession, command: Command, limit: float | None
    ) -> AgentExit:
        """Run the agent once, from start to exit, and store its output and files in the rollout's record.

        `limit` is the step's time limit in seconds. Raise if the agent failed and the policy is not responsible.
        """
        limits = [seconds for seconds in (limit, self.timeout) if seconds is not None]
        process = await sandbox.start(command)
        stdin = ctx.state["prompt"].encode() if self.launcher.prompt == "stdin" else b""
        ended = await ctx.charge_policy(
            "tool", self._wait_for_agent(ctx, process, stdin, session, min(limits, default=math.inf))
        )
        hidden = {name: session.hide_key(getattr(ended.result, name)) for name in ("stdout", "stderr")}
        ended = replace(ended, result=replace(ended.result, **hidden))
        result = ended.result
        ctx.metrics["agent/seconds"] = ctx.metrics.get("agent/seconds", 0.0) + ended.seconds
        succeeded = result.status == "exited" and result.exit_code in self.launcher.ok
        ctx.metrics["agent/exited_zero"] = float(succeeded and ended.reason == "exited")
        stdout = result.stdout.decode("utf-8", "replace")
        ctx.state["printed"] = stdout
        record = {
            "launcher": self.launcher.name,
            "reason": ended.reason,
            "status": result.status,
            "exit_code": result.exit_code,
            "signal": result.signal,
            "killed": ended.killed,
            "seconds": round(ended.seconds, 3),
            "detail": result.detail,
            "stdout": clip(stdout, self.max_log, result.stdout_dropped),
            "stderr": clip(result.stderr.decode("utf-8", "replace"), self.max_log, result.stderr_dropped),
            "files": await self._collect_files(ctx, sandbox, session),
        }
        ctx.info.setdefault("agents", []).append({key: value for key, value in record.items() if value != ""})
        if (path := task_kinds.get_submission_path(ctx, ctx.state["kind"])) != "":
            data = await read_file(sandbox, path, task_kinds.MAX_ANSWER)
            if isinstance(data, bytes):
                text = ctx.state[SUBMISSION] = session.hide_key(data).decode("utf-8", "replace")
                # None says that a file was graded that is too large to be stored.
                ctx.info[SUBMISSION] = text if len(text) <= task_kinds.MAX_STORED else None
        if not succeeded:
            if ended.reason == "exited":
                await session.check_upstream()  # raises if the inference engine hangs
            check_exit(self.launcher.name, ended, await session.status(), sandbox.spec)
        return ended

    async def _wait_for_agent(
        self, ctx: Context, process: Process, stdin: bytes, session: AgentSession, limit: float
    ) -> AgentExit:
        reserve = min(RESERVE, 0.1 * ctx.remaining) if math.isfinite(ctx.remaining) else 0.0
        seconds = min(ctx.remaining - reserve, limit)
        writing = asyncio.create_task(write_stdin(process, stdin), name="agent's input")
        try:
            return await wait_for_exit(ctx, process, session, seconds, grace=self.grace)
        finally:
            writing.cancel()
            await asyncio.wait({writing})
            if not writing.cancelled():
                writing.result()

    async def _make_command(self, ctx: Context, sandbox: Sandbox, session: AgentSession) -> Command:
        """Write the launcher's files into the sandbox and return the command that starts the agent."""
        launcher, prompt = self.launcher, ctx.state["prompt"]
        values = {
            **ctx.state["values"],
            **({"model": session.model} if session.model and self.model == "policy" else {}),
            "prompt": prompt,
            "openai_url": session.openai_url,
            "anthropic_url": session.url,
            "key": session.key,
        }
        task: SweTask | None = ctx.state["task"]
        servers: str = ctx.state["mcp"]
        files = {
            fill_placeholders(path, values): fill_placeholders(text, values)
            for path, text in launcher.files.items()
        }
        if servers and launcher.mcp is not None:
            path = values["mcp_file"]
            files[path] = f"{files.get(path, '')}\n{servers}" if launcher.mcp.append else servers
        files[values["prompt_file"]] = prompt  # always, so that the agent's directory exists
        for path, text in files.items():
            await sandbox.write(path, text.encode())
        extra = launcher.mcp.arguments if servers and launcher.mcp is not None else ()
        argv = tuple(fill_placeholders(text, values) for text in (*launcher.command, *extra)) + self.args
        if any(len(text.encode()) > MAX_ARGUMENT for text in argv):
            raise TaskError(
                f"task {ctx.task.id}: a command-line argument, usually the prompt, exceeds {MAX_ARGUMENT} bytes: "
                f"use a launcher that passes the prompt by file or stdin, not {launcher.name}"
            )
        env = {name: fill_placeholders(text, values) for name, text in launcher.environment.items()}
        if any("\0" in text for text in (*argv, *env.values())):
            raise TaskError(
                f"task {ctx.task.id}: the prompt contains a NUL character, which a command-line argument cannot "
                f"contain: use a launcher that passes the prompt by file or stdin, not {launcher.name}"
            )
        return Command(
            argv=argv,
            # The session's variables override those of the task, which may contain other API keys.
            env={**(task.env if task is not None else {}), **session.environment(), **env, **self.environment},
            cwd=values["workdir"],
            output=4 * self.max_log,
        )

    async def _collect_files(self, ctx: Context, sandbox: Sandbox, session: AgentSession) -> dict[str, str]:
        files = {}
        paths = [fill_placeholders(path, ctx.state["values"]) for path in self.launcher.collect]
        of_task = ctx.task.data.get("collect", ())
        paths += [path for path in of_task if isinstance(path, str)] if isinstance(of_task, list) else []
        for path in paths[:MAX_FILES]:
            data = await read_file(sandbox, path, 16 * MAX_FILE)
            if isinstance(data, bytes):
                data = clip(session.hide_key(data).decode("utf-8", "replace"), MAX_FILE)
            if data is not None:
                files[path] = data
        return files

    # ---- score

    def find_restore_problem(self, task: Task, rollout: Rollout) -> str:
        if DATA_KEY in task.data:
            return find_submission_problem(rollout)
        if SUBMISSION in rollout.info and rollout.info[SUBMISSION] is None:
            return "the file that the agent submitted is too large to be stored"
        return ""

    async def restore(self, ctx: Context, rollout: Rollout, messages: Sequence[Message]) -> None:
        """Restore the agent's file or output. For a `swe` task, install its submission in a new sandbox."""
        kind = ctx.state["kind"] = task_kinds.get_task_kind(ctx)
        ctx.state["messages"] = list(messages)
        ctx.spec = replace(ctx.spec, network="none")
        if kind != "swe":
            agents = rollout.info.get("agents") or [{}]
            ctx.state["printed"] = str(agents[-1].get("stdout", ""))
            if isinstance(text := rollout.info.get(SUBMISSION), str):
                ctx.state[SUBMISSION] = text
            return
        task = with_test_timeout(get_swe_task(ctx.task), ctx.limits.test_timeout, self.test_timeout)
        ctx.spec = sandbox_for(task, ctx.spec, network="run")
        ctx.state["task"], ctx.state["step"], ctx.state["grades"] = task, 0, []
        ctx.state["prepared"] = await prepare(await ctx.sandbox(), task, timeout=ctx.remaining)
        low, high = reward_bounds(self)
        await restore_submissions(
            ctx, rollout, lambda: task_kinds.grade_current_step(ctx, low, high), may_continue
        )

    async def score(self, ctx: Context) -> Score:
        low, high = reward_bounds(self)
        kind: Kind = ctx.state["kind"]
        if kind == "plain":
            return task_kinds.score_answer(ctx, low, high)
        if kind == "code":
            return await task_kinds.grade_program(
                ctx, low, high, partial=self.partial, isolation_cache=self._isolation
            )
        if len(ctx.state["grades"]) <= ctx.state["step"]:
            await task_kinds.grade_current_step(ctx, low, high)
        return combine_scores(ctx.state["task"], ctx.state["grades"], low)


def _is_remote(spec: SandboxSpec) -> bool:
    return bool(spec.provider) and is_remote(spec.provider)


def _check_script(launcher: Launcher, script: str | Path | None) -> Path | None:
    if launcher.script != (script is not None):
        problem = "needs a program: pass script=FILE" if launcher.script else "takes no script"
        raise UsageError(f"the launcher {launcher.name} {problem}")
    if script is None:
        return None
    path = Path(script).expanduser().absolute()
    try:
        if path.stat().st_size > MAX_SCRIPT:
            raise UsageError(f"the script {path} is larger than the maximum of {MAX_SCRIPT} bytes")
        if not path.is_file():
            raise UsageError(f"the script {path} is not a regular file")
        path.open("rb").close()
    except OSError as error:
        raise UsageError(f"the script {path} cannot be read: {error.strerror}") from None
    return path
