"""Run the conformance checks on a provider: `python -m rookery.sandboxes.conformance PROVIDER [--image IMAGE]`.

Use it to test a provider with your own machines, cluster or service. Every check closes the sandboxes it creates.
"""

import asyncio
import tempfile
import time
from pathlib import Path

import click
import msgspec

from rookery.core import SandboxSpec, UsageError
from rookery.core.errors import describe
from rookery.sandboxes import Provider, ProviderHome, open_provider
from rookery.sandboxes.conformance import CHECKS, find_capabilities


def use_image(provider: Provider, image: str) -> None:
    """Let a provider use an image for every sandbox whose spec names none."""
    check, create = provider.check, provider.create

    def complete(spec: SandboxSpec) -> SandboxSpec:
        return msgspec.structs.replace(spec, image=spec.image or image)

    # A wrapper would hide which optional protocols the provider implements.
    vars(provider).update(
        check=lambda spec: check(complete(spec)),
        create=lambda spec, **options: create(complete(spec), **options),
    )


async def run_checks(name: str, image: str | None, chosen: str) -> int:
    """Print the provider's capabilities, run the checks named like `chosen`, and return how many failed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="rookery-conformance-") as folder:
        home = ProviderHome(folder=Path(folder), run="conformance")
        provider = open_provider(name, home)
        if image:
            use_image(provider, image)
        try:
            if problems := provider.check(SandboxSpec(untrusted_ok=True)):
                raise click.ClickException(" ".join(problems))
            for feature, supported in (await find_capabilities(provider)).items():
                click.echo(f"{'yes' if supported else 'no':7} {feature}")
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
