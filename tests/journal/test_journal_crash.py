"""Tests of kill -9 at any moment: committed records are complete, and none is duplicated."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from journal_kit import turns

from rookery.journal import Journal, RunReader
from rookery.journal.schema import FILE

GROUPS, K = 60, 4

WRITER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from journal_kit import record, turns
from rookery.journal import Journal, RunReader, TokenWriter, encode_turn

folder = Path(sys.argv[1])
with RunReader(folder) as reader:
    todo = reader.unfinished(checksums=True)
journal = Journal.open(folder, linger=0.0)
for lost in todo.lost:
    journal.discard(lost, "tokens lost")
tokens = TokenWriter(folder / "tokens", f"w{os.getpid()}", max_bytes=2000)
for missing in todo.groups:
    group = missing.group.idx
    for member in missing.members:
        extents = tuple(tokens.append(encode_turn(turn)) for turn in turns(f"{group}.{member}", group))
        tokens.flush()
        journal.add_rollout(record(group, member, tokens=extents))
        if member % 2:
            journal.flush()
            print(group, member, flush=True)
            sys.stdin.read(1)
    journal.set_group(group, "finished")
journal.end("finished")
tokens.close()
journal.close()
"""


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_sigkill_loses_and_duplicates_no_committed_record(run: Path, seed: int) -> None:
    rng = random.Random(seed)
    with Journal.create(run, {}) as journal:
        for group in range(GROUPS):
            journal.add_group(group, stream="s", position=group, task=group, k=K)
    committed: set[tuple[int, int]] = set()
    kills = 0
    while True:
        command = [sys.executable, "-c", WRITER, str(run), str(Path(__file__).parent)]
        # It may be anywhere in the `ahead` steps after the last one it reported when the kill arrives.
        steps, ahead = rng.randint(0, 20), rng.randint(1, 10)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdin is not None
            writer.stdin.write("." * (steps + ahead))
            writer.stdin.flush()
            for _ in range(steps):
                if line := writer.stdout.readline():
                    committed.add(tuple(map(int, line.split())))  # type: ignore[arg-type]
            writer.kill()
            for line in writer.stdout:
                if line.endswith("\n"):
                    committed.add(tuple(map(int, line.split())))  # type: ignore[arg-type]
        kills += 1
        with RunReader(run) as reader:
            records = list(reader.iter_rollouts())
            keys = [(one.group, one.member) for one in records]
            assert len(keys) == len(set(keys))
            assert committed <= set(keys)
            assert reader.counts() == ({"completed": len(keys)} if keys else {})
            for one in records:
                assert reader.turns(one) == turns(one.id, one.group)
            for file in reader.tokens.files():
                list(reader.tokens.scan(file))
            left = reader.unfinished(checksums=True)
            assert left.lost == ()
            assert sum(len(missing.members) for missing in left.groups) == GROUPS * K - len(keys)
            if not left.groups:
                break
            assert reader.status == "interrupted"
    assert kills >= 2 * GROUPS // 31
    assert len(keys) == GROUPS * K


def test_kill_before_the_first_commit_is_reported(run: Path) -> None:
    """A writer killed in `create` leaves an empty file, not half a journal."""
    code = (
        "import os, signal, sys; from pathlib import Path; from rookery.journal import schema, Journal\n"
        "schema._insert_start = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Journal.create(Path(sys.argv[1]), {})"
    )
    assert subprocess.run([sys.executable, "-c", code, str(run)], check=False).returncode == -9
    from rookery.core import JournalError

    assert (run / FILE).is_file()
    with pytest.raises(JournalError, match=FILE):
        RunReader(run)
