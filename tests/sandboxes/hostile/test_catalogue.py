"""Hostile programs refuse to run outside of sandboxes, and there are enough of them."""

import subprocess
import sys

import pytest

from tests.sandboxes.hostile.catalogue import DESTRUCTIVE, PROBING
from tests.sandboxes.hostile.program import PRELUDE, HostileProgram


def test_there_are_at_least_sixty_programs() -> None:
    names = [program.name for program in (*DESTRUCTIVE, *PROBING)]
    assert len(names) == len(set(names)) >= 60


@pytest.mark.parametrize("program", DESTRUCTIVE, ids=lambda program: program.name)
def test_destructive_program_checks_that_it_is_in_a_sandbox(program: HostileProgram) -> None:
    if program.argv[0] == "python3":
        assert program.source.startswith(PRELUDE)
    else:
        assert program.source.startswith("[ \"$(tr -d '\\0' < /proc/1/cmdline)\" = sandbox ] || exit 1;")


def test_programs_refuse_to_run_outside_a_sandbox() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + "print('started')"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr
