"""The task format `open-instruct`: one directory per task, as in AllenAI's open-instruct.

    instruction.md          the prompt                     tests/test.sh       grades in a fresh sandbox
    image.txt               the image (optional)           setup.sh            runs before the agent
    environment/seeds/      files of the working directory  solution/solve.sh   for `rookery validate`
    rookery.json            fields that the format lacks; only Rookery reads it

Guarantees:
- A task is graded in a fresh sandbox, by the exit code of `tests/test.sh` if that script writes no reward.
- Fields in `rookery.json` override what the other files imply. An unknown field in it is an error.
"""

import shutil
from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.core import UsageError
from rookery.tasks.file_trees import copy_files
from rookery.tasks.formats import ReadOptions
from rookery.tasks.report import ProblemCollector
from rookery.tasks.sidecar import list_fields, make_sidecar, merge_sidecar
from rookery.tasks.swe import SOLUTION, TESTS, WORKSPACE, SweStep, SweTask
from rookery.tasks.task_folder import TaskFolder, parse_image

SIDECAR_FILE: Final = "rookery.json"
SEEDS: Final = "environment/seeds"
DOCKERFILE: Final = "environment/image"
"""Directory in a task where `OpenInstruct.write` stores the build context of an image with a Dockerfile."""
_SIGNS: Final = ("instruction.md", "image.txt", "setup.sh", "tests/test.sh", SEEDS)


class OpenInstruct:
    """The task format `open-instruct`."""

    name = "open-instruct"
    priority = 0

    def matches(self, folder: Path) -> bool:
        return any((folder / sign).exists() for sign in _SIGNS)

    def read(self, folder: Path, id: str, problems: ProblemCollector, options: ReadOptions) -> SweTask | None:  # noqa: A002, ARG002
        here = TaskFolder(folder, problems)
        sidecar: Any = None
        if here.has(SIDECAR_FILE) and (text := here.text(SIDECAR_FILE)) is not None:
            try:
                sidecar = msgspec.json.decode(text)
            except msgspec.DecodeError as error:
                problems.error(SIDECAR_FILE, f"is not valid JSON: {error}")
        workdir = sidecar.get("workdir", WORKSPACE) if isinstance(sidecar, dict) else WORKSPACE
        instruction = here.text("instruction.md", needed=True)
        image = here.text("image.txt") if here.has("image.txt") else None
        if image is not None:
            image = parse_image(image, "image.txt", problems)
        elif here.has(f"{DOCKERFILE}/Dockerfile") and (context := here.part(DOCKERFILE, "/")):
            image = f"dockerfile:{context[0].source}"
        here.text("tests/test.sh", needed=True)
        solution = here.part("solution", SOLUTION)
        if solution and not here.has("solution/solve.sh"):
            problems.warn("solution", "has no solve.sh: `rookery validate` cannot run it")
        task = SweTask(
            id=id,
            format=self.name,
            folder=str(folder),
            image=image,
            files=here.part(SEEDS, workdir if isinstance(workdir, str) else WORKSPACE),
            steps=(
                SweStep(
                    instruction=instruction or "",
                    tests=here.part("tests", TESTS),
                    setup=here.script("setup.sh") if here.has("setup.sh") else "",
                    solution=solution,
                ),
            ),
        )
        return merge_sidecar(task, sidecar, SIDECAR_FILE, problems) if sidecar is not None else task

    def write(self, task: SweTask, folder: Path) -> list[str]:
        if len(task.steps) > 1:
            raise UsageError(f"the task has {len(task.steps)} steps, but the format open-instruct supports one")
        step = task.steps[0]
        (folder / "instruction.md").write_text(step.instruction)
        if task.image and task.image.startswith("dockerfile:"):
            shutil.copytree(task.image.removeprefix("dockerfile:"), folder / DOCKERFILE, symlinks=True)
        elif task.image:
            (folder / "image.txt").write_text(f"{task.image}\n")
        copy_files(task.files + step.files, task.workdir, folder / SEEDS)
        copy_files(step.tests, TESTS, folder / "tests")
        copy_files(step.solution, SOLUTION, folder / "solution")
        if step.setup:
            shutil.copyfile(step.setup, folder / "setup.sh")
            (folder / "setup.sh").chmod(0o755)
        sidecar = make_sidecar(task, self.read(folder, task.id, ProblemCollector(task.id), ReadOptions()))
        if sidecar:
            (folder / SIDECAR_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(sidecar)) + b"\n")
        return list_fields(sidecar)
