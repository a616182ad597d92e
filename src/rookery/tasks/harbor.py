"""Harbor's task folders: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`, `steps/NAME/…`.

Promises:
- schema 1.4 and what came before it are read: `version`, `memory = "2G"`, `storage`, `allow_internet`;
- a key that is not known is a warning, what a task needs and a box here cannot give is a problem;
- `${NAME}` means what the caller passed under that name, else its default: nothing of this machine's environment
  gets into a box;
- tests run in the agent's box where the task does not say otherwise, as in Harbor, and only a reward file counts.
"""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.core import UsageError
from rookery.tasks import toml
from rookery.tasks.folders import Folder, image_of, name_of
from rookery.tasks.formats import Reading
from rookery.tasks.harbor_keys import Keys, Settings
from rookery.tasks.parts import DOCKERFILE, lay_out
from rookery.tasks.report import Notes
from rookery.tasks.sidecars import aside_of, merged, names_of
from rookery.tasks.swe import SOLUTION, TESTS, WORKSPACE, Part, SweStep, SweTask

CONFIG: Final = "task.toml"
USUAL_WORKDIR: Final = "/app"
_COMPOSE: Final = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_MODES: Final = {"none": "no-network", "allow": "allowlist", "all": "public"}
SETUP: Final = "setup.sh"


class Harbor:
    """`rookery.task_formats: harbor`."""

    name = "harbor"
    rank = 10

    def knows(self, folder: Path) -> bool:
        return (folder / CONFIG).exists()

    def read(self, folder: Path, id: str, notes: Notes, given: Reading) -> SweTask | None:  # noqa: A002
        here = Folder(folder, notes)
        document: dict[str, Any] = {}
        if (text := here.text(CONFIG, needed=True, empty=True)) is not None:
            try:
                document = tomllib.loads(text)
            except (tomllib.TOMLDecodeError, RecursionError) as error:
                notes.wrong(CONFIG, f"it is not TOML: {error}")
        settings = Settings(document, notes, given.variables)
        image, build = _image(here, settings)
        workdir = settings.workdir or _workdir(here, image, notes)
        tables = settings.steps
        if tables:
            found = [_step(here, table, settings, workdir, number) for number, table in enumerate(tables)]
            steps = tuple(step for step in found if step is not None)
        else:
            steps = (_only(here, settings),)
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
        return merged(task, settings.aside, "metadata.rookery", notes) if settings.aside else task

    def write(self, task: SweTask, folder: Path) -> list[str]:
        _Writing(task, folder).write()
        read = self.read(folder, task.id, Notes(task.id), Reading())
        said = aside_of(task, read)
        if said:
            document = tomllib.loads((folder / CONFIG).read_text())
            # As JSON: TOML has no null.
            document.setdefault("metadata", {})["rookery"] = {"json": json.dumps(said)}
            (folder / CONFIG).write_text(toml.dumps(document))
        return names_of(said)


def _image(here: Folder, settings: Settings) -> tuple[str | None, float | None]:
    for name in _COMPOSE:
        if here.has(f"environment/{name}"):
            here.notes.wrong(f"environment/{name}", "services beside the agent's box cannot be run")
    if settings.image:
        return image_of(settings.image, "environment.docker_image", here.notes), None
    if here.has("environment/Dockerfile"):
        here.text("environment/Dockerfile")
        context = here.part("environment", "/")
        return f"{DOCKERFILE}{context[0].source}" if context else None, settings.build
    here.notes.warn("environment", "it names no image and has no Dockerfile: the run's image is used")
    return None, None


def _workdir(here: Folder, image: str | None, notes: Notes) -> str:
    """What the Dockerfile makes the working folder."""
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
    notes.warn("environment.workdir", f"neither task nor Dockerfile says where the agent works: {USUAL_WORKDIR}")
    return USUAL_WORKDIR


def _only(here: Folder, settings: Settings) -> SweStep:
    """The step of a task that has none."""
    instruction = here.text("instruction.md", needed=True)
    here.text("tests/test.sh", needed=True)
    return SweStep(
        instruction=instruction or "",
        tests=here.part("tests", TESTS),
        solution=_solution(here, ""),
        solve_env=settings.solve_env,
        timeout=settings.timeout,
        verifier=settings.verifier,
    )


def _step(here: Folder, table: Keys, settings: Settings, workdir: str, number: int) -> SweStep | None:
    notes = here.notes
    name = name_of(table.take("name"), f"steps[{number}].name", notes)
    more = settings.of_step(table)
    if name is None:
        return None
    at = f"steps/{name}"
    instruction = here.text(f"{at}/instruction.md", needed=True)
    tests = here.part("tests", TESTS) + here.part(f"{at}/tests", TESTS)
    if not here.has("tests/test.sh") or here.has(f"{at}/tests/test.sh"):
        here.text(f"{at}/tests/test.sh", needed=True)
    files: list[Part] = []
    for part in here.part(f"{at}/workdir", workdir):
        files = [
            Part(source=str(found), target=f"{workdir.rstrip('/')}/{found.name}")
            for found in sorted(Path(part.source).iterdir())
            if found.name != SETUP
        ]
    setup = f"{at}/workdir/{SETUP}"
    return SweStep(
        name=name,
        instruction=instruction or "",
        tests=tests,
        files=tuple(files),
        setup=here.script(setup) if here.has(setup) else "",
        solution=_solution(here, f"{at}/"),
        solve_env=settings.solve_env,
        timeout=more.timeout,
        verifier=more.verifier,
        enough=more.enough,
        enough_parts=more.enough_parts,
    )


def _solution(here: Folder, at: str) -> tuple[Part, ...]:
    found = here.part(f"{at}solution", SOLUTION)
    if found and not here.has(f"{at}solution/solve.sh"):
        here.notes.warn(f"{at}solution", "it has no solve.sh: `rookery validate` cannot run it")
    return found


class _Writing:
    """One task into an empty folder."""

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
        if isinstance(about, dict) and isinstance(about.get("name"), str) and _writable(about):
            document["task"] = about
        if _writable(plain) and plain:
            document["metadata"] = plain
        document["environment"] = self._environment()
        first = task.steps[0]
        if task.user is not None:
            document["agent"] = {"user": task.user}
        stepped = len(task.steps) > 1 or first.name or first.setup or task.files or first.files
        if stepped:
            names = [step.name or f"step-{n}" for n, step in enumerate(task.steps, 1)]
            if len(set(names)) < len(names):
                raise UsageError("two of its steps have the same name")
            document["steps"] = [self._step(step, names[n], not n) for n, step in enumerate(task.steps)]
        else:
            self._files(first, self.folder)
            if first.timeout is not None:
                document.setdefault("agent", {})["timeout_sec"] = first.timeout
            document["verifier"] = _verifier(first)
        if first.solve_env and all(step.solve_env == first.solve_env for step in task.steps):
            document["solution"] = {"env": _plain_env(first.solve_env)}
        (self.folder / CONFIG).write_text(toml.dumps(document))

    def _environment(self) -> dict[str, Any]:
        task = self.task
        made: dict[str, Any] = {}
        if task.image and task.image.startswith(DOCKERFILE):
            shutil.copytree(task.image.removeprefix(DOCKERFILE), self.folder / "environment", symlinks=True)
            if task.build is not None:
                made["build_timeout_sec"] = task.build
        elif task.image:
            made["docker_image"] = task.image
        made["workdir"] = task.workdir
        made["network_mode"] = _MODES[task.network]
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
            made["env"] = _plain_env(task.env)
        if task.mcp and _writable(list(task.mcp)):
            made["mcp_servers"] = list(task.mcp)
        return made

    def _step(self, step: SweStep, name: str, first: bool) -> dict[str, Any]:
        at = self.folder / "steps" / name
        self._files(step, at)
        parts = (*(self.task.files if first else ()), *step.files)
        place = at / "workdir"
        lay_out(parts, self.task.workdir.rstrip("/"), place)
        if (place / SETUP).exists():
            raise UsageError(f"its files hold a {SETUP} in the working folder, which Harbor would run")
        if step.setup:
            place.mkdir(exist_ok=True)
            shutil.copyfile(step.setup, place / SETUP)
            (place / SETUP).chmod(0o755)
        made: dict[str, Any] = {"name": name}
        if step.enough_parts:
            made["min_reward"] = dict(step.enough_parts)
        elif step.enough is not None:
            made["min_reward"] = step.enough
        if step.timeout is not None:
            made["agent"] = {"timeout_sec": step.timeout}
        made["verifier"] = _verifier(step)
        return made

    def _files(self, step: SweStep, at: Path) -> None:
        at.mkdir(parents=True, exist_ok=True)
        (at / "instruction.md").write_text(step.instruction)
        lay_out(step.tests, TESTS, at / "tests")
        lay_out(step.solution, SOLUTION, at / "solution")


def _verifier(step: SweStep) -> dict[str, Any]:
    verifier = step.verifier
    made: dict[str, Any] = {
        "timeout_sec": verifier.timeout,
        "environment_mode": "shared" if verifier.mode == "shared" else "separate",
    }
    if verifier.user is not None:
        made["user"] = verifier.user
    if verifier.env:
        made["env"] = _plain_env(verifier.env)
    if verifier.network is not None:
        made["network_mode"] = _MODES[verifier.network]
        if verifier.allow:
            made["allowed_hosts"] = list(verifier.allow)
    return made


def _plain_env(env: dict[str, str]) -> dict[str, str]:
    """A value that looks like `${…}` is written so that it means itself."""
    return {name: f"${{_:-{value}}}" if value.startswith("${") else value for name, value in env.items()}


def _writable(data: Any) -> bool:
    try:
        toml.dumps({"data": data})
    except ValueError:
        return False
    return True
