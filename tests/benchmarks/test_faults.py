"""The fault campaign passes, and it notices what it is meant to notice."""

from pathlib import Path

import pytest

from benchmarks.fault_plan import KINDS, NONE, plan_faults
from benchmarks.faults import Campaign
from benchmarks.instant_model import instant_model


def test_a_tenth_of_the_rollouts_has_a_fault_of_every_kind() -> None:
    for rollouts in (200, 1_000, 10_000):
        plan = plan_faults(rollouts, seed=1)
        assert plan.count(NONE) == 0.9 * rollouts
        assert set(plan) == {NONE, *(kind.name for kind in KINDS)}
    assert plan_faults(500, seed=1) == plan_faults(500, seed=1) != plan_faults(500, seed=2)
    assert len(KINDS) >= 12


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_campaign_on_two_nodes_passes_and_notices_wrong_records(tmp_path: Path) -> None:
    async with instant_model("benchmarks.fault_model") as model:
        campaign = Campaign(tmp_path, model.tokens_url, 180, 3, "local:2", print)
        try:
            await campaign.execute()
            counts = await campaign.check()
            assert campaign.violations == []
            assert sum(number for number, _ in counts.values()) == 180
            assert not any(wrong for _, wrong in counts.values())
            assert all(campaign.kills[kind] for kind in campaign.list_kinds())
            # A rollout that raised is not what an upstream fault may lead to, and the reverse.
            raised, reset = (campaign.plan.index(name) for name in ("environment raises", "upstream reset"))
            campaign.plan[raised], campaign.plan[reset] = "upstream reset", "environment raises"
            campaign.rollouts += 1  # as if one record were missing
            wrong = campaign.check_records()
            assert (wrong["environment raises"][1], wrong["upstream reset"][1]) == (1, 1)
            assert len(campaign.violations) == 3
        finally:
            await campaign.close()
