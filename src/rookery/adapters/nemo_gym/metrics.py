"""The request `/aggregate_metrics` of NeMo Gym: means over verify responses."""

import math
from collections.abc import Sequence
from typing import Any, Final

from rookery.adapters.nemo_gym.responses import refuse

TASK_INDEX: Final = "_ng_task_index"


def aggregate_metrics(body: dict[str, Any]) -> dict[str, Any]:
    """Return the means of all numbers in Gym's verify responses, for each task and over all of them.

    Responses with `mask_sample` are left out and counted.
    """
    responses = body.get("verify_responses")
    if not isinstance(responses, list) or not all(isinstance(one, dict) for one in responses):
        raise refuse(422, "verify_responses must be a list of objects")
    scored = [one for one in responses if not one.get("mask_sample")]
    tasks: dict[Any, list[dict[str, Any]]] = {}
    for one in scored:
        tasks.setdefault(one.get(TASK_INDEX, 0), []).append(one)
    means = _compute_means(scored)
    masked = {"masked_samples": len(responses) - len(scored)} if len(scored) < len(responses) else {}
    return {
        "group_level_metrics": [{TASK_INDEX: index, **_compute_means(one)} for index, one in tasks.items()],
        "agent_metrics": {**means, **masked},
        "key_metrics": {**means, **masked},
    }


def _compute_means(responses: Sequence[dict[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for one in responses:
        for name, value in one.items():
            if isinstance(value, int | float) and not name.startswith("_") and math.isfinite(value):
                values.setdefault(f"mean/{name}", []).append(value)
    return {name: math.fsum(found) / len(found) for name, found in values.items()}
