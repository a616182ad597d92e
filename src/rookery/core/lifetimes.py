"""Base classes for context managers that call `close` on exit, and a context for tasks that outlive an attempt."""

from collections.abc import AsyncIterator
from contextvars import Context
from typing import Self, TypeVar

T = TypeVar("T")


class ClosesOnExit:
    """Calls `close` at the end of a `with` block, also after an exception."""

    __slots__ = ()

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClosesOnExit:
    """Awaits `close` at the end of an `async with` block, also after an exception."""

    __slots__ = ()

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class ClosableStream(AsyncIterator[T]):
    """Base class of asynchronous iterators. Awaits `aclose` at the end of an `async with` block."""

    __slots__ = ()

    async def aclose(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def detached_context() -> Context:
    """Return an empty `contextvars` context for asyncio tasks that must not end with the attempt that starts them.

    When an attempt ends, its runner process cancels every asyncio task that the attempt started. It finds these
    tasks by a context variable, which an empty context does not have. Shared work, such as a health check, an
    image download or the creation of a warm sandbox, is started with `create_task(...,
    context=detached_context())`. The caller must keep a reference to such a task and cancel it.
    """
    return Context()
