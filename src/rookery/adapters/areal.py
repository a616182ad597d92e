"""AReaL: a workflow that runs the rollouts of a prompt in Rookery, with model calls on AReaL's inference engine.

    workflow = make_workflow("arithmetic", k=8, gconfig=config.gconfig, actor=config.actor,
                             rendering={"tokenizer": config.tokenizer_path})
    batch = rollout.prepare_batch(dataloader, workflow=workflow)    # group_size=1: the workflow makes the group

Guarantees:
- Token IDs, masks, log probabilities and the policy version of every token are those of the journal.
- AReaL normalises rewards in slices of a fixed size, which a missing member or a second segment would shift. So
  the workflow runs the whole group and returns advantages as `rewards`; normalisation by AReaL is refused.
- Sampling parameters that contradict `gconfig` are refused. All rollouts sample with the values that `gconfig` had
  when the workflow was made; an episode that begins after a change is refused. With `tokenizer`, the first
  rollouts are decoded and compared, so that a policy with another tokenizer is noticed.
- A missing rollout has no row, and the advantages of the others do not count it. Without a valid rollout the
  result is None, which AReaL rejects.
"""

import uuid
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Final

import numpy as np

from rookery.adapters.compatibility import RolloutChecks, TrainerSettings
from rookery.adapters.trainer_engine import TrainerEngine
from rookery.core import Extra, Finish, UsageError
from rookery.environments import Environment
from rookery.training import BatchConfig
from rookery.training.rows import Row, make_rows
from rookery.upstreams.token_function import TokenCall, TokenResult

TESTED: Final = ("areal", "1.0.4", "1.1")
NO_TOP_K: Final = 100_000_000
"""AReaL's `top_k` for all tokens."""
OTHER_FIELDS: Final = (
    "min_new_tokens",
    "stop_token_ids",
    "ignore_eos",
    "stop",
    "frequency_penalty",
    "use_beam_search",
)
"""Fields of `gconfig` that change what is sampled, besides those that `TrainerSettings` has."""
VERSIONS: Final = "areal_versions"
"""Name of the per-token array that carries AReaL's policy versions through the journal."""


def make_workflow(
    env: Environment | str,
    *,
    k: int,
    gconfig: Any,
    actor: Any,
    batch: BatchConfig | None = None,
    **options: Any,
) -> Any:
    """Return a workflow for AReaL that runs k rollouts of this environment for each row of the dataset.

    `gconfig` is AReaL's `GenerationHyperparameters` and `actor` its configuration of the actor. The column `task`
    of the dataset is the task's ID. `options` are arguments of `Engine`, and `tasks` and `tokenizer` (AReaL's).
    """
    from areal.api.workflow_api import RolloutWorkflow

    for name in ("reward_norm", "adv_norm"):
        if getattr(actor, name, None) is not None:
            raise UsageError(
                f"actor.{name} normalises in groups of a fixed size, which missing rollouts would shift: set "
                f"actor.{name} to null, because the rewards of this workflow are already advantages"
            )
    if k < 2:
        raise UsageError(f"k is {k}, but an advantage needs at least two rollouts of a task")

    class RookeryWorkflow(RolloutWorkflow):  # type: ignore[misc]
        """Runs groups of rollouts of a Rookery environment for AReaL."""

        def __init__(self) -> None:
            self._engine: Any = None
            self._gconfig = gconfig.new()
            settings = _get_settings(self._gconfig)
            self._checks = RolloutChecks("AReaL", settings)
            self.rollouts = TrainerEngine(
                env,
                trainer="AReaL",
                tested=TESTED,
                settings=settings,
                generate=self._generate,
                **options,
            )

        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
            """Run the group of a row, and return the sequences of its valid members as padded tensors."""
            self._checks.check_unchanged(_get_settings(gconfig))
            self._engine = engine
            task = self.rollouts.find_task(data.get("prompt", data.get("messages")), data.get("task"))
            rows = make_rows([await self.rollouts.run(task, k)], batch or BatchConfig())
            return make_tensors([row for row in rows if row.trained])

        async def _generate(self, call: TokenCall) -> TokenResult:
            return await generate(self._engine, self._gconfig, call)

    return RookeryWorkflow()


def _get_settings(gconfig: Any) -> TrainerSettings:
    """Return what AReaL assumes about rollouts."""
    others = {name: getattr(gconfig, name, None) for name in OTHER_FIELDS}
    return TrainerSettings(
        temperature=0.0 if gconfig.greedy else gconfig.temperature,
        top_p=gconfig.top_p,
        top_k=-1 if gconfig.top_k >= NO_TOP_K else gconfig.top_k,
        max_tokens=gconfig.max_new_tokens,
        context=gconfig.max_tokens,
        extra=deepcopy({name: value for name, value in others.items() if value}),
    )


async def generate(engine: Any, gconfig: Any, call: TokenCall) -> TokenResult:
    """Sample one reply with AReaL's inference engine."""
    from areal.api import ModelRequest

    request = ModelRequest(
        rid=uuid.uuid4().hex,
        input_ids=call.prompt,
        gconfig=gconfig.new(
            n_samples=1,
            max_new_tokens=call.sampling.max_tokens or gconfig.max_new_tokens,
            stop_token_ids=sorted({*gconfig.stop_token_ids, *call.stop_ids}),
        ),
    )
    response = await engine.agenerate(request)
    versions = np.array(response.output_versions, dtype="<i4")
    finish: Finish = "length" if response.stop_reason == "length" else "stop"
    return TokenResult(
        tokens=response.output_tokens,
        logprobs=response.output_logprobs,
        finish=finish,
        version=max(0, int(versions.min())) if len(versions) else None,
        extras={VERSIONS: Extra("<i4", 4, versions.tobytes())},
    )


def make_tensors(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return rows as AReaL's tensors, padded on the right; None if there are none."""
    import torch

    if not rows:
        return None
    shape = len(rows), max(len(row) for row in rows)
    columns = {
        "input_ids": torch.zeros(shape, dtype=torch.int32),
        "loss_mask": torch.zeros(shape, dtype=torch.int32),
        "logprobs": torch.zeros(shape, dtype=torch.float32),
        "versions": torch.full(shape, -1, dtype=torch.int32),
        "attention_mask": torch.zeros(shape, dtype=torch.bool),
    }
    for at, row in enumerate(rows):
        recorded = row.extras.get(VERSIONS)
        versions = row.versions if recorded is None else np.where(row.mask, recorded.reshape(len(row)), -1)
        values = (row.tokens, row.mask, row.logprobs, versions, np.ones(len(row), dtype=np.bool_))
        for column, value in zip(columns.values(), values, strict=True):
            column[at, : len(row)] = torch.as_tensor(np.array(value))
    columns["rewards"] = torch.tensor([row.advantage for row in rows], dtype=torch.float32)
    return columns
