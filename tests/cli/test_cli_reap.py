"""`rookery reap` removes sandboxes of dead owners and never those of live ones."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rookery.journal import open_lock
from rookery.sandbox_runtime import processes
from rookery.sandboxes import leases, reap
from rookery.sandboxes.local.keeper_reaper import CGROUPS_FILE, KeeperCgroups, reap_keepers, remove_cgroups
from rookery.sandboxes.reaper import SCRATCH_PREFIX, scratch_home
from tests.cli.helpers import environ, rookery
from tests.cli.sandbox_kit import cgroups_of, local_sandboxes, run_cli

__all__ = ["local_sandboxes"]

OWNER = """
import asyncio, sys
from pathlib import Path
from rookery.core import SandboxSpec
from rookery.sandboxes import Command, ProviderHome, open_provider

async def main():
    home = ProviderHome(folder=Path(sys.argv[1]), run=Path(sys.argv[1]).parent.name)
    provider = open_provider(sys.argv[2], home)
    sandboxes = [await provider.create(SandboxSpec(wall=600), attempt="a") for _ in range(2)]
    running = await sandboxes[0].start(Command(argv=("sh", "-c", "echo up; sleep 600")))
    async for _ in running.output():
        break
    keeper = (await (await provider.keeper()).status())["pid"] if sys.argv[2] == "local" else 0
    print(keeper, flush=True)
    for line in sys.stdin:  # its loop stands still: it cleans nothing by itself
        result = await sandboxes[1].exec(Command(argv=("echo", "alive")))
        print(result.stdout.decode().strip(), flush=True)

asyncio.run(main())
"""


class Owner:
    """A process that owns two sandboxes of a run."""

    def __init__(self, run: Path, provider: str = "local") -> None:
        self.folder = run / "sandboxes"
        self.folder.mkdir(parents=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(self.folder), provider],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ(),
            text=True,
        )
        assert self.process.stdout is not None
        self.keeper = int(self.process.stdout.readline())

    def alive(self) -> bool:
        """Return True if its second sandbox still runs commands."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline() == "alive\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_both(self) -> None:
        if self.keeper:
            os.kill(self.keeper, signal.SIGKILL)
        self.kill()

    def close(self) -> None:
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.stdin.close()
        reap(self.folder, now=time.time())


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[list[Owner]]:
    made: list[Owner] = []
    yield made
    for owner in made:
        owner.close()
        assert cgroups_of(owner.process.pid) == []


def numbers(line: str) -> tuple[str, list[int]]:
    """Return the run and the numbers in a line of the command's output."""
    name, _, rest = line.partition(": ")
    return name, [int(number) for number in re.findall(r"\d+", rest)]


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
def test_reap_removes_sandboxes_of_a_killed_owner_and_keeps_live_ones(tmp_path: Path, owners: list[Owner]) -> None:
    owners += [dead := Owner(tmp_path / "runs" / "dead"), live := Owner(tmp_path / "runs" / "live")]
    assert cgroups_of(dead.process.pid)
    dead.kill_both()
    done = run_cli("reap", cwd=tmp_path)
    assert done.code == 0, done.err
    assert [numbers(line) for line in done.out.splitlines()] == [("runs/dead", [2, 1]), ("runs/live", [2])]
    assert cgroups_of(dead.process.pid) == []
    assert [path for path in dead.folder.rglob("*") if path.name != "leases"] == []
    assert live.alive()
    assert len(leases.read_leases(live.folder)) == 2


@pytest.mark.usefixtures("local_sandboxes")
def test_reap_cleans_up_if_only_the_owner_died(tmp_path: Path, owners: list[Owner]) -> None:
    owners.append(dead := Owner(tmp_path / "runs" / "dead"))
    dead.kill()
    assert run_cli("reap", tmp_path / "runs", cwd=tmp_path).code == 0
    assert [path for path in dead.folder.rglob("*") if path.name != "leases"] == []
    assert cgroups_of(dead.process.pid) == []


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
def test_reap_of_one_run_does_not_touch_others(tmp_path: Path, owners: list[Owner]) -> None:
    owners += [one := Owner(tmp_path / "runs" / "one"), other := Owner(tmp_path / "runs" / "other")]
    one.kill_both()
    other.kill_both()
    found = json.loads(run_cli("reap", "runs/one", "--json", cwd=tmp_path).out)
    assert [Path(run["run"]).name for run in found["runs"]] == ["one"]
    assert len(found["runs"][0]["ended"]) == 2
    assert len(leases.read_leases(other.folder)) == 2


@pytest.mark.long
@pytest.mark.usefixtures("local_sandboxes")
def test_reap_skips_live_runs_and_runs_of_other_machines(tmp_path: Path, owners: list[Owner]) -> None:
    """Process IDs in the leases of another machine mean nothing here."""
    owners += [one := Owner(tmp_path / "runs" / "one"), other := Owner(tmp_path / "runs" / "other")]
    one.kill_both()
    other.kill_both()
    (other.folder.parent / "run.lock").write_text("pid 7 on another-machine\n")
    with open_lock(one.folder.parent):
        done = run_cli("reap", cwd=tmp_path)
        assert done.code == 0, done.err
        assert [numbers(line) for line in done.out.splitlines()] == [("runs/one", [2]), ("runs/other", [])]
        assert "another-machine" in done.out.splitlines()[1]
    assert len(leases.read_leases(one.folder)) == len(leases.read_leases(other.folder)) == 2
    assert ("runs/one", [2]) in [
        (name, found[:1]) for name, found in map(numbers, run_cli("reap", cwd=tmp_path).out.splitlines())
    ]
    assert not one.folder.exists()


def test_reap_removes_subprocess_sandboxes(tmp_path: Path, owners: list[Owner]) -> None:
    owners += [
        dead := Owner(tmp_path / "runs" / "dead", "subprocess"),
        live := Owner(tmp_path / "runs" / "live", "subprocess"),
    ]
    guards = [pid for lease in leases.read_leases(dead.folder) for pid in leases.find_marked(f"dead/{lease.id}")]
    assert len(guards) >= 3
    dead.process.send_signal(signal.SIGSTOP)
    for pid in guards:
        if processes.read_variable(pid, processes.COMMAND_VARIABLE) is None:
            os.kill(pid, signal.SIGKILL)  # kill the guards, so that nothing else cleans up
    dead.kill()
    done = run_cli("reap", cwd=tmp_path)
    assert ("runs/dead", 2) in [(name, found[0]) for name, found in map(numbers, done.out.splitlines())]
    assert [path for path in dead.folder.rglob("*") if path.name != "leases"] == []
    assert live.alive()


@pytest.mark.usefixtures("local_sandboxes")
def test_reap_ends_an_overdue_sandbox_of_a_live_owner(tmp_path: Path, owners: list[Owner]) -> None:
    owners.append(owner := Owner(tmp_path / "runs" / "late"))
    late = time.time() + leases.LEASE_SECONDS + 1
    busy = [lease.id for lease in leases.read_leases(owner.folder) if leases.find_marked(f"late/{lease.id}")]
    assert len(busy) == 1
    assert reap(owner.folder, now=late) == busy
    assert leases.find_marked(f"late/{busy[0]}") == {}
    assert owner.alive()


def test_reap_with_nothing_to_do_exits_with_0(tmp_path: Path) -> None:
    done = run_cli("reap", cwd=tmp_path, TMPDIR=str(tmp_path))
    assert (done.code, done.out.split()[-1], done.err) == (0, "runs", "")
    found = json.loads(run_cli("reap", "--json", cwd=tmp_path, TMPDIR=str(tmp_path)).out)
    assert found == {"runs": [], "commands": [], "containers": [], "ended": 0}
    assert list(tmp_path.iterdir()) == []
    assert run_cli("reap", cwd=tmp_path, TMPDIR=str(tmp_path), ROOKERY_OUT="gone").out.endswith(" gone\n")


async def test_invalid_input_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    (await rookery("reap", "nowhere", cwd=tmp_path)).assert_refused(" nowhere")
    (await rookery("reap", "a", "b", cwd=tmp_path)).assert_refused("b")
    (tmp_path / "file").write_text("")
    (await rookery("reap", "file", cwd=tmp_path)).assert_refused(" file")


def test_reap_does_not_change_directories_that_are_not_runs(tmp_path: Path) -> None:
    """A directory named sandboxes may belong to the user and contain anything."""
    for name in ("mine", "sand/sandboxes"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    folder = tmp_path / "runs" / "sand" / "sandboxes"
    (folder / "castle.txt").write_text("kept")
    (folder / "keeper-of-the-keys").mkdir()
    (folder / "keeper-1x-a").mkdir()
    (folder / "leases").mkdir()
    (folder / "leases" / "broken.json").write_text("{")
    evil = leases.create_lease("../../mine", "r", "a", "subprocess", folder)
    (folder / "leases" / "evil.json").write_bytes(json.dumps(_plain(evil) | {"owner_started": 1}).encode())
    before = sorted(tmp_path.rglob("*"))
    done = run_cli("reap", cwd=tmp_path, TMPDIR=str(tmp_path))
    assert done.code == 0, done.err
    assert sorted(tmp_path.rglob("*")) == before


def _plain(lease: leases.Lease) -> dict[str, object]:
    import msgspec

    return dict(msgspec.to_builtins(lease))


# ---- the reaper itself


def test_keeper_directory_of_a_live_owner_is_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / f"keeper-{os.getpid()}-abc"
    folder.mkdir()
    assert reap_keepers(tmp_path) == []
    os.utime(folder, (1, 1))  # older than the process with this ID, so another process created it
    assert reap_keepers(tmp_path) == [folder.name]
    assert not folder.exists()


def test_reap_does_not_follow_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("")
    folder = tmp_path / "sandboxes"
    folder.mkdir()
    (folder / "keeper-999999999-a").symlink_to(tmp_path / "kept")
    assert reap_keepers(folder) == []
    assert (tmp_path / "kept" / "file").exists()


def test_only_empty_cgroups_that_the_keeper_recorded_are_removed(tmp_path: Path) -> None:
    import msgspec

    groups = tmp_path / "rookery"
    for name in ("7-aa-1", "7-aa-2/busy", "7-bb-1"):
        (groups / name).mkdir(parents=True)
    assert remove_cgroups("7-aa-", [str(groups)], seconds=0.0) == 1
    assert sorted(path.name for path in groups.iterdir()) == ["7-aa-2", "7-bb-1"]
    assert remove_cgroups("", [str(groups)], seconds=0.0) == 0
    (groups / "7-aa-2" / "busy").rmdir()
    folder = tmp_path / "keeper-999999999-a"
    folder.mkdir()
    elsewhere = tmp_path / "other"
    (elsewhere / "7-aa-9").mkdir(parents=True)
    (folder / CGROUPS_FILE).write_bytes(
        msgspec.json.encode(KeeperCgroups("7-aa-", [str(groups), str(elsewhere), ""]))
    )
    assert reap_keepers(tmp_path) == [folder.name]
    assert [path.name for path in groups.iterdir()] == ["7-bb-1"]
    assert (elsewhere / "7-aa-9").exists(), "no control group is called so"


def test_scratch_directory_is_kept_until_its_holder_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rookery.sandboxes.reaper import reap_scratch

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch_home("r") as home:
        assert home.folder.name.startswith(SCRATCH_PREFIX)
        reap_scratch(now=time.time())
        assert home.folder.exists()
    assert not home.folder.exists()
    left = tmp_path / f"{SCRATCH_PREFIX}left"
    left.mkdir()
    foreign = tmp_path / f"{SCRATCH_PREFIX}link"
    foreign.symlink_to(tmp_path)
    reap_scratch(now=time.time())
    assert not left.exists()
    assert foreign.is_symlink()
