"""`RookeryAgentLoop`: one rollout of a Rookery environment as an agent loop of verl."""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from rookery.adapters.verl.rollouts import VerlRollouts, make_output
from rookery.training.rows import fill_row, make_rows

_rollouts: dict[int, VerlRollouts] = {}
"""The engines of this worker process, by the identity of verl's client. A worker has one client."""


@register("rookery")
class RookeryAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Runs one rollout. A failed rollout returns an empty list, so that it has no row and no place in the
    baseline.

    verl creates an object for every rollout; they share the engine of the worker process.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        key = id(self.server_manager)
        if key not in _rollouts:
            _rollouts[key] = VerlRollouts(self.config, self.server_manager)
        rollouts = _rollouts[key]
        settings = rollouts.make_settings(*(sampling_params[name] for name in ("temperature", "top_p", "top_k")))
        group = await rollouts.run(kwargs, 1, settings)
        return [
            make_output(fill_row(row, self.tokenizer.eos_token_id), row.reward)
            for row in make_rows([group])
            if row.reward is not None
        ]
