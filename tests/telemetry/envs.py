"""An environment that does everything that metrics and traces measure. Runner processes import this module."""

import aiohttp

from rookery import Context, ToolEnvironment, tool
from rookery.telemetry.operations import observe_grading


class Observed(ToolEnvironment):
    """Lets the policy call a tool, and calls the policy once through the gateway. The task can set a header."""

    name = "observed"

    @tool
    async def lookup(self, word: str) -> str:
        """Return the length of a word.

        Args:
            word: The word.
        """
        if word == "broken":
            raise ValueError("broken")
        return str(len(word))

    @property
    def needs_gateway(self) -> bool:
        return True

    async def run(self, ctx: Context) -> None:
        await super().run(ctx)
        async with ctx.gateway_session() as session:
            ctx.info["environment"] = session.environment()
            headers = {"Authorization": f"Bearer {session.key}", **ctx.task.data.get("headers", {})}
            body = {"model": "any", "messages": [{"role": "user", "content": "through the gateway"}]}
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"{session.url}/v1/chat/completions", json=body, headers=headers) as response,
            ):
                assert response.status == 200
                await response.read()
            await session.end()

    async def score(self, ctx: Context) -> float:
        with observe_grading("function"):
            return 0.5
