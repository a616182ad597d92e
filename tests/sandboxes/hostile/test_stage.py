"""The hostile programs look first where they are, and there are enough of them."""

import subprocess
import sys

import pytest

from tests.sandboxes.hostile.all import CURIOUS, LETHAL
from tests.sandboxes.hostile.stage import PRELUDE, Program


def test_there_are_sixty_of_them() -> None:
    names = [program.name for program in (*LETHAL, *CURIOUS)]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.parametrize("program", LETHAL, ids=lambda program: program.name)
def test_a_lethal_program_looks_first_where_it_is(program: Program) -> None:
    if program.argv[0] == "python3":
        assert program.source.startswith(PRELUDE)
    else:
        assert program.source.startswith("[ \"$(tr -d '\\0' < /proc/1/cmdline)\" = sandbox ] || exit 1;")


def test_outside_of_a_sandbox_they_refuse() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + "print('started')"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert "refused" in done.stderr
