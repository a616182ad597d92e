"""Waiting for a place at an upstream."""

import asyncio
from collections.abc import Awaitable

from rookery.upstreams.protocol import Held


async def waited(turn: Awaitable[object], held: Held | None) -> float:
    """The seconds until its turn came; `held` hears of the beginning and the end, also where it is cancelled."""
    loop = asyncio.get_running_loop()
    since = loop.time()
    if held is not None:
        held(True)
    try:
        await turn
    finally:
        if held is not None:
            held(False)
    return loop.time() - since
