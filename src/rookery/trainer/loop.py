"""The training loop: loss, optimiser step and loop, from top to bottom.

Notation. mu is the behaviour policy that sampled a token: the sampler's weights at that time. pi_old is the
policy with the trainer's weights at the start of the step, and pi the policy that is being optimised. All three
differ: mu from pi_old by rounding and, with `lag`, by a few updates; pi_old from pi if a step has several updates.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rookery.core import Group, Task
from rookery.engine import EngineConfig, Step, SyncEngine
from rookery.engine.config import describe_config
from rookery.environments import Environment
from rookery.trainer import setup
from rookery.trainer.config import TrainConfig
from rookery.trainer.errors import memory_errors, not_finite_error
from rookery.trainer.folder import Progress, TrainingFolder, TrainResult
from rookery.trainer.loggers import Loggers
from rookery.trainer.metrics import StepStats, evaluate, no_signal_error, step_row
from rookery.trainer.policies import open_policy
from rookery.trainer.ratios import split_by_segment, write_ratios
from rookery.trainer.setup import Row
from rookery.training import Batch, PrefixTreeRow, is_informative

MAX_EMPTY = 3
"""Number of consecutive steps without an informative group after which training stops."""

# ------------------------------------------------------------------------------------------------------- loss


class TokenValues(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The trained tokens of a row as tensors, one value per token."""

    sampled: Tensor
    """log mu: log probability at sampling time."""
    advantages: Tensor
    weights: Tensor
    """Factor of a token's loss. The weights contain the normalisation, so losses are only summed."""


def token_logprobs(model: Any, row: Row, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, TokenValues]:
    """Return log pi and the entropy at each trained token of a row, and the other values of these tokens.

    Only the positions that predict a trained token go through the output layer. The sequences in a packed row do
    not attend to each other: transformers derives the boundaries from the position IDs, if there is no attention
    mask and no cache. A prefix tree has an attention mask.
    """
    device = next(model.parameters()).device

    def move(column: Any) -> Tensor:
        return torch.from_numpy(column).to(device)

    trained = row.trained
    needed, which = move(trained.positions).unique(return_inverse=True)
    mask = move(row.attention_mask)[None, None] if isinstance(row, PrefixTreeRow) else None
    with torch.autocast(device.type, dtype) if dtype else nullcontext():
        logits = model(
            input_ids=move(row.tokens).long()[None],
            position_ids=move(row.position_ids)[None],
            attention_mask=mask,
            use_cache=False,
            logits_to_keep=needed,
        ).logits[0]
    logp = logits.float().log_softmax(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)[which]
    values = TokenValues(
        sampled=move(trained.logprobs), advantages=move(trained.advantages), weights=move(trained.weights)
    )
    return logp[which, move(trained.labels)], entropy, values


def policy_loss(
    new: Tensor, old: Tensor, values: TokenValues, config: TrainConfig, reference: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss summed over tokens, and for each token whether clipping or masking removed its gradient.

        r = pi / pi_old          c = correct(pi_old / mu)
        loss = - sum_t weight_t * c_t * min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
               + kl * sum_t weight_t * r_t * (q_t - log q_t - 1),    q = pi_reference / pi

    `tis` truncates c at `tis_cap`. `icepop` sets c to 0 outside of [icepop_low, icepop_high]. `none` sets c to 1.
    `dppo` has no clipped ratio: it uses pi / mu, and drops tokens whose probability has already moved by more than
    `dppo_threshold` in the direction of their advantage. The last term is Schulman's k3 estimate of the KL
    divergence, times r so that its gradient is unbiased (DeepSeek-V3.2). clip_high above clip_low (clip-higher)
    lets unlikely tokens grow.
    """
    advantages, sampled = values.advantages, values.sampled
    if config.correction == "dppo":
        moved = (new.exp() - sampled.exp()).detach() * advantages.sign()
        dropped = moved > config.dppo_threshold
        ratio = (new - sampled).exp()
        objective = ratio * advantages * ~dropped
    else:
        ratio = (new - old).exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        objective = torch.minimum(ratio * advantages, clipped * advantages)
        dropped = (ratio * advantages) > (clipped * advantages)
        mismatch = (old - sampled).exp()
        if config.correction == "tis":
            objective = objective * mismatch.clamp(max=config.tis_cap)
        elif config.correction == "icepop":
            inside = (mismatch >= config.icepop_low) & (mismatch <= config.icepop_high)
            objective = objective * mismatch * inside
            dropped = dropped | ~inside
    loss = -(values.weights * objective).sum()
    if reference is not None:
        log_q = reference - new
        loss = loss + config.kl * (values.weights * ratio * (log_q.exp() - log_q - 1)).sum()
    return loss, dropped


# ------------------------------------------------------------------------------------------------------- step


class Optimizer:
    """A model with AdamW, linear warm-up, gradient clipping and the updates of a training step."""

    def __init__(
        self, model: Any, config: TrainConfig, learning_rate: float, dtype: torch.dtype | None = None
    ) -> None:
        self.model, self.config = model.train(), config
        self.dtype, self.learning_rate = dtype, learning_rate
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.adamw = torch.optim.AdamW(
            self.parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.row_tokens = config.row_tokens or (512 if self.parameters[0].device.type == "cpu" else 8192)
        self.share_prefixes = setup.choose_prefix_sharing(config, model)
        self.rows: list[Row] = []
        self.ratios: dict[int, Tensor] = {}
        """Importance ratios of the last step, by index in `rows`: pi_old / mu for each trained token."""
        self.order = torch.Generator().manual_seed(0)
        """Draws the minibatches. Its state is part of a checkpoint."""
        self.reference: dict[str, Tensor] | None = None
        if config.kl:
            self.reference = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def step(self, batch: Batch, number: int, done: float = 0.0) -> StepStats:
        """Train on one batch: `epochs` passes of `minibatches` updates each.

        `number` counts steps from 0, for the warm-up; `done` is the finished share of the run, for the decay.
        Raise `TrainingError` if the loss or the gradient is not finite; the weights are then unchanged by that
        update.
        """
        config, stats = self.config, StepStats()
        rows = setup.make_rows(batch, self.row_tokens, share_prefixes=self.share_prefixes)
        self.rows, self.ratios = rows, {}
        rate = self.learning_rate * min(1.0, (number + 1) / (config.warmup + 1)) * (1 - config.decay * done)
        for group in self.adamw.param_groups:
            group["lr"] = stats.learning_rate = rate
        # With a single update pi_old equals pi, and its log probabilities cost nothing.
        old = self._logprobs(rows) if config.epochs * config.minibatches > 1 else None
        reference = self._logprobs_with(self.reference, rows) if self.reference else None
        for _ in range(config.epochs):
            shuffled = torch.randperm(len(rows), generator=self.order).tolist()
            parts = [part for at in range(config.minibatches) if (part := shuffled[at :: config.minibatches])]
            for part in parts:
                self._update(rows, part, old, reference, len(parts), stats)
        for name in ("entropy", "sampler_kl", "clipped"):
            setattr(stats, name, getattr(stats, name) / max(1, stats.tokens))
        stats.loss /= max(1, stats.updates)
        return stats

    def _update(
        self,
        rows: list[Row],
        part: list[int],
        old: list[Tensor] | None,
        reference: list[Tensor] | None,
        parts: int,
        stats: StepStats,
    ) -> None:
        """Accumulate the gradients of some rows, clip their norm, and update the weights once.

        The weights of a whole batch are normalised, so the loss of one of n parts is multiplied by n.
        """
        self.adamw.zero_grad(set_to_none=True)
        total = 0.0
        for at in part:
            new, entropy, values = token_logprobs(self.model, rows[at], self.dtype)
            before = new.detach() if old is None else old[at]
            loss, dropped = policy_loss(new, before, values, self.config, reference[at] if reference else None)
            (loss * parts).backward()
            total += float(loss.detach()) * parts
            difference = before - values.sampled
            if self.config.ratios and at not in self.ratios:
                self.ratios[at] = difference.exp().float().cpu()
            stats.tokens += len(new)
            stats.entropy += float(entropy.sum())
            stats.sampler_kl += float((difference.exp() - difference - 1).sum())
            stats.clipped += float(dropped.sum())
            if len(new):
                stats.sampler_ratio = max(stats.sampler_ratio, math.exp(min(50.0, float(difference.abs().max()))))
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.grad_clip))
        if not (math.isfinite(total) and math.isfinite(norm)):
            self.adamw.zero_grad(set_to_none=True)
            raise not_finite_error(total, norm)
        self.adamw.step()
        stats.loss += total
        stats.grad_norm = max(stats.grad_norm, norm)
        stats.updates += 1

    def _logprobs(self, rows: list[Row]) -> list[Tensor]:
        with torch.no_grad():
            return [token_logprobs(self.model, row, self.dtype)[0] for row in rows]

    def _logprobs_with(self, weights: dict[str, Tensor], rows: list[Row]) -> list[Tensor]:
        """Return the log probabilities of the rows under other weights, such as those of the reference."""
        current = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(weights)
        try:
            return self._logprobs(rows)
        finally:
            self.model.load_state_dict(current)


# ------------------------------------------------------------------------------------------------------- loop


class Trainer:
    """Trains a policy on an environment.

        result = Trainer("arithmetic", policy="embedded", config=TrainConfig(steps=50)).train()

    A training run is a directory: settings, metrics, checkpoints, the weights that the sampler reads, and the
    journals of the rollouts. `resume_training(folder)` continues it from its last checkpoint.
    """

    def __init__(
        self,
        env: Environment | str,
        *,
        policy: str = "embedded",
        config: TrainConfig | None = None,
        tasks: Sequence[Task] | None = None,
        held_out: Sequence[Task] | None = None,
        out: str | Path = "runs",
        folder: Path | None = None,
        engine: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        """Check the settings, load the policy and create the directory of the training run in `out`.

        `tasks` are the tasks to train on, by default those of the environment, and `held_out` those to evaluate
        on. `folder` is the directory of a training run to continue. `options` are arguments of `Engine`;
        alternatively, `engine` sets them all.
        """
        self.config = setup.check_config(config or TrainConfig(steps=100), policy)
        self.on_row: Callable[[dict[str, Any]], None] = lambda row: None  # noqa: ARG005
        """Called with each row of the metrics, after it was written to `metrics.jsonl`."""
        self.on_start: Callable[[], None] = lambda: None
        """Called when the engine is open, before the first rollout."""
        device, dtype = setup.choose_device(self.config)
        title = setup.get_title(env, engine)
        self.folder = TrainingFolder.open(folder) if folder else TrainingFolder.create(Path(out), title, policy)
        try:
            self.policy = open_policy(policy, self.folder.weights, self.config)
            rate = setup.choose_learning_rate(self.config, policy)
            self.optimizer = Optimizer(self.policy.model.to(device), self.config, rate, dtype)
            self.progress = self.folder.restore(self.optimizer) or Progress()
            self.policy.push(self.progress.step)
            self.engine = setup.open_engine(env, self.policy, self.folder.rollouts, engine, options)
            setup.check_quotas(self.engine.environment, self.config)
            self._sampler = setup.choose_sampler(self.config)
            self.tasks, self.held_out = setup.split_tasks(
                self.engine.environment, tasks, held_out, self.config.eval_tasks
            )
            if folder is None:
                self.folder.describe(policy, self.config, describe_config(self.engine.config))
            self._loggers = Loggers(self.config.log_to, self.folder.path)
        except BaseException:
            if hasattr(self, "policy"):
                self.policy.close()
            self.folder.close() if folder else self.folder.remove()
            raise
        self._replaced: deque[Group] = deque()
        """Groups that `refill` replaced since the last step."""

    def train(self) -> TrainResult:
        """Train until `steps` or `minutes` are reached, and return what was achieved.

        Raise `TrainingError` if training cannot continue, and `Stopped` if too many rollouts fail. The last
        checkpoint is kept.
        """
        progress = self.progress
        self._began = time.monotonic() - progress.seconds
        with self.folder, closing(self.policy), self._loggers, self.engine as engine:
            self.on_start()
            if progress.engine:
                engine.load_state_dict(progress.engine)
            engine.resume(progress.step)
            if progress.step == 0 and progress.eval_before is None:
                progress.eval_before = progress.eval_after = self._evaluate(engine)
                self._checkpoint(engine)
            if not self._ended():
                with closing(self._steps(engine)) as steps:
                    self._loop(engine, steps)
            if progress.evaluated != progress.step:
                progress.eval_after = self._evaluate(engine)
            self._checkpoint(engine)
            if self.config.save:
                self.policy.save(Path(setup.prepare_target(self.config).save or ""))
        return progress.summarize(self.folder.path)

    def _steps(self, engine: SyncEngine) -> Generator[Step, None, None]:
        """Return the stream of training steps. Rollouts continue in other processes while this one trains."""
        config = self.config
        most = (config.max_refill - 1) * config.groups if config.refill else 0

        def keep(group: Group) -> bool:  # runs in the engine's thread
            if not (kept := is_informative(group.rewards) or len(self._replaced) >= most):
                self._replaced.append(group)
            return kept

        size, sampler = config.group_size, self._sampler
        return engine.steps(
            self.tasks, k=size, groups=config.groups, lag=config.lag, keep=keep, epochs=None, sampler=sampler
        )

    def _loop(self, engine: SyncEngine, steps: Iterator[Step]) -> None:
        config, progress = self.config, self.progress
        empty = 0
        while not self._ended():
            started = time.monotonic()
            step = next(steps)
            waited = time.monotonic()
            replaced = [self._replaced.popleft() for _ in range(len(self._replaced))]
            batch = setup.build_batch(step.groups, config)
            empty = 0 if any(kind == "informative" for kind in batch.groups.kind) else empty + 1
            if empty >= MAX_EMPTY:
                raise no_signal_error([*step.groups, *replaced], empty)
            stats = StepStats() if empty else self._optimise(batch)
            if config.ratios and not empty:
                self._write_ratios(engine, batch)
            trained = time.monotonic()
            progress.step += 1
            with engine.sync(progress.step, lambda: self.policy.push(progress.step)):
                pass  # no token is sampled while the weights change
            synced = time.monotonic()
            self._write(
                step_row([*step.groups, *replaced], batch, step.version)
                | msgspec.to_builtins(stats)
                | {
                    "wait_seconds": waited - started,
                    "train_seconds": trained - waited,
                    "sync_seconds": synced - trained,
                    "tokens_per_second": stats.tokens / max(1e-9, synced - started),
                }
            )
            if config.eval_every and progress.step % config.eval_every == 0:
                progress.eval_after = self._evaluate(engine)
            if progress.step % config.checkpoint_every == 0:
                self._checkpoint(engine)

    def _optimise(self, batch: Batch) -> StepStats:
        with memory_errors(self.progress.step + 1, self.optimizer.row_tokens):
            return self.optimizer.step(batch, self.progress.step, self.progress.get_share(self.config))

    def _write_ratios(self, engine: SyncEngine, batch: Batch) -> None:
        assert engine.folder is not None
        rows = [(self.optimizer.rows[at], ratios.numpy()) for at, ratios in self.optimizer.ratios.items()]
        ratios = split_by_segment(batch, rows)
        write_ratios(self.folder.path, engine.folder.name, self.progress.step + 1, ratios)

    def _ended(self) -> bool:
        """Return whether the limits leave no time for another step. The final evaluation is part of the time."""
        self.progress.seconds = time.monotonic() - self._began
        return self.progress.get_share(self.config) >= 1

    def _evaluate(self, engine: SyncEngine) -> float | None:
        """Run the held-out tasks with the current weights, write a row of metrics, and return the pass rate."""
        if not self.held_out:
            return None
        row, pass_rate = evaluate(engine, self.held_out, self.config.eval_per_task)
        self.progress.eval_seconds, self.progress.evaluated = row["eval_seconds"], self.progress.step
        self._write(row)
        return pass_rate

    def _write(self, row: dict[str, Any]) -> None:
        self.progress.seconds = time.monotonic() - self._began
        row = {"step": self.progress.step, "seconds": self.progress.seconds, **row}
        self.folder.write_metrics(row)
        for report in (self._loggers, self.on_row):
            report(row)

    def _checkpoint(self, engine: SyncEngine) -> None:
        self.progress.seconds = time.monotonic() - self._began
        self.progress.engine = engine.state_dict()
        self.folder.save(self.progress, self.optimizer, self.config.keep_checkpoints)
