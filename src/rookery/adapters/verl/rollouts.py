"""Run rollouts for verl: model calls go through its `LLMServerClient`, rows become `AgentLoopOutput` objects."""

import asyncio
import logging
import uuid
from contextlib import AsyncExitStack
from typing import Any

from rookery.adapters.compatibility import RolloutChecks, TrainerSettings, check_version
from rookery.adapters.group_requests import GroupRequests
from rookery.adapters.task_rows import TASK_KEY, find_task, get_tasks
from rookery.core import Finish, Group, UsageError
from rookery.engine import Engine
from rookery.environments import load_environment
from rookery.training.rows import Row
from rookery.upstreams.token_function import TokenCall, TokenFunction, TokenResult, serve_function

log = logging.getLogger("rookery.adapters.verl")
TESTED = ("0.9.0", "0.10")
MAX_ENGINES = 4
"""Maximum number of different sampling settings, each of which has an engine of its own."""


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
    """Runs the rollouts of one process. It belongs to the event loop in which it is used."""

    def __init__(self, config: Any, client: Any) -> None:
        """`config` is verl's whole configuration. Its section `rookery` has `env` and arguments of `Engine`."""
        # Everything is imported here, in the caller's thread: imports of transformers in two threads can fail.
        import verl.experimental.agent_loop  # noqa: F401
        from omegaconf import OmegaConf
        from transformers import AutoTokenizer

        check_version("verl", *TESTED)
        section = config.get("rookery")
        if not section or not section.get("env"):
            raise UsageError("verl's configuration has no rookery.env: add +rookery.env=NAME to the command line")
        options = dict(OmegaConf.to_container(section, resolve=True))
        env, arguments = options.pop("env"), options.get("arguments") or {}
        self.environment = load_environment(env, **arguments)
        self._tasks = {task.id: task for task in get_tasks(self.environment, options.pop("tasks", None))}
        self.baseline = options.pop("baseline", "leave_one_out")
        if self.baseline not in ("leave_one_out", "mean"):
            raise UsageError(f"rookery.baseline must be leave_one_out or mean, not {self.baseline!r}")
        model = config.actor_rollout_ref.model
        path = model.get("tokenizer_path") or model.path
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._options = {
            "rendering": {"tokenizer": path},
            **options,
            "record": "tokens",
            "runners": 0,
        }
        rollout = config.actor_rollout_ref.rollout
        self._context = rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
        self._max_tokens = rollout.response_length
        self._client = client
        self._stack = AsyncExitStack()
        self._opened: dict[TrainerSettings, asyncio.Future[tuple[Engine, GroupRequests, RolloutChecks]]] = {}

    def make_settings(self, temperature: float, top_p: float, top_k: int) -> TrainerSettings:
        """Return verl's assumptions for one of its sampling modes (training, validation)."""
        return TrainerSettings(
            temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=self._max_tokens, context=self._context
        )

    async def run(self, fields: dict[str, Any], k: int, settings: TrainerSettings) -> Group:
        """Run k rollouts of the task in a row of verl's dataset."""
        task = find_task(fields.get("raw_prompt"), self._tasks, (fields.get("extra_info") or {}).get(TASK_KEY))
        engine, requests, checks = await self._open(settings)
        group = await requests.run(task, k)
        await asyncio.to_thread(checks.check_groups, [group], engine.folder)
        missing = k - len(group.valid)
        if missing:
            causes = sorted({str(row.outcome) for row in group.rollouts if not row.valid})
            log.warning(
                "%d of %d rollouts of task %s are missing: %s", missing, k, task.id, "; ".join(causes)[:500]
            )
        return group

    async def _open(self, settings: TrainerSettings) -> tuple[Engine, GroupRequests, RolloutChecks]:
        if settings not in self._opened:
            if len(self._opened) == MAX_ENGINES:
                raise UsageError(f"verl uses more than {MAX_ENGINES} different sampling settings")
            self._opened[settings] = asyncio.ensure_future(self._open_engine(settings))
        return await asyncio.shield(self._opened[settings])

    async def _open_engine(self, settings: TrainerSettings) -> tuple[Engine, GroupRequests, RolloutChecks]:
        options = dict(self._options)
        policy = self._stack.enter_context(
            serve_function(make_token_function(self._client), model="verl", context=self._context)
        )
        engine = Engine(
            self.environment,
            policy=policy,
            sampling=settings.settle_sampling(options.pop("sampling", None)),
            limits=settings.settle_limits(options.pop("limits", None)),
            **options,
        )
        await self._stack.enter_async_context(engine)
        return engine, GroupRequests(engine, "verl"), RolloutChecks("verl", settings, self._tokenizer)

    async def close(self) -> None:
        """Cancel running rollouts and close the engines."""
        # An engine that is still opening would otherwise be opened after the others are closed.
        await asyncio.gather(*self._opened.values(), return_exceptions=True)
        await self._stack.aclose()


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
