"""The task format of Harbor: one directory per task, with `task.toml`, `instruction.md`, `environment/`, `tests/`,
`solution/` and `steps/NAME/…`.

Guarantees:
- Schema 1.4 of `task.toml` and older ones, with `version`, `memory = "2G"`, `storage` and `allow_internet`, are
  read.
- An unknown key is a warning. A requirement that Rookery's sandboxes cannot meet is an error.
- `${NAME}` is replaced by the value that the caller passed, or by its default. Environment variables of this
  machine are never inserted.
- As in Harbor, tests run in the agent's sandbox unless the task specifies a separate one, and the reward comes
  only from a reward file, not from the exit code.
"""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.core import UsageError
from rookery.tasks.file_trees import DOCKERFILE_PREFIX, copy_files
from rookery.tasks.formats import ReadOptions
from rookery.tasks.harbor_config import ConfigTable, HarborConfig
from rookery.tasks.report import ProblemCollector
from rookery.tasks.sidecar import list_fields, make_sidecar, merge_sidecar
from rookery.tasks.swe import SOLUTION, TESTS, WORKSPACE, FileMapping, SweStep, SweTask
from rookery.tasks.task_folder import TaskFolder, parse_image, parse_name

CONFIG_FILE: Final = "task.toml"
DEFAULT_WORKDIR: Final = "/app"
_COMPOSE_FILES: Final = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_NETWORK_MODES: Final = {"none": "no-network", "allow": "allowlist", "all": "public"}
SETUP_SCRIPT: Final = "setup.sh"


class Harbor:
    """The task format `harbor`."""

    name = "harbor"
    priority = 10

    def matches(self, folder: Path) -> bool:
        return (folder / CONFIG_FILE).exists()

    def read(self, folder: Path, id: str, problems: ProblemCollector, options: ReadOptions) -> SweTask | None:  # noqa: A002
        here = TaskFolder(folder, problems)
        document: dict[str, Any] = {}
        if (text := here.text(CONFIG_FILE, needed=True, empty=True)) is not None:
            try:
                document = tomllib.loads(text)
            except (tomllib.TOMLDecodeError, RecursionError) as error:
                problems.error(CONFIG_FILE, f"is not valid TOML: {error}")
        settings = HarborConfig(document, problems, options.variables)
        image, build = _parse_image_or_build(here, settings)
        workdir = settings.workdir or _find_workdir(here, image, problems)
        tables = settings.steps
        if tables:
            found = [_read_step(here, table, settings, workdir, number) for number, table in enumerate(tables)]
            steps = tuple(step for step in found if step is not None)
        else:
            steps = (_read_single_step(here, settings),)
        if not steps:
            return None
        files, first = steps[0].files, msgspec.structs.replace(steps[0], files=())
        task = SweTask(
            id=id,
            format=self.name,
            folder=str(folder),
            steps=(first, *steps[1:]),
            image=image,
            files=files,
            workdir=workdir,
            artifacts=settings.artifacts(workdir),
            env=settings.env,
            user=settings.user,
            memory=settings.memory,
            cpus=settings.cpus,
            disk=settings.disk,
            gpus=settings.gpus,
            network=settings.network,
            allow=settings.allow,
            mcp=settings.mcp,
            rewards=settings.rewards,
            build=build,
            metadata=settings.metadata,
        )
        return merge_sidecar(task, settings.sidecar, "metadata.rookery", problems) if settings.sidecar else task

    def write(self, task: SweTask, folder: Path) -> list[str]:
        _HarborWriter(task, folder).write()
        read = self.read(folder, task.id, ProblemCollector(task.id), ReadOptions())
        sidecar = make_sidecar(task, read)
        if sidecar:
            document = tomllib.loads((folder / CONFIG_FILE).read_text())
            # As JSON, because TOML has no null.
            document.setdefault("metadata", {})["rookery"] = {"json": json.dumps(sidecar)}
            (folder / CONFIG_FILE).write_bytes(msgspec.toml.encode(document))
        return list_fields(sidecar)


def _parse_image_or_build(here: TaskFolder, settings: HarborConfig) -> tuple[str | None, float | None]:
    for name in _COMPOSE_FILES:
        if here.has(f"environment/{name}"):
            here.problems.error(
                f"environment/{name}", "additional services beside the agent's sandbox are not supported"
            )
    if settings.image:
        return parse_image(settings.image, "environment.docker_image", here.problems), None
    if here.has("environment/Dockerfile"):
        here.text("environment/Dockerfile")
        context = here.part("environment", "/")
        return f"{DOCKERFILE_PREFIX}{context[0].source}" if context else None, settings.build
    here.problems.warn("environment", "names no image and has no Dockerfile: the image of the run is used")
    return None, None


def _find_workdir(here: TaskFolder, image: str | None, problems: ProblemCollector) -> str:
    """Return the working directory that the task's Dockerfile sets with WORKDIR.

    Without an image, return `/workspace`. If no usable WORKDIR is found, warn and return `/app`.
    """
    if image is None:
        return WORKSPACE
    found = ""
    text = here.text("environment/Dockerfile", empty=True) if here.has("environment/Dockerfile") else None
    for line in (text or "").splitlines():
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip().strip("\"'")
        if word.upper() == "FROM":
            found = ""
        elif word.upper() == "WORKDIR" and "$" not in rest and ".." not in rest.split("/"):
            found = rest if rest.startswith("/") else f"{found.rstrip('/')}/{rest}" if found else ""
    found = "/" + "/".join(part for part in found.split("/") if part) if found else ""
    if found and not any(found == own or found.startswith(f"{own}/") for own in (TESTS, SOLUTION, "/logs")):
        return found
    problems.warn(
        "environment.workdir",
        f"neither the task nor its Dockerfile names the working directory: using {DEFAULT_WORKDIR}",
    )
    return DEFAULT_WORKDIR


def _read_single_step(here: TaskFolder, settings: HarborConfig) -> SweStep:
    """Return the step that represents a task whose `task.toml` lists no steps."""
    instruction = here.text("instruction.md", needed=True)
    here.text("tests/test.sh", needed=True)
    return SweStep(
        instruction=instruction or "",
        tests=here.part("tests", TESTS),
        solution=_read_solution(here, ""),
        solve_env=settings.solve_env,
        timeout=settings.timeout,
        verifier=settings.verifier,
    )


def _read_step(
    here: TaskFolder, table: ConfigTable, settings: HarborConfig, workdir: str, number: int
) -> SweStep | None:
    problems = here.problems
    name = parse_name(table.take("name"), f"steps[{number}].name", problems)
    more = settings.of_step(table)
    if name is None:
        return None
    at = f"steps/{name}"
    instruction = here.text(f"{at}/instruction.md", needed=True)
    tests = here.part("tests", TESTS) + here.part(f"{at}/tests", TESTS)
    if not here.has("tests/test.sh") or here.has(f"{at}/tests/test.sh"):
        here.text(f"{at}/tests/test.sh", needed=True)
    files: list[FileMapping] = []
    for part in here.part(f"{at}/workdir", workdir):
        files = [
            FileMapping(source=str(found), target=f"{workdir.rstrip('/')}/{found.name}")
            for found in sorted(Path(part.source).iterdir())
            if found.name != SETUP_SCRIPT
        ]
    setup = f"{at}/workdir/{SETUP_SCRIPT}"
    return SweStep(
        name=name,
        instruction=instruction or "",
        tests=tests,
        files=tuple(files),
        setup=here.script(setup) if here.has(setup) else "",
        solution=_read_solution(here, f"{at}/"),
        solve_env=settings.solve_env,
        timeout=more.timeout,
        verifier=more.verifier,
        min_reward=more.min_reward,
        min_reward_parts=more.min_reward_parts,
    )


def _read_solution(here: TaskFolder, at: str) -> tuple[FileMapping, ...]:
    found = here.part(f"{at}solution", SOLUTION)
    if found and not here.has(f"{at}solution/solve.sh"):
        here.problems.warn(f"{at}solution", "has no solve.sh: `rookery validate` cannot run it")
    return found


class _HarborWriter:
    """Writes one task in Harbor's format into an empty directory."""

    def __init__(self, task: SweTask, folder: Path) -> None:
        self.task = task
        self.folder = folder

    def write(self) -> None:
        task = self.task
        plain = {name: value for name, value in task.metadata.items() if name not in ("task", "rookery")}
        document: dict[str, Any] = {"schema_version": "1.4"}
        if len(task.steps) > 1:
            document["multi_step_reward_strategy"] = task.rewards
        if task.artifacts:
            document["artifacts"] = list(task.artifacts)
        about = task.metadata.get("task")
        if isinstance(about, dict) and isinstance(about.get("name"), str) and _is_toml(about):
            document["task"] = about
        if _is_toml(plain) and plain:
            document["metadata"] = plain
        document["environment"] = self._environment()
        first = task.steps[0]
        if task.user is not None:
            document["agent"] = {"user": task.user}
        stepped = len(task.steps) > 1 or first.name or first.setup or task.files or first.files
        if stepped:
            names = [step.name or f"step-{n}" for n, step in enumerate(task.steps, 1)]
            if len(set(names)) < len(names):
                raise UsageError(
                    f"the names of the task's steps are not unique ({', '.join(names)}): "
                    "give each step its own name"
                )
            document["steps"] = [self._step(step, names[n], not n) for n, step in enumerate(task.steps)]
        else:
            self._files(first, self.folder)
            if first.timeout is not None:
                document.setdefault("agent", {})["timeout_sec"] = first.timeout
            document["verifier"] = _dump_verifier(first)
        if first.solve_env and all(step.solve_env == first.solve_env for step in task.steps):
            document["solution"] = {"env": _escape_env(first.solve_env)}
        (self.folder / CONFIG_FILE).write_bytes(msgspec.toml.encode(document))

    def _environment(self) -> dict[str, Any]:
        task = self.task
        made: dict[str, Any] = {}
        if task.image and task.image.startswith(DOCKERFILE_PREFIX):
            shutil.copytree(task.image.removeprefix(DOCKERFILE_PREFIX), self.folder / "environment", symlinks=True)
            if task.build is not None:
                made["build_timeout_sec"] = task.build
        elif task.image:
            made["docker_image"] = task.image
        made["workdir"] = task.workdir
        made["network_mode"] = _NETWORK_MODES[task.network]
        if task.allow:
            made["allowed_hosts"] = list(task.allow)
        if task.cpus is not None:
            made["cpus"] = int(task.cpus) if task.cpus == int(task.cpus) else task.cpus
        for name, value in (("memory_mb", task.memory), ("storage_mb", task.disk)):
            if value is not None and value % (1 << 20) == 0:
                made[name] = value >> 20
        if task.gpus is not None:
            made["gpus"] = task.gpus
        if task.env:
            made["env"] = _escape_env(task.env)
        if task.mcp and _is_toml(list(task.mcp)):
            made["mcp_servers"] = list(task.mcp)
        return made

    def _step(self, step: SweStep, name: str, first: bool) -> dict[str, Any]:
        at = self.folder / "steps" / name
        self._files(step, at)
        parts = (*(self.task.files if first else ()), *step.files)
        workdir = at / "workdir"
        copy_files(parts, self.task.workdir.rstrip("/"), workdir)
        if (workdir / SETUP_SCRIPT).exists():
            raise UsageError(f"the working directory of the task contains {SETUP_SCRIPT}, which Harbor would run")
        if step.setup:
            workdir.mkdir(exist_ok=True)
            shutil.copyfile(step.setup, workdir / SETUP_SCRIPT)
            (workdir / SETUP_SCRIPT).chmod(0o755)
        made: dict[str, Any] = {"name": name}
        if step.min_reward_parts:
            made["min_reward"] = dict(step.min_reward_parts)
        elif step.min_reward is not None:
            made["min_reward"] = step.min_reward
        if step.timeout is not None:
            made["agent"] = {"timeout_sec": step.timeout}
        made["verifier"] = _dump_verifier(step)
        return made

    def _files(self, step: SweStep, at: Path) -> None:
        at.mkdir(parents=True, exist_ok=True)
        (at / "instruction.md").write_text(step.instruction)
        copy_files(step.tests, TESTS, at / "tests")
        copy_files(step.solution, SOLUTION, at / "solution")


def _dump_verifier(step: SweStep) -> dict[str, Any]:
    verifier = step.verifier
    made: dict[str, Any] = {
        "timeout_sec": verifier.timeout,
        "environment_mode": "shared" if verifier.mode == "shared" else "separate",
    }
    if verifier.user is not None:
        made["user"] = verifier.user
    if verifier.env:
        made["env"] = _escape_env(verifier.env)
    if verifier.network is not None:
        made["network_mode"] = _NETWORK_MODES[verifier.network]
        if verifier.allow:
            made["allowed_hosts"] = list(verifier.allow)
    return made


def _escape_env(env: dict[str, str]) -> dict[str, str]:
    """Escape values that begin with `${`, so that they are not replaced as variables when the task is read."""
    return {name: f"${{_:-{value}}}" if value.startswith("${") else value for name, value in env.items()}


def _is_toml(data: Any) -> bool:
    """Return whether TOML can express the data. TOML has no null, for example."""
    try:
        msgspec.toml.encode({"data": data})
    except (TypeError, ValueError):
        return False
    return True
