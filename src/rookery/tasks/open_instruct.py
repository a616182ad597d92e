"""The folders of open-instruct: `instruction.md`, `image.txt`, `environment/seeds`, `setup.sh`, `tests/test.sh`.

    instruction.md          the prompt                     tests/test.sh       decides, in a box of its own
    image.txt               the image, where one is named  setup.sh            runs before the agent
    environment/seeds/      lies in the working folder     solution/solve.sh   for `rookery validate`
    rookery.json            what the format has no place for; others do not read it

Promises:
- a task is graded in a fresh box, and by the script's exit code where it writes no reward;
- what `rookery.json` says goes over what the folder implies, and a field that it does not know is a problem.
"""

import shutil
from pathlib import Path
from typing import Any, Final

import msgspec

from rookery.core import UsageError
from rookery.tasks.folders import Folder, image_of
from rookery.tasks.formats import Reading
from rookery.tasks.parts import lay_out
from rookery.tasks.report import Notes
from rookery.tasks.sidecars import aside_of, merged, names_of
from rookery.tasks.swe import SOLUTION, TESTS, WORKSPACE, SweStep, SweTask

ASIDE: Final = "rookery.json"
SEEDS: Final = "environment/seeds"
DOCKERFILE: Final = "environment/image"
"""Where a conversion puts what an image is built from."""
_SIGNS: Final = ("instruction.md", "image.txt", "setup.sh", "tests/test.sh", SEEDS)


class OpenInstruct:
    """`rookery.task_formats: open-instruct`."""

    name = "open-instruct"
    rank = 0

    def knows(self, folder: Path) -> bool:
        return any((folder / sign).exists() for sign in _SIGNS)

    def read(self, folder: Path, id: str, notes: Notes, given: Reading) -> SweTask | None:  # noqa: A002, ARG002
        here = Folder(folder, notes)
        said: Any = None
        if here.has(ASIDE) and (text := here.text(ASIDE)) is not None:
            try:
                said = msgspec.json.decode(text)
            except msgspec.DecodeError as error:
                notes.wrong(ASIDE, f"it is not JSON: {error}")
        workdir = said.get("workdir", WORKSPACE) if isinstance(said, dict) else WORKSPACE
        instruction = here.text("instruction.md", needed=True)
        image = here.text("image.txt") if here.has("image.txt") else None
        if image is not None:
            image = image_of(image, "image.txt", notes)
        elif here.has(f"{DOCKERFILE}/Dockerfile") and (context := here.part(DOCKERFILE, "/")):
            image = f"dockerfile:{context[0].source}"
        here.text("tests/test.sh", needed=True)
        solution = here.part("solution", SOLUTION)
        if solution and not here.has("solution/solve.sh"):
            notes.warn("solution", "it has no solve.sh: `rookery validate` cannot run it")
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
        return merged(task, said, ASIDE, notes) if said is not None else task

    def write(self, task: SweTask, folder: Path) -> list[str]:
        if len(task.steps) > 1:
            raise UsageError(f"it has {len(task.steps)} steps, and a folder of open-instruct has one")
        step = task.steps[0]
        (folder / "instruction.md").write_text(step.instruction)
        if task.image and task.image.startswith("dockerfile:"):
            shutil.copytree(task.image.removeprefix("dockerfile:"), folder / DOCKERFILE, symlinks=True)
        elif task.image:
            (folder / "image.txt").write_text(f"{task.image}\n")
        lay_out(task.files + step.files, task.workdir, folder / SEEDS)
        lay_out(step.tests, TESTS, folder / "tests")
        lay_out(step.solution, SOLUTION, folder / "solution")
        if step.setup:
            shutil.copyfile(step.setup, folder / "setup.sh")
            (folder / "setup.sh").chmod(0o755)
        said = aside_of(task, self.read(folder, task.id, Notes(task.id), Reading()))
        if said:
            (folder / ASIDE).write_bytes(msgspec.json.format(msgspec.json.encode(said)) + b"\n")
        return names_of(said)
