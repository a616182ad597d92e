"""`RookeryAgentLoop`: one rollout of a Rookery environment as an agent loop of verl.

It runs in verl's agent-loop workers, which are Ray actors. verl ends them without a call.
"""

import asyncio
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from rookery.adapters.verl.rollouts import VerlRollouts, make_output
from rookery.core import UsageError
from rookery.training.rows import fill_row, make_rows

_opened: list[tuple[Any, VerlRollouts]] = []
"""The client of this worker process and its engines. A worker has one client."""


def get_rollouts(config: Any, client: Any) -> VerlRollouts:
    """Return the engines of this worker process, which the first call creates. Those of another client are closed.

    They are open until the process ends. Ray kills it at the end of a training, which leaves nothing behind: every
    finished rollout is in the journal, and sandboxes end with their owner.
    """
    if not _opened or _opened[0][0] is not client:
        close_rollouts()
        _opened.append((client, VerlRollouts(config, client)))
    return _opened[0][1]


def close_rollouts() -> None:
    """Cancel running rollouts and close the engines of this worker process."""
    while _opened:
        _opened.pop()[1].engines.close()


@register("rookery")
class RookeryAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Runs one rollout. A failed rollout returns an empty list, so that it has no row and no place in the
    baseline.

    verl creates an object for every rollout; they share the engines of the worker process.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        rollouts = get_rollouts(self.config, self.server_manager)
        settings = rollouts.make_settings(*(sampling_params[name] for name in ("temperature", "top_p", "top_k")))
        rollouts.check_mode(settings)
        rows = make_rows([await asyncio.wrap_future(rollouts.start(kwargs, 1, settings, settings.key))])
        if len(rows) > 1 and not rollouts.counts_rollouts:
            raise UsageError(
                f"rollout {rows[0].rollout} of task {rows[0].task} has {len(rows)} segments, which verl counts as "
                "rollouts: set algorithm.adv_estimator=grpo, or use an environment with one conversation"
            )
        return [
            make_output(fill_row(row, self.tokenizer.eos_token_id), row.reward)
            for row in rows
            if row.reward is not None
        ]
