"""`RookeryManager`: an agent-loop manager for verl's v1 trainer that runs whole groups in a Rookery engine.

verl calls `generate_sequences` without waiting; rows appear in its TransferQueue when a group has finished.
"""

import logging
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final

from rookery.adapters.compatibility import TrainerSettings
from rookery.adapters.verl.rollouts import VerlRollouts, make_output
from rookery.core import Group, RookeryError, UsageError
from rookery.core.errors import describe
from rookery.engine import Engine, Stopped
from rookery.training.config import BatchConfig
from rookery.training.rows import Row, fill_row, make_rows, shape_rewards, split_by_rollout

log = logging.getLogger("rookery.adapters.verl")
CLOSE_SECONDS: Final = 120.0
FILLER: Final = 0
"""Token ID of the row of a valid rollout none of whose tokens train."""


class RookeryManager:
    """Set verl's option `+actor_rollout_ref.rollout.agent.agent_loop_manager_class` to this class."""

    def __init__(self, config: Any, llm_client: Any) -> None:
        self._rollouts = VerlRollouts(config, llm_client)
        if not self._rollouts.counts_rollouts:
            raise UsageError(
                f"algorithm.adv_estimator is {config.algorithm.adv_estimator}, but only with grpo verl counts "
                "rollouts instead of segments in its baseline: set algorithm.adv_estimator=grpo"
            )
        rollout = config.actor_rollout_ref.rollout
        self._sizes = {False: rollout.n, True: rollout.val_kwargs.n}
        for validate in (False, True):
            self._rollouts.engines.check_settings(self._rollouts.read_settings(validate))
        self._running: set[Future[None]] = set()
        self._failure: RookeryError | None = None
        """An error that concerns all rollouts, such as a wrong tokenizer or an engine that stopped itself."""

    @classmethod
    def create(
        cls, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> "RookeryManager":
        """Return a manager. Rewards come from the environment, so verl's reward workers are not used."""
        if teacher_client:
            raise UsageError("RookeryManager does not compute a teacher's log probabilities: disable distillation")
        if reward_loop_worker_handles:
            log.info("rewards come from the Rookery environment; verl's reward function is not called")
        return cls(config, llm_client)

    def generate_sequences(self, prompts: Any) -> None:
        """Start the rollouts of a batch of prompts (a TensorDict) and return at once.

        Raise `RookeryError` if rollouts of an earlier batch have shown that no rollout can run, and `UsageError`
        if verl's configuration has changed.
        """
        if self._failure is not None:
            raise RookeryError(f"no rollouts can run: {describe(self._failure)}") from self._failure
        validate = bool(prompts["validate"]) if "validate" in prompts else False
        settings = self._rollouts.read_settings(validate)
        engine = self._rollouts.engines.open(settings, purpose=validate)
        for index in range(len(prompts)):
            future = engine.submit(partial(self._run_prompt, _get_row(prompts, index), validate, settings))
            self._running.add(future)
            future.add_done_callback(self._running.discard)

    def close(self) -> None:
        """Cancel running rollouts and close the engines."""
        running = list(self._running)
        for future in running:
            future.cancel()
        wait(running, CLOSE_SECONDS)
        self._rollouts.engines.close()

    async def _run_prompt(
        self, fields: dict[str, Any], validate: bool, settings: TrainerSettings, engine: Engine
    ) -> None:
        import transfer_queue as tq

        uid, partition = str(fields["uid"]), "val" if validate else "train"
        status = "failure"
        try:
            if "_" in uid:
                raise UsageError(
                    f"verl's prompt uid {uid!r} contains '_', which separates the parts of a row's key"
                )
            await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": "running"})
            k = int(fields.pop("__rollout_n__", self._sizes[validate]))
            task = self._rollouts.find_task(fields)
            group = await self._rollouts.engines.run(engine, task, k, settings, purpose=validate)
            if await _put_rows(group, fields, partition, self._rollouts.baseline):
                status = "finished"  # also if some members are missing
        except Exception as error:
            log.exception("the rollouts of prompt %s failed", uid)
            if isinstance(error, UsageError | Stopped):
                self._failure = error
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status})


def _get_row(prompts: Any, index: int) -> dict[str, Any]:
    """Return the fields of one prompt. A value that is stored once is the same for all prompts."""
    from tensordict import NonTensorData, NonTensorStack

    row: dict[str, Any] = {}
    for name, values in prompts.items():
        if isinstance(values, NonTensorStack):
            row[name] = values[index].data
        else:
            row[name] = values.data if isinstance(values, NonTensorData) else values[index]
    row.pop("validate", None)
    return row


async def _put_rows(group: Group, fields: dict[str, Any], partition: str, baseline: Any) -> int:
    """Write the rows of a group's valid members to the TransferQueue, and return their number."""
    import torch
    import transfer_queue as tq
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    parts = split_by_rollout(make_rows([group], BatchConfig(baseline=baseline)))
    rewards = make_scores([part[0] for part in parts], baseline if partition == "train" else None)
    keys, values, tags = [], [], []
    for part, reward in zip(parts, rewards, strict=True):
        for index, row in enumerate(part if reward is not None else []):
            assert reward is not None
            value = make_output(fill_row(row, FILLER), reward).as_dict() | fields | {"session_id": row.member}
            prompt, response = len(value["prompts"]), len(value["responses"])
            value["loss_mask"] = value["response_mask"]
            value["input_ids"] = torch.cat([value["prompts"], value["responses"]])
            value["position_ids"] = torch.arange(prompt + response)
            value["multi_modal_inputs"] = {}
            steps = {name: value["extra_fields"][name] for name in ("min_global_steps", "max_global_steps")}
            lengths = {"prompt_len": prompt, "response_len": response, "seq_len": prompt + response}
            keys.append(f"{fields['uid']}_{row.member}_{index}")
            values.append(value)
            tags.append({"status": "success", "global_steps": fields["global_steps"], **lengths, **steps})
    if keys:
        await tq.async_kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict(values), tags=tags, partition_id=partition
        )
    return len(keys)


def make_scores(rollouts: list[Row], baseline: Any) -> list[float | None]:
    """Return the score of each rollout for verl, None for a missing one. A baseline of None returns the rewards.

    verl subtracts the mean of the scores of a group, but for a single score it subtracts nothing. A rollout
    without siblings therefore gets the score 0, which is its advantage.
    """
    rewards = [row.reward for row in rollouts]
    if baseline is None:
        return rewards
    if sum(reward is not None for reward in rewards) == 1:
        return [None if reward is None else 0.0 for reward in rewards]
    return shape_rewards(rewards, baseline=baseline)
