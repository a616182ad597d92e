"""The fault campaign passes, and it notices what it is meant to notice."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.fault_leftovers import find_leftovers
from benchmarks.fault_plan import KINDS, NONE, plan_faults
from benchmarks.faults import Campaign
from benchmarks.instant_model import instant_model

ROLLOUTS = int(os.environ.get("ROOKERY_CAMPAIGN_ROLLOUTS", "2000"))
"""Number of rollouts of the campaign on Ray nodes."""


def test_a_tenth_of_the_rollouts_has_a_fault_of_every_kind() -> None:
    for rollouts in (200, 1_000, 10_000):
        plan = plan_faults(rollouts, seed=1)
        assert plan.count(NONE) == 0.9 * rollouts
        assert set(plan) == {NONE, *(kind.name for kind in KINDS)}
    assert plan_faults(500, seed=1) == plan_faults(500, seed=1) != plan_faults(500, seed=2)
    assert len(KINDS) >= 12


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A directory with a short path: Ray puts Unix sockets there."""
    folder = Path(tempfile.mkdtemp(prefix="rk-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_processes_and_files_that_a_run_left_are_found(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_NODE_DIR", str(short_folder))
    assert find_leftovers([str(short_folder)], "run-1") == []
    (short_folder / "run-1-node-1-7").mkdir()
    with (short_folder / "log").open("wb") as log, subprocess.Popen(["sleep", "60"], stdout=log) as left:
        try:
            found = find_leftovers([str(short_folder)], "run-1")
        finally:
            left.kill()
    assert len(found) == 2
    assert [str(left.pid) in one for one in found] == [True, False]
    assert found[1] == str(short_folder / "run-1-node-1-7")


@pytest.mark.long
@pytest.mark.timeout(600 + ROLLOUTS)
async def test_campaign_on_three_ray_nodes_passes_and_notices_wrong_records(short_folder: Path) -> None:
    async with (
        instant_model("benchmarks.fault_model") as model,
        Campaign(short_folder, model.tokens_url, ROLLOUTS, 3, "ray", print) as campaign,
    ):
        await campaign.execute()
        counts = await campaign.check()
        assert campaign.violations == []
        assert sum(number for number, _ in counts.values()) == ROLLOUTS == len(campaign.reference)
        assert not any(wrong for _, wrong in counts.values())
        assert {kind: campaign.kills[kind] for kind in campaign.list_kinds() if not campaign.kills[kind]} == {}
        # A rollout that raised is not what an upstream fault may lead to, and the reverse.
        raised, reset = (campaign.plan.index(name) for name in ("environment raises", "upstream reset"))
        campaign.plan[raised], campaign.plan[reset] = "upstream reset", "environment raises"
        campaign.rollouts += 1  # as if one record were missing
        wrong = campaign.check_records()
        assert (wrong["environment raises"][1], wrong["upstream reset"][1]) == (1, 1)
        assert len(campaign.violations) == 3
        changed = f"c-{campaign.plan.index(NONE)}"
        campaign.reference[changed] = -1.0
        campaign.compare_rewards()
        assert campaign.differences == [changed]
