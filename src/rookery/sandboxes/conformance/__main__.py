"""Run the conformance checks on a provider: `python -m rookery.sandboxes.conformance PROVIDER [--image IMAGE]`.

Use it to test a provider with your own machines, cluster or service. Every check closes the sandboxes it creates.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from rookery.core import SandboxSpec, UsageError
from rookery.core.errors import describe
from rookery.sandboxes import Provider, ProviderHome, Sandbox, open_provider
from rookery.sandboxes.conformance import CHECKS


class ProviderWithImage:
    """A provider that uses one image for every sandbox whose spec names none."""

    def __init__(self, provider: Provider, image: str | None) -> None:
        self.name = provider.name
        self.isolated = provider.isolated
        self._provider = provider
        self._image = image

    def _complete(self, spec: SandboxSpec) -> SandboxSpec:
        return msgspec.structs.replace(spec, image=spec.image or self._image)

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        return self._provider.check(self._complete(spec))

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> Sandbox:
        return await self._provider.create(self._complete(spec), attempt=attempt, timeout=timeout)

    async def close(self) -> None:
        await self._provider.close()


async def run_checks(name: str, image: str | None, chosen: str) -> int:
    """Run the checks whose names contain `chosen`, print a line for each, and return how many failed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="rookery-conformance-") as folder:
        home = ProviderHome(folder=Path(folder), run="conformance")
        provider = ProviderWithImage(open_provider(name, home), image)
        try:
            if problems := provider.check(SandboxSpec(untrusted_ok=True)):
                raise click.ClickException(" ".join(problems))
            for check in CHECKS:
                if chosen not in check.__name__:
                    continue
                start = time.monotonic()
                try:
                    await check(provider)
                except Exception as error:  # noqa: BLE001  (reported; the other checks still run)
                    failed += 1
                    click.echo(f"FAILED  {check.__name__}: {describe(error)}")
                else:
                    click.echo(f"ok      {check.__name__} ({time.monotonic() - start:.1f} s)")
        finally:
            await provider.close()
    return failed


@click.command()
@click.argument("provider")
@click.option("--image", help="Image of the sandboxes, for a provider that needs one.")
@click.option("-k", "chosen", default="", help="Run only the checks whose names contain this text.")
def main(provider: str, image: str | None, chosen: str) -> None:
    """Run the conformance checks on the sandbox provider PROVIDER. Exit with 1 if one of them fails."""
    try:
        failed = asyncio.run(run_checks(provider, image, chosen))
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    if failed:
        raise click.ClickException(f"{failed} checks failed")


if __name__ == "__main__":
    main()
