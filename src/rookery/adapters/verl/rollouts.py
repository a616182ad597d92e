"""Run rollouts for verl: model calls go through its `LLMServerClient`, rows become `AgentLoopOutput` objects."""

import uuid
from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any, Final

from rookery.adapters.compatibility import TrainerSettings, check_choice
from rookery.adapters.task_rows import TASK_KEY
from rookery.adapters.trainer_engine import ThreadedTrainerEngine
from rookery.core import Finish, Group, Task, UsageError
from rookery.training.rows import Row
from rookery.upstreams.token_function import TokenCall, TokenFunction, TokenResult

TESTED: Final = ("verl", "0.9.1", "0.10")


def make_token_function(client: Any) -> TokenFunction:
    """Return a function that samples with a `LLMServerClient` of verl: token IDs in, token IDs out."""

    async def generate(call: TokenCall) -> TokenResult:
        sampling = call.sampling
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": list(call.stop_ids) or None,
            "stop": list(sampling.stop) or None,
            "logprobs": True,
            **sampling.extra,
        }
        output = await client.generate(
            call.session or uuid.uuid4().hex,  # the same session goes to the same server
            prompt_ids=call.prompt,
            sampling_params={name: value for name, value in params.items() if value is not None},
        )
        finish: Finish = "length" if len(output.token_ids) == sampling.max_tokens else "stop"
        if output.stop_reason in ("aborted", "abort"):
            finish = "abort"
        return TokenResult(
            tokens=output.token_ids,
            logprobs=output.log_probs,
            finish=finish,
            version=output.extra_fields.get("global_steps"),
        )

    return generate


class VerlRollouts:
    """The engines of one process of verl: one for each purpose, in a thread of its own.

    They are closed by `close`, and at the latest when the interpreter exits.
    """

    def __init__(self, config: Any, client: Any) -> None:
        """`config` is verl's whole configuration. Its section `rookery` has `env` and arguments of `Engine`."""
        # Everything is imported here, in the caller's thread: imports of transformers in two threads can fail.
        import verl.experimental.agent_loop  # noqa: F401
        from omegaconf import OmegaConf
        from transformers import AutoTokenizer

        section = config.get("rookery")
        if not section or not section.get("env"):
            raise UsageError("verl's configuration has no rookery.env: add +rookery.env=NAME to the command line")
        options = dict(OmegaConf.to_container(section, resolve=True))
        self.counts_rollouts = str(config.algorithm.adv_estimator) == "grpo"
        """True if verl's estimator counts rollouts in its baseline. Other estimators count segments."""
        self.baseline = options.pop("baseline", "leave_one_out")
        check_choice("rookery.baseline", self.baseline, ("leave_one_out", "mean"))
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        path = model.get("tokenizer_path") or model.path
        self._rollout = rollout
        self.engines = ThreadedTrainerEngine(
            options.pop("env"),
            trainer="verl",
            tested=TESTED,
            tokenizer=AutoTokenizer.from_pretrained(path),
            generate=make_token_function(client),
            **{"rendering": {"tokenizer": path}, **options},
        )

    def read_settings(self, validate: bool) -> TrainerSettings:
        """Return verl's assumptions about rollouts for training or for validation, from its configuration."""
        mode = self._rollout.val_kwargs if validate else self._rollout
        return self.make_settings(mode.temperature, mode.top_p, mode.top_k)

    def make_settings(self, temperature: float, top_p: float, top_k: int) -> TrainerSettings:
        """Return verl's assumptions about rollouts with these sampling parameters."""
        rollout = self._rollout
        return TrainerSettings(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=rollout.response_length,
            context=rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length,
        )

    def check_mode(self, settings: TrainerSettings) -> None:
        """Raise `UsageError` unless verl's configuration has these settings, for training or for validation."""
        greedy = self.make_settings(0.0, 1.0, -1)  # verl's baseline of some estimators
        if settings not in (self.read_settings(False), self.read_settings(True), greedy):
            raise UsageError(
                f"verl samples with temperature {settings.temperature:g}, top_p {settings.top_p:g} and top_k "
                f"{settings.top_k}, but actor_rollout_ref.rollout and its val_kwargs have other values: set "
                "them there, because verl computes log probabilities with them"
            )

    def start(
        self, fields: dict[str, Any], k: int, settings: TrainerSettings, purpose: Hashable
    ) -> "Future[Group]":
        """Start k rollouts of the task in a row of verl's dataset. Each purpose has an engine of its own."""
        return self.engines.submit(self.find_task(fields), k, settings, purpose=purpose)

    def find_task(self, fields: dict[str, Any]) -> Task:
        """Return the task in a row of verl's dataset."""
        name = (fields.get("extra_info") or {}).get(TASK_KEY)
        return self.engines.find_task(fields.get("raw_prompt"), name)


def make_output(row: Row, reward: float) -> Any:
    """Return a row as an `AgentLoopOutput` of verl."""
    from verl.experimental.agent_loop import AgentLoopOutput
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics

    timing = row.record.timing
    oldest, newest = row.version_range or (0, 0)
    info = {"rookery_reward": row.reward, "rookery_truncated": row.truncated}
    return AgentLoopOutput(
        prompt_ids=row.prompt_ids,
        response_ids=row.response_ids,
        response_mask=row.response_mask,
        response_logprobs=row.response_logprobs,
        reward_score=reward,
        num_turns=row.record.usage.turns,
        metrics=AgentLoopMetrics(
            generate_sequences=timing.model, tool_calls=timing.sandbox, compute_score=timing.score
        ),
        extra_fields={"reward_extra_info": info, "min_global_steps": oldest, "max_global_steps": newest},
    )
