"""Scripts that try to get a reward without solving the task. `rookery validate` and the tests run them on
tasks.

Each file `cheat_scripts/NAME.sh` has a description on its first line, optionally `# inside` on its second line,
and then the script. `# inside` marks scripts that act while the program under test runs. A test script is safe
from these only if it runs the program as another user. Scripts without the mark must fail against every test
script.

Guarantees:
- Each script needs only what an agent has: its sandbox and the working directory of any task.
- No script solves a task. A task that rewards one of them can be cheated that way.
"""

from pathlib import Path
from typing import Final

import msgspec

SCRIPTS: Final = Path(__file__).parent / "cheat_scripts"
PRELUDE: Final = "prelude.sh"
IN_PROCESS_MARK: Final = "# inside"


class Cheat(msgspec.Struct, frozen=True, kw_only=True):
    """A script that tries to get an undeserved reward."""

    name: str
    description: str
    script: str
    inside: bool = False
    """True if the cheat acts while the program under test runs."""

    @property
    def full_script(self) -> str:
        """The script, preceded by the functions that all cheat scripts share.

        Run it with bash, or with sh if the sandbox has no bash.
        """
        return f"{(SCRIPTS / PRELUDE).read_text()}\n{self.script}\nexit 0\n"


def _read(path: Path) -> Cheat:
    first, _, script = path.read_text().partition("\n")
    return Cheat(
        name=path.stem,
        description=first.removeprefix("# "),
        script=script,
        inside=script.startswith(f"{IN_PROCESS_MARK}\n"),
    )


CHEATS: Final[tuple[Cheat, ...]] = tuple(
    _read(path) for path in sorted(SCRIPTS.glob("*.sh")) if path.name != PRELUDE
)
BY_NAME: Final = {cheat.name: cheat for cheat in CHEATS}
