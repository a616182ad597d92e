"""The servers of an upstream, besides its calls: checks, health, size, freezing, and aborts by name.

Promises:
- what is asked here never samples, and never stands in the way of a call: it happens in the background, bounded in
  time and number, and its failure is nobody's but the server's;
- a replica that was left out is looked at when its while is over, and comes back when it answers;
- freezing reaches every replica that can be reached, or raises; one that is not there samples nothing;
- closing ends everything that was begun here.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from rookery.core import UpstreamError
from rookery.core.apart import apart
from rookery.upstreams.format import Ask
from rookery.upstreams.protocol import PauseMode, UpstreamConfig, UpstreamInfo
from rookery.upstreams.replica import Failure, Replica

log = logging.getLogger("rookery.upstreams")

PROBE_SECONDS: Final = 5.0
ABORT_SECONDS: Final = 5.0
SIZE_SECONDS: Final = 10.0
REFRESH_SECONDS: Final = 600.0
MISSING: Final = (404, 405, 501)
_AT_ONCE: Final = 32
_PENDING: Final = 1024
"""Aborts that may wait for their turn; past it, closed connections have to do."""

T = TypeVar("T")


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica does, for people and metrics."""

    name: str
    well: bool
    why: str
    """Why it is left out."""
    load: int
    """Calls that wait for a place or hold one."""
    limit: int


class Servers:
    """Some of it differs between kinds: what their engines can be told, and what they say of themselves."""

    vitals: ClassVar[str] = "models"
    """The endpoint that shows whether a server lives."""
    freezing: ClassVar[dict[str, tuple[str, bytes]]] = {}
    """Endpoint and body to freeze with, by mode, and to thaw with, where the engine can."""

    def __init__(self, config: UpstreamConfig, replicas: list[Replica]) -> None:
        self.config = config
        self.replicas = replicas
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        if config.concurrency is None and type(self).size is not Servers.size:
            for replica in replicas:
                replica.refresh_at = 0.0

    async def close(self) -> None:
        """Ends what is under way and closes every connection. Closing twice is fine."""
        for task in list(self._tasks):
            task.cancel()
        for replica in self.replicas:
            await replica.close()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=5.0)

    def states(self) -> tuple[ReplicaState, ...]:
        return tuple(
            ReplicaState(name=r.name, well=r.health.well, why=r.health.why, load=r.load, limit=r.limit)
            for r in self.replicas
        )

    # ------------------------------------------------------------------------------------- of each kind

    async def size(self, replica: Replica) -> int | None:  # noqa: ARG002  (a kind may)
        """How many calls the engine takes at once, where it says so."""
        return None

    async def gives_tokens(self, replica: Replica) -> bool:
        """Whether a server that hung works again."""
        raise NotImplementedError

    def farewell(self, ask: Ask) -> tuple[str, bytes] | None:  # noqa: ARG002  (a kind may)
        """Endpoint and body that abort a call by its name, where closing its connection is not enough."""
        return None

    # -------------------------------------------------------------------------------------- background

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, context=apart())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def look(self, now: float) -> None:
        """Looks at the replicas whose while is over."""
        for replica in self.replicas:
            if replica.health.probe(now=now):
                self.background(self._probe(replica))

    async def _probe(self, replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        health = replica.health
        try:
            if replica.hung:
                if await self.gives_tokens(replica):
                    replica.hung = False
                    health.answered()
                    log.warning("%s answers again", replica.name)
                else:
                    health.failed("gone", f"{replica.name} still hangs", now=loop.time())
                return
            answer = await replica.exchange(replica.endpoint(self.vitals), None, seconds=PROBE_SECONDS)
            if answer.status < 500:
                health.answered()
                log.warning("%s answers again", replica.name)
            else:
                health.failed("gone", str(replica.refusal(answer)[0].error), now=loop.time())
        except Failure as failure:
            health.failed("gone", str(failure.error), now=loop.time())
        finally:
            health.unprobed(now=loop.time())

    def refresh(self, replica: Replica) -> None:
        """Asks a server how much it can take, some time soon."""
        replica.refresh_at = asyncio.get_running_loop().time() + REFRESH_SECONDS
        self.background(self._resize(replica))

    async def _resize(self, replica: Replica) -> None:
        try:
            size = await self.size(replica)
        except Failure as failure:
            log.debug("no size of %s: %s", replica.name, failure.error)
            return
        if size is None or size < 1:
            return
        places = -(-size // max(1, self.config.share))
        if places != replica.limit:
            log.info("%s takes %d calls at once", replica.name, size)
            replica.places.resize(places)

    def _abandon(self, replica: Replica, ask: Ask) -> None:
        """The call was given up: the engine learns it from the closed connection, or here."""
        if (told := self.farewell(ask)) is not None and len(self._tasks) < _PENDING:
            self.background(self._abort(replica, *told))

    async def _abort(self, replica: Replica, path: str, body: bytes) -> None:
        async with self._turns:
            try:
                await replica.exchange(replica.endpoint(path), body, seconds=ABORT_SECONDS)
            except Failure as failure:
                log.debug("an abort did not reach its server: %s", failure.error)

    # ------------------------------------------------------------------------------------------ freezing

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:
        """Tells every replica to stop sampling; whether all of them can."""
        told = self.freezing.get(mode)
        if told is None:
            return False
        results = await self._everywhere(lambda replica: self._tell(replica, *told, seconds=timeout))
        for replica, able in zip(self.replicas, results, strict=True):
            if able and mode == "keep":
                replica.frozen()
        return all(results)

    async def thaw(self, *, timeout: float) -> None:
        """Lets every replica go on."""
        told = self.freezing.get("thaw")
        try:
            if told is not None:
                await self._everywhere(lambda replica: self._tell(replica, *told, seconds=timeout))
        finally:
            for replica in self.replicas:
                replica.thawed()

    async def _tell(self, replica: Replica, path: str, body: bytes, *, seconds: float) -> bool:
        """Whether the server did as it was told; raises where it could, and did not."""
        try:
            answer = await replica.exchange(replica.endpoint(path), body, seconds=seconds)
        except Failure as failure:
            if failure.kind == "connect":
                log.warning("a server is not there to be told %s: %s", path, failure.error)
                return True
            raise
        if answer.status in MISSING:
            return False
        if not 200 <= answer.status < 300:
            raise replica.refusal(answer)[0]
        return True

    async def _everywhere(self, do: Callable[[Replica], Awaitable[T]]) -> list[T]:
        """At every replica at once; raises the first failure when all of them have ended."""

        async def one(replica: Replica) -> T | UpstreamError:
            try:
                return await do(replica)
            except Failure as failure:
                failure.error.__cause__ = failure.__cause__
                return failure.error

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(replica)) for replica in self.replicas]
        results = [task.result() for task in tasks]
        good: list[T] = []
        for result in results:
            if isinstance(result, UpstreamError):
                raise result
            good.append(result)
        return good

    # -------------------------------------------------------------------------------------------- check

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        """What the servers say they serve; raises when none of them can be used. Samples nothing."""
        async with asyncio.TaskGroup() as group:
            checks = [group.create_task(self._check(replica, timeout)) for replica in self.replicas]
        results = [check.result() for check in checks]
        usable = [result for result in results if isinstance(result, UpstreamInfo)]
        errors = [result for result in results if isinstance(result, UpstreamError)]
        if not usable:
            raise errors[0]
        for error in errors:
            log.warning("a replica cannot be used: %s", error)
        if not errors:
            return usable[0]
        return msgspec.structs.replace(usable[0], details={"unusable": [str(error) for error in errors]})

    async def _check(self, replica: Replica, seconds: float) -> UpstreamInfo | UpstreamError:
        try:
            answer = await replica.exchange(replica.models, None, seconds=seconds)
        except Failure as failure:
            failure.error.__cause__ = failure.__cause__
            return failure.error
        if answer.status in MISSING:  # servers of one model often have no list
            return UpstreamInfo(url=replica.name)
        if not 200 <= answer.status < 300:
            return replica.refusal(answer)[0].error
        try:
            listed = _decode_models(answer.body).data
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return replica.error("upstream.protocol", f"the list of models cannot be read ({error})")
        models = tuple(entry.id for entry in listed)
        wanted = self.config.model
        if wanted and models and wanted not in models:
            more = f" and {len(models) - 10} more" if len(models) > 10 else ""
            there = ", ".join(models[:10]) + more
            return replica.error("upstream.rejected", f"the model {wanted!r} is not served; there is: {there}")
        named = [entry for entry in listed if entry.id == wanted] or (listed if len(listed) == 1 else [])
        length = named[0].max_model_len if named else None
        context = length if isinstance(length, int) and length > 0 else None
        if replica.refresh_at == 0.0:
            self.refresh(replica)
        return UpstreamInfo(url=replica.name, models=models, context=context)


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: Any = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


_decode_models = msgspec.json.Decoder(_Models).decode
