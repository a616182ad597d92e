"""Base classes for context managers that close themselves, and contexts for tasks that outlive their creator."""

from contextvars import Context
from types import TracebackType
from typing import Self


class ClosesOnExit:
    """Calls `close` at the end of a `with` block, also after an exception."""

    __slots__ = ()

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClosesOnExit:
    """Awaits `close` at the end of an `async with` block, also after an exception."""

    __slots__ = ()

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def detached_context() -> Context:
    """Return an empty context for tasks that must not end with the attempt that starts them.

    A runner cancels every task that an attempt started when the attempt ends; it finds them by their
    context. Shared
    work, such as a health check, an image download or the creation of a warm sandbox, is started with
    `create_task(..., context=detached_context())`. Its owner keeps a reference and ends it.
    """
    return Context()
