"""What is closed at the end of a block.

Promise: `close` is called once at the end of the block, however that ends; what ended the block goes on.
"""

from types import TracebackType
from typing import Self


class Closing:
    """For what has a `close`."""

    __slots__ = ()

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClosing:
    """For what has a `close` that is waited for."""

    __slots__ = ()

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
