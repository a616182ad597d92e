"""Tinker: sample from a Tinker sampling client, and train on groups with a Tinker training client.

It works with every server of Tinker's API: the hosted service, and SkyRL's open server.

    policy = TinkerPolicy(training.save_weights_and_get_sampling_client(), model="qwen")
    with policy.serve() as upstream:
        async with Engine(env, policy=upstream, runners=0, record="tokens", sampling=policy.settle_sampling(),
                          rendering={"tokenizer": path}) as engine:
            async for step in engine.steps(tasks, k=8, groups=16):
                policy.check(step.groups, engine)
                await train_step(training, make_rows(step.groups))
                await policy.update(engine, training, version=...)

Guarantees:
- A datum has the token IDs and log probabilities of the journal. Its advantages are 0 where the loss mask is 0.
- A missing rollout has no datum, and the advantages of its group do not count it.
- Advantages are multiplied by the weight of the row. Tinker adds up the loss of all tokens, so the loss is the
  mean that `BatchConfig.normalise` defines, whatever the number of missing rollouts.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rookery.adapters.compatibility import RolloutChecks, TokenDecoder, TrainerSettings, check_version
from rookery.core import Finish, Group, Sampling, UpstreamError, UsageError
from rookery.training.rows import Row, summarize_rows
from rookery.upstreams import UpstreamConfig
from rookery.upstreams.token_function import TokenCall, TokenResult, serve_function

if TYPE_CHECKING:
    from rookery.engine import Engine

TESTED: Final = ("tinker", "0.36", "0.39")
LOSSES: Final = frozenset({"importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"})
"""Loss functions of Tinker that use advantages and the log probabilities of the sampler."""


class TinkerPolicy:
    """A Tinker sampling client as the policy of an engine.

    `client` is a `tinker.SamplingClient`. `model` is the name of the model in records, and `context` the maximum
    sequence length of the model. `tokenizer` is Tinker's (`TrainingClient.get_tokenizer()`), for `check`.
    """

    def __init__(
        self,
        client: Any,
        *,
        model: str = "tinker",
        context: int | None = None,
        tokenizer: TokenDecoder | None = None,
    ) -> None:
        check_version(*TESTED)
        self.client = client
        self._model = model
        self._settings = TrainerSettings(context=context)
        self._checks = RolloutChecks("Tinker", self._settings, tokenizer)

    def serve(self) -> AbstractContextManager[UpstreamConfig]:
        """Return a context manager whose value is the `policy` of an engine with `runners=0`."""
        return serve_function(self.generate, model=self._model, context=self._settings.context)

    def settle_sampling(self, wanted: Sampling | None = None) -> Sampling:
        """Return sampling parameters for training. Raise `UsageError` for a temperature other than 1, or top-p.

        The losses of Tinker compute log probabilities at temperature 1 over all tokens.
        """
        return self._settings.settle_sampling(wanted)

    def check(self, groups: Iterable[Group], engine: "Engine") -> None:
        """Raise `UsageError` if a sequence is too long for the model, or if Tinker has another tokenizer."""
        self._checks.check_groups(groups, engine.folder)

    async def generate(self, call: TokenCall) -> TokenResult:
        """Sample one reply."""
        import tinker

        sampling = call.sampling
        if sampling.extra or (sampling.stop and call.stop_ids):
            what = ", ".join(sampling.extra) or "stop strings together with the stop tokens of the chat format"
            raise UpstreamError(f"there is no sampling option of Tinker for {what}", cause="upstream.rejected")
        stop: Sequence[str] | Sequence[int] = list(sampling.stop) or list(call.stop_ids)
        params = tinker.SamplingParams(
            max_tokens=sampling.max_tokens,
            seed=call.seed,
            stop=stop or None,
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_k=-1 if sampling.top_k is None else sampling.top_k,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
        )
        response = await self.client.sample_async(tinker.ModelInput.from_ints(call.prompt), 1, params)
        sequence = response.sequences[0]
        finish: Finish = "length" if sequence.stop_reason == "length" else "stop"
        return TokenResult(tokens=sequence.tokens, logprobs=sequence.logprobs, finish=finish)

    async def update(self, engine: "Engine", training: Any, version: int) -> None:
        """Sample from the current weights of a `tinker.TrainingClient` from now on, as version `version`."""

        async def load() -> None:
            self.client = await training.save_weights_and_get_sampling_client_async()

        async with engine.upstream.sync(version, load):
            pass


def make_data(rows: Iterable[Row]) -> list[Any]:
    """Return a `tinker.Datum` for each row with a gradient: one that trains and whose advantage is not 0."""
    import tinker

    data = []
    for row in rows:
        if not row.trained or not row.advantage:
            continue
        advantages = np.where(row.mask, row.advantage * row.weight, 0.0).astype(np.float32)
        data.append(
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(row.tokens[:-1].tolist()),
                loss_fn_inputs={  # at position i: the token after it
                    "target_tokens": row.tokens[1:].astype(np.int64),
                    "logprobs": np.array(row.logprobs[1:], dtype=np.float32),
                    "advantages": advantages[1:],
                },
            )
        )
    return data


async def train_step(
    training: Any, rows: Sequence[Row], *, loss_fn: str = "importance_sampling", optimizer: Any = None
) -> dict[str, float]:
    """Make one training step with a `tinker.TrainingClient`, and return metrics.

    `optimizer` is a `tinker.AdamParams`. Without a gradient (all members failed or have equal rewards) no step is
    made.
    """
    import tinker

    if loss_fn not in LOSSES:
        raise UsageError(
            f"loss_fn {loss_fn!r} of Tinker does not use advantages: choose one of {', '.join(sorted(LOSSES))}"
        )
    data = make_data(rows)
    metrics = {**summarize_rows(rows), "rookery/data": float(len(data))}
    if data:
        passed = await training.forward_backward_async(data, loss_fn)
        stepped = await training.optim_step_async(optimizer or tinker.AdamParams())
        metrics |= {f"tinker/{name}": value for name, value in (await passed.result_async()).metrics.items()}
        await stepped.result_async()
    return metrics
