"""Tests of `rookery.journal.reader` and `rookery.journal.folder`."""

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from journal_kit import Mount, record, record_with_tokens, remount_read_only, turns

from rookery.core import Failed, Rollout, UsageError
from rookery.journal import Journal, RunReader, create_run, find_run, list_runs, slug
from rookery.journal.schema import FILE

NOW = datetime(2026, 11, 15, 6, 1, 2, tzinfo=UTC)

LIVE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from journal_kit import record
from rookery.journal import Journal
with Journal.create(Path(sys.argv[1]), {}, linger=0.0) as journal:
    print("ready", flush=True)
    for i in range(int(sys.argv[3])):
        sys.stdin.readline()
        journal.event("about", {"i": i})
        journal.add_rollout(record(i, 0))
        journal.flush()
    journal.end("finished")
"""


def live(run: Path, n: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", LIVE, str(run), str(Path(__file__).parent), str(n)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


def test_follower_sees_every_commit_once_and_ends_with_the_run(run: Path) -> None:
    with live(run, 5) as writer, RunReader(run) as reader:
        assert writer.stdin is not None
        events, rollouts = [], []
        for item in reader.follow(interval=0.005):
            if isinstance(item, Rollout):
                rollouts.append(item.group)
            else:
                events.append(item.kind)
            if (isinstance(item, Rollout) or item.kind == "run.started") and len(rollouts) < 5:
                assert reader.status == "running"
                writer.stdin.write("go\n")
                writer.stdin.flush()
        assert rollouts == [0, 1, 2, 3, 4]
        assert events == ["run.started", *["about"] * 5, "run.ended"]
        assert reader.status == "finished"


def test_following_a_dead_run_ends(run: Path) -> None:
    with Journal.create(run, {}) as journal:
        for i in range(600):
            journal.add_rollout(record(i, 0))
    with RunReader(run) as reader:
        assert sum(isinstance(item, Rollout) for item in reader.follow()) == 600
        assert sum(isinstance(item, Rollout) for item in reader.follow(after_rollout=590)) == 10


def test_rollouts_are_paged_and_filtered_by_label(run: Path) -> None:
    lost = Failed("infra", "sandbox.lost", "gone")
    with Journal.create(run, {}) as journal:
        for i in reversed(range(10)):
            journal.add_rollout(record(i, 0, outcome=lost if i % 2 else None))
    with RunReader(run) as reader:
        assert [one.group for one in reader.rollouts(2, 3)] == [7, 6, 5]
        assert [one.group for one in reader.rollouts(label="sandbox.lost")] == [9, 7, 5, 3, 1]
        assert [one.group for one in reader.iter_rollouts(page=3)] == list(range(10))
        assert reader.rollout("3.0") == record(3, 0, outcome=lost)
        assert reader.rollout("nope") is None
        assert reader.mean_reward() == 0.5


def test_missing_members_and_lost_tokens_count_as_unfinished(run: Path) -> None:
    with Journal.create(run, {}) as journal:
        for group in range(4):
            journal.add_group(group, stream="s", position=group, task=group, k=2)
        for member in range(2):
            journal.add_rollout(record_with_tokens(run, 0, member, writer=f"good{member}"))
        journal.add_rollout(record_with_tokens(run, 1, 0, writer="good"))
        journal.add_rollout(record_with_tokens(run, 1, 1, writer="bad"))
        journal.set_group(2, "filtered")
    with RunReader(run) as reader:
        left = reader.unfinished()
        assert [(one.group.idx, one.members) for one in left.groups] == [(3, (0, 1))]
        assert left.lost == ()
        assert reader.turns(reader.rollouts()[0]) == turns("0.0", 0)
    path = run / "tokens" / "bad-0.rtk"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\xff")
    with RunReader(run) as reader:
        assert reader.unfinished().lost == ()
        assert reader.unfinished(checksums=True).lost == ("1.1",)
    os.truncate(path, 20)
    with RunReader(run) as reader:
        left = reader.unfinished()
        assert [(one.group.idx, one.members) for one in left.groups] == [(1, (1,)), (3, (0, 1))]
        assert left.lost == ("1.1",)


def test_stopped_run_has_its_status_until_it_is_resumed(run: Path) -> None:
    with Journal.create(run, {}) as journal:
        journal.end("stopped", reason="breaker")
    with RunReader(run) as reader:
        assert reader.status == "stopped"
    Journal.open(run).close()
    with RunReader(run) as reader:
        assert reader.status == "interrupted"


@pytest.mark.needs("mount")
def test_run_on_a_read_only_disk_is_readable(disk: Mount) -> None:
    root = disk(2048)
    folder = create_run(root, "env", "m", now=NOW)
    with Journal.create(folder, {"a": 1}) as journal:
        journal.add_rollout(record_with_tokens(folder, 0, 0))
    remount_read_only(root)
    with RunReader(find_run("latest", root)) as reader:
        assert reader.config() == {"a": 1}
        assert reader.turns(reader.rollouts()[0]) == turns("0.0", 0)
        assert len(list(reader.follow())) == 2
    with pytest.raises(UsageError, match="Read-only file system"):
        create_run(root, "env", "m", now=NOW)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("arith", "arith"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("path/to/my env.py", "my-env"),
        ("pkg.mod:Attr", "pkg.mod-attr"),
        ("../../etc", "etc"),
        ("..", "x"),
        ("", "x"),
        ("日本", "x"),
        ("a" * 99, "a" * 24),
        ("https://host:1/v1/", "v1"),
    ],
)
def test_slug_is_safe_for_any_name(name: str, wanted: str) -> None:
    assert slug(name) == wanted


def test_run_directory_is_new_and_latest_points_to_it(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "runs"
    folders = [create_run(root, "arith", "Qwen/Qwen3", now=NOW) for _ in range(20)]
    assert len(set(folders)) == 20
    assert folders[0].name.startswith("20261115T060102Z-arith-qwen3-")
    assert (root / "latest").resolve() == folders[-1].resolve()
    assert len(os.listdir(root)) == 21


def test_failing_to_create_the_latest_link_is_not_fatal(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    assert create_run(tmp_path, "e", "m", now=NOW).is_dir()
    assert len(os.listdir(tmp_path)) == 2


def test_unusable_output_directory_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file"):
        create_run(tmp_path / "file", "e", "m", now=NOW)


def test_run_is_found_by_path_name_prefix_suffix_or_latest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "runs"))):
        find_run("latest", tmp_path / "runs")
    with pytest.raises(UsageError):
        find_run("x", tmp_path / "runs")
    one = create_run(tmp_path, "arith", "m", now=NOW)
    two = create_run(tmp_path, "chess", "m", now=NOW.replace(hour=7))
    for folder in (one, two):
        Journal.create(folder, {}).close()
    (tmp_path / "other").mkdir()
    assert find_run(str(one), tmp_path / "nowhere") == one.resolve()
    assert find_run(one.name, tmp_path) == one.resolve()
    assert find_run(one.name[:15], tmp_path) == one.resolve()
    assert find_run(two.name[-9:], tmp_path) == two.resolve()
    assert find_run("latest", tmp_path) == two.resolve()
    with pytest.raises(UsageError, match=r"\b2\b"):
        find_run("2026", tmp_path)
    with pytest.raises(UsageError, match=one.name):
        find_run("arith", tmp_path)
    with pytest.raises(UsageError, match="2026"):
        find_run("zzzz", tmp_path)
    with pytest.raises(UsageError):
        find_run("./other", tmp_path)


def test_unreadable_run_does_not_hide_others(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    good = create_run(tmp_path, "arith", "m", now=NOW)
    bad = create_run(tmp_path, "arith", "m", now=NOW.replace(hour=7))
    (bad / FILE).write_bytes(b"junk" * 1000)
    with Journal.create(good, {}, env="arith", model="m") as journal:
        journal.add_rollout(record(0, 0))
        journal.end("finished")
        assert list_runs(tmp_path)[1].status == "running"
    first, second = list_runs(tmp_path)
    assert (first.name, first.status) == (bad.name, "unreadable")
    assert FILE in first.detail
    assert (second.name, second.status, second.rollouts, second.mean_reward) == (good.name, "finished", 1, 0.5)
    assert (second.env, second.model) == ("arith", "m")
    assert len(list_runs(tmp_path, limit=1)) == 1


def test_runs_of_the_same_second_are_listed_newest_first(tmp_path: Path) -> None:
    created = []
    for _ in range(6):
        folder = create_run(tmp_path, "arith", "m", now=NOW)
        Journal.create(folder, {}, env="arith", model="m").close()
        created.append(folder.name)
    assert [run.name for run in list_runs(tmp_path)] == created[::-1]


def test_one_corrupt_record_does_not_hide_the_others(run: Path) -> None:
    with Journal.create(run, {}) as journal:
        for member in range(3):
            journal.add_rollout(record(0, member, reward=0.5))
        journal.add_group(0, stream="main", position=0, task=0, k=3)
    with contextlib.closing(sqlite3.connect(run / FILE)) as connection:
        connection.execute("UPDATE rollouts SET record = x'c1c1' WHERE member = 1")
        connection.commit()
    with RunReader(run) as reader:
        found = list(reader.iter_rollouts())
        assert [one.id for one in found] == ["0.0", "0.1", "0.2"]
        assert [one.reward for one in found] == [0.5, None, 0.5]
        outcome = found[1].outcome
        assert isinstance(outcome, Failed)
        assert (outcome.fault, outcome.cause, outcome.stage) == ("infra", "engine.tokens", "load")
        assert reader.rollout("0.1") == found[1]
        assert reader.rollouts() == found
        assert reader.unfinished().lost == ("0.1",)
