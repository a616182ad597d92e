"""Ways to get a reward that was not earned, as data: what `rookery validate` and the tests try on a task.

    cheat_scripts/NAME.sh    first line: what it does; second line `# inside`, where it is one; then the script

Promises:
- each is a script that an agent could run in its box, in the working folder, whatever the task is;
- none of them repairs anything: a task that gives one of them a reward can be cheated that way.

`inside` marks those that act while the program under test runs: only a script that runs it as another user refuses
them for certain; the others are refused for every script. They are hostile on purpose: nothing else runs them.
"""

from pathlib import Path
from typing import Final

import msgspec

FOLDER: Final = Path(__file__).parent / "cheat_scripts"
SHARED: Final = "prelude.sh"
INSIDE: Final = "# inside"


class Cheat(msgspec.Struct, frozen=True, kw_only=True):
    """One way to cheat."""

    name: str
    does: str
    script: str
    inside: bool = False

    @property
    def whole(self) -> str:
        """With the functions that the scripts share; to be run by bash, or by sh where there is none."""
        return f"{(FOLDER / SHARED).read_text()}\n{self.script}\nexit 0\n"


def _read(path: Path) -> Cheat:
    first, _, script = path.read_text().partition("\n")
    return Cheat(
        name=path.stem, does=first.removeprefix("# "), script=script, inside=script.startswith(f"{INSIDE}\n")
    )


CHEATS: Final[tuple[Cheat, ...]] = tuple(
    _read(path) for path in sorted(FOLDER.glob("*.sh")) if path.name != SHARED
)
BY_NAME: Final = {cheat.name: cheat for cheat in CHEATS}
