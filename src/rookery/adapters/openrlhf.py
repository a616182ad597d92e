"""OpenRLHF: an agent executor that runs each rollout in Rookery, with model calls on OpenRLHF's own vLLM.

The file of `--train.agent_func_path`:

    from rookery.adapters.openrlhf import make_executor

    AgentExecutor = make_executor("arithmetic", rendering={"tokenizer": "Qwen/Qwen3-0.6B"})

Guarantees:
- The tokens, action ranges and log probabilities are those of the journal. OpenRLHF's tokenizer must decode them
  to the recorded text, and they must not exceed its maximum length; otherwise `UsageError` is raised.
- Rollouts are sampled with the parameters that OpenRLHF passes, also if it changes them, for example to evaluate.
- OpenRLHF has no missing rollouts: it counts the reward of every sample in the baseline. A rollout that failed
  because of the infrastructure is repeated, and raises `MissingRolloutError` if it fails again and again. There is
  never a made-up reward.
- OpenRLHF takes one sequence per rollout. A rollout with several segments raises `UsageError`, unless
  `segments="most"` keeps only the one with the most trained tokens.
"""

from copy import deepcopy
from itertools import groupby
from typing import Any, Final, Literal

from rookery.adapters.compatibility import TrainerSettings, check_choice, keep_one_segment
from rookery.adapters.trainer_engine import TrainerEngine
from rookery.core import Failed, RookeryError, UsageError
from rookery.environments import Environment
from rookery.training.rows import Row, make_rows
from rookery.upstreams.token_function import TokenCall, TokenResult

TESTED: Final = ("openrlhf", "0.11", "0.12")


class MissingRolloutError(RookeryError):
    """A rollout has no reward after all repetitions, and OpenRLHF cannot train without it."""


def make_executor(
    env: Environment | str,
    *,
    repeats: int = 3,
    segments: Literal["error", "most"] = "error",
    **options: Any,
) -> type:
    """Return the class `AgentExecutor` for OpenRLHF, whose instances run rollouts of this environment.

    `repeats` is how often a failed rollout runs, with `retry.attempts` attempts each. `options` are arguments of
    `Engine`, and `tasks`. The label of a row of the dataset is the task's ID.
    """
    from openrlhf.utils.agent import AgentExecutorBase

    check_choice("segments", segments, ("error", "most"))
    if "sampling" in options:
        raise UsageError("the sampling parameters are those of OpenRLHF: set them there, and remove `sampling`")

    class AgentExecutor(AgentExecutorBase):  # type: ignore[misc]
        """Runs rollouts of a Rookery environment for OpenRLHF."""

        def __init__(self) -> None:
            self.calls = _VllmCalls()
            self.rollouts = TrainerEngine(
                env, trainer="OpenRLHF", tested=TESTED, generate=self.calls.generate, **options
            )

        async def execute(
            self,
            prompt: Any,
            label: Any,
            sampling_params: Any,
            max_length: int,
            hf_tokenizer: Any,
            llm_engine: Any,
            images: Any = None,
        ) -> dict[str, Any]:
            """Run one rollout and return its sequence."""
            if images:
                raise UsageError(
                    "the adapter for OpenRLHF does not support images: remove the images of the dataset"
                )
            self.calls.update(llm_engine, sampling_params, max_length)
            self.rollouts.tokenizer = hf_tokenizer
            row = await self._run(prompt, label, _get_settings(sampling_params, max_length))
            logprobs = None if sampling_params.logprobs is None else row.logprobs.tolist()
            return {
                "prompt": prompt,
                "label": label,
                "images": None,
                "mm_train_inputs": None,
                "reward": row.reward,
                "scores": row.reward,
                "observation_tokens": row.tokens.tolist(),
                "action_ranges": get_action_ranges(row),
                "rollout_log_probs": logprobs,
                "truncated": bool(row.truncated),
                "extra_logs": {f"rookery_{name}": value for name, value in row.record.metrics.items()},
            }

        async def _run(self, prompt: Any, name: Any, settings: TrainerSettings) -> Row:
            task = self.rollouts.find_task(prompt, name or None)
            for _ in range(repeats):
                group = await self.rollouts.run(task, 1, settings, purpose=settings.key)
                rows = make_rows([group])
                if rows[0].valid and rows[0].trained:
                    advice = "use an environment with one conversation"
                    return keep_one_segment(rows, segments, "OpenRLHF", advice)[0]
                outcome = group.rollouts[0].outcome
                if not (isinstance(outcome, Failed) and outcome.fault == "infra"):
                    break
            raise MissingRolloutError(
                f"the rollout of task {task.id} has no reward ({rows[0].left_out or rows[0].outcome}), and "
                "OpenRLHF counts every sample in the baseline: remove the task (`rookery validate` finds broken "
                "ones), or repair the infrastructure and continue from the checkpoint"
            )

    return AgentExecutor


def _get_settings(params: Any, max_length: int) -> TrainerSettings:
    """Return what OpenRLHF assumes about a rollout, from the parameters of vLLM that it passes."""
    return TrainerSettings(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=params.max_tokens,
        context=max_length,
    )


def get_action_ranges(row: Row) -> list[tuple[int, int]]:
    """Return the ranges of sampled tokens in a row, as pairs of start and end."""
    ranges = []
    at = 0
    for trains, part in groupby(row.mask.tolist()):
        length = len(list(part))
        if trains:
            ranges.append((at, at + length))
        at += length
    return ranges


class _VllmCalls:
    """Model calls on the vLLM engine that OpenRLHF passes with each rollout; it is the same for all of them."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._params: Any = None
        self._max_length = 0

    def update(self, engine: Any, params: Any, max_length: int) -> None:
        self._engine, self._params, self._max_length = engine, params, max_length

    async def generate(self, call: TokenCall) -> TokenResult:
        """Sample one reply with OpenRLHF's sampling parameters, within its maximum length."""
        params = deepcopy(self._params)  # those that Rookery does not know are the same for all rollouts
        params.temperature, params.top_p = call.sampling.temperature, call.sampling.top_p
        left = self._max_length - len(call.prompt)
        if left <= 0:
            return TokenResult(tokens=[], logprobs=[], finish="length")
        wanted = [number for number in (params.max_tokens, call.sampling.max_tokens, left) if number is not None]
        params.max_tokens = min(wanted)
        params.logprobs = 0 if params.logprobs is None else params.logprobs  # only those of the sampled tokens
        params.stop_token_ids = [*(params.stop_token_ids or ()), *call.stop_ids]
        request = await self._engine.generate(call.prompt, params)
        output = request.outputs[0]
        tokens = list(output.token_ids)
        logprobs = [one[token].logprob for one, token in zip(output.logprobs, tokens, strict=True)]
        return TokenResult(
            tokens=tokens, logprobs=logprobs, finish="length" if output.finish_reason == "length" else "stop"
        )
