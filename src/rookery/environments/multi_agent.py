"""Environments in which several participants talk: self-play games, debates, and simulated users.

Runs in a runner process. Each participant has its own conversation, in which its own replies are assistant
messages and what it observes of the others are user messages.

- A rollout trains one participant, the learner, unless the participants share their reward (`shared_reward`). The
  policy speaks for it. All k rollouts of a group have the same learner, so that their rewards are comparable.
- Every other participant is answered by the model role that it names or, without one, by the policy's inference
  engine. Its turns are recorded under the name of the role or of the participant, and never train.
- The reward of every participant is stored as a part of the rollout's score.
"""

from collections.abc import Mapping, Sequence
from typing import Final
from zlib import crc32

import msgspec

from rookery.core import Message, Sampling, Task, TaskError, UpstreamError, UsageError
from rookery.environments.base import Environment, Score
from rookery.environments.context import Context
from rookery.gateway import Model
from rookery.upstreams.protocol import ModelReply

LEARNER: Final = "learner"
"""Field of a task's data that names the participant that learns."""
_CONVERSATIONS: Final = "conversations"
_ROUND: Final = "round"


class Participant(msgspec.Struct, frozen=True, kw_only=True):
    """One participant of a `MultiAgentEnvironment`."""

    name: str
    system_prompt: str = ""
    trainable: bool = True
    """True if the policy can learn from this participant's replies."""
    role: str = ""
    """Model role that answers if this participant is not the learner, such as `user`. A run that does not
    configure it does not start. Empty means the policy's inference engine: self-play."""
    sampling: Sampling = Sampling()
    """Sampling parameters of its replies, which override those of the model. Set `max_tokens` to bound them."""


class MultiAgentEnvironment(Environment):
    """Base class for environments in which several participants talk to each other.

        class Debate(MultiAgentEnvironment):
            participants = (Participant(name="pro"), Participant(name="contra"))
            max_replies = 6

            async def rewards(self, ctx):
                ...
                return {"pro": 1.0, "contra": 0.0}

    Subclasses define `participants` and `rewards`. By default the participants speak in turn, each sees the task's
    prompt and everything that the others say, and the attempt ends after `max_replies` replies. Override
    `opening_messages`, `next_speaker`, `observe` and `done` to change that.
    """

    participants: Sequence[Participant] = ()
    max_replies: int = 20
    """Maximum number of replies of all participants together."""
    shared_reward: bool = False
    """True if all participants have the same goal. All trainable ones then learn in every rollout, from the mean
    of their rewards. Leave it False if they play against each other."""

    def __init__(self) -> None:
        names = [one.name for one in self.participants]
        if len(names) < 2 or len(set(names)) < len(names) or not all(names):
            raise UsageError(
                f"{self.title} needs two or more participants with different names, not {names!r:.200}"
            )
        if "policy" in names:
            raise UsageError(f"{self.title}: a participant cannot be named 'policy', which is a model role")
        if not any(one.trainable for one in self.participants):
            raise UsageError(f"{self.title} needs a trainable participant: the policy speaks for it")
        if self.max_replies < 1:
            raise UsageError(f"max_replies must be at least 1, not {self.max_replies!r}")
        self.roles = tuple(dict.fromkeys((*self.roles, *(one.role for one in self.participants if one.role))))

    # ---- for subclasses

    async def rewards(self, ctx: Context) -> Mapping[str, float]:
        """Return the reward of every participant, by name."""
        raise NotImplementedError(f"{type(self).__name__} must define `async def rewards(self, ctx)`")

    def opening_messages(self, ctx: Context, participant: Participant) -> list[Message]:
        """Return the messages with which a participant's conversation starts.

        By default they are its system prompt and the task's prompt.
        """
        head = [Message("system", participant.system_prompt)] if participant.system_prompt else []
        return [*head, *ctx.task.prompt]

    def next_speaker(self, ctx: Context, replies: int) -> str:  # noqa: ARG002  (for subclasses)
        """Return the name of the participant that speaks next, after `replies` replies.

        By default they speak in the order of `participants`.
        """
        return self.participants[replies % len(self.participants)].name

    async def observe(self, ctx: Context, speaker: str, text: str) -> Mapping[str, str]:  # noqa: ARG002
        """Take note of what a participant said, and return what others observe of it, by name.

        By default all others read the text. A subclass applies a move of a game here.
        """
        return {one.name: text for one in self.participants if one.name != speaker}

    def done(self, ctx: Context) -> bool:  # noqa: ARG002  (for subclasses)
        """Return whether the conversation ends after the last reply."""
        return False

    # ---- an attempt

    def learner(self, task: Task) -> str:
        """Return the name of the participant that learns from a rollout of this task.

        It is the task's field `learner`, or else one of the trainable participants, chosen by the task's ID.
        """
        names = [one.name for one in self.participants if one.trainable]
        wanted = task.data.get(LEARNER)
        if wanted is None:
            return names[crc32(task.id.encode()) % len(names)]
        if wanted not in names:
            raise TaskError(f"task {task.id}: data.learner must be one of {', '.join(names)}, not {wanted!r:.80}")
        return str(wanted)

    def is_trained(self, ctx: Context, participant: Participant) -> bool:
        """Return whether the policy speaks for a participant and learns from its replies in this attempt."""
        if self.shared_reward:
            return participant.trainable
        return participant.name == str(ctx.state[LEARNER])

    def conversation(self, ctx: Context, name: str) -> list[Message]:
        """Return the conversation of a participant so far."""
        conversations: dict[str, list[Message]] = ctx.state[_CONVERSATIONS]
        return conversations[name]

    async def setup(self, ctx: Context) -> None:
        ctx.state[LEARNER] = self.learner(ctx.task)
        ctx.info[LEARNER] = ctx.state[LEARNER]
        ctx.state[_CONVERSATIONS] = {one.name: self.opening_messages(ctx, one) for one in self.participants}
        ctx.state[_ROUND] = 0

    async def run(self, ctx: Context) -> None:
        by_name = {one.name: one for one in self.participants}
        for replies in range(self.max_replies):
            speaker = self.next_speaker(ctx, replies)
            if speaker not in by_name:
                raise UsageError(f"{self.title} has no participant {speaker!r}", cause="bug.environment")
            reply = await self._ask(ctx, by_name[speaker])
            self.conversation(ctx, speaker).append(reply.message)
            ctx.state[_ROUND] = replies + 1
            for name, text in (await self.observe(ctx, speaker, reply.text)).items():
                self._tell(ctx, name, text)
            if self.done(ctx):
                return

    async def _ask(self, ctx: Context, participant: Participant) -> ModelReply:
        """Ask the model that speaks for a participant for its next reply."""
        model = self._find_model(ctx, participant)
        reply = await model.chat(self.conversation(ctx, participant.name), sampling=participant.sampling)
        if reply.finish == "abort":
            raise UpstreamError("the inference engine aborted the generation (finish reason 'abort')")
        return reply

    def _find_model(self, ctx: Context, participant: Participant) -> Model:
        if self.is_trained(ctx, participant):
            return ctx.policy
        return ctx.model(participant.role) if participant.role else ctx.untrained_policy(participant.name)

    def _tell(self, ctx: Context, name: str, text: str) -> None:
        """Add what a participant observes to its conversation. Observations without a reply between are joined."""
        messages = self.conversation(ctx, name)
        if messages and messages[-1].role == "user" and isinstance(messages[-1].content, str):
            text = f"{messages.pop().text}\n{text}"
        messages.append(Message("user", text))

    async def score(self, ctx: Context) -> Score:
        """Return the learner's reward, with the rewards of all participants as parts."""
        rewards = dict(await self.rewards(ctx))
        missing = [one.name for one in self.participants if one.name not in rewards]
        if missing:
            raise UsageError(f"`rewards` has no reward for {', '.join(missing)}", cause="bug.reward")
        if self.shared_reward:
            trained = [rewards[one.name] for one in self.participants if one.trainable]
            reward = sum(trained) / len(trained)
        else:
            reward = rewards[ctx.state[LEARNER]]
        return Score(reward, rewards, {"replies": float(ctx.state[_ROUND])})
