"""`rookery doctor`: check which sandbox providers work on this machine and how to fix what is missing.

Guarantees:
- it creates a sandbox with the provider that a run would use, runs a command in it and removes it;
- every problem is printed with the command or setting that fixes it;
- it changes no settings of this machine;
- the exit code is 0 if a provider that isolates works, else 3.
"""

from typing import TYPE_CHECKING, Any, Final

import click

from rookery.cli.errors import Exit
from rookery.cli.options import option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rookery.sandboxes import ProviderChoice
    from rookery.sandboxes.probe import ProviderProof
    from rookery.sandboxes.protocol import MachineCheck

_SIGNS: Final = {"ok": ("ok", "green"), "weaker": ("weaker", "yellow"), "missing": ("missing", "red")}
_HELP = """Check which sandbox providers work on this machine, what is missing, and how to fix it.

Creates a sandbox, runs a command in it and removes it. The exit code is 0 if programs can be isolated on this
machine, and 3 if they cannot.
"""


@click.command(help=_HELP, short_help="Check which sandboxes work on this machine.")
@option("--json", is_flag=True, help="Print one JSON object.")
def doctor(json: bool) -> int:
    from rookery.sandboxes import best_provider, diagnose_providers
    from rookery.sandboxes.probe import probe_provider

    diagnoses = diagnose_providers()
    checks = [check for found in diagnoses.values() for check in found]
    best = _replace_refusals(best_provider(), diagnoses)
    proof = probe_provider(best.name)
    code = Exit.OK if best.isolated and not proof.error else Exit.FAILED
    if json:
        click.echo(_to_json(checks, best, proof, code))
    else:
        click.echo("\n".join(_format_report(checks, best, proof, code)))
    return code


def _replace_refusals(best: "ProviderChoice", diagnoses: "dict[str, Sequence[MachineCheck]]") -> "ProviderChoice":
    """Replace the reasons why providers cannot be used by the providers' own diagnoses.

    `best_provider` checks an empty sandbox spec, so it also refuses providers that only lack an image.
    """
    from msgspec.structs import replace

    refused = dict(best.refused)
    for name, checks in diagnoses.items():
        for summary in (check for check in checks if check.name == name):
            refused.pop(name, None)
            if summary.status in ("info", "missing"):
                refused[name] = summary.found
    return replace(best, refused=refused)


def _to_json(checks: "list[MachineCheck]", best: "ProviderChoice", proof: "ProviderProof", code: int) -> bytes:
    import msgspec

    plain: dict[str, Any] = {
        "isolated": code == Exit.OK,
        "provider": best.name,
        "providers": _list_providers(best),
        "checks": checks,
        "proof": {name: value for name, value in msgspec.to_builtins(proof).items() if name != "about"},
        "exit_code": int(code),
    }
    return msgspec.json.encode(plain)


def _list_providers(best: "ProviderChoice") -> list[dict[str, Any]]:
    """List the installed providers, starting with the one that a run would use."""
    from rookery.core.errors import describe
    from rookery.sandboxes import is_isolated, provider_names

    found = []
    for name in sorted(provider_names(), key=lambda name: (name != best.name, name)):
        why = best.refused.get(name, "")
        try:
            isolated = is_isolated(name)
        except Exception as error:  # noqa: BLE001  (a broken plug-in must not hide the others)
            isolated, why = False, why or describe(error)
        found.append({"name": name, "isolated": isolated, "works": not why, "reason": why})
    return found


def _format_report(
    checks: "list[MachineCheck]", best: "ProviderChoice", proof: "ProviderProof", code: int
) -> list[str]:
    from rookery.cli.terminal import bold, dim, escape_controls, format_table, one_line, terminal_width

    rows = []
    for check in checks:
        word, colour = _SIGNS.get(check.status, ("", None))
        rows.append(
            [
                click.style(word, fg=colour) if word else "",
                check.name,
                one_line(check.found, terminal_width() - 30),
            ]
        )
    lines = format_table(rows)
    fixes = [check for check in checks if check.fix]
    if fixes:
        lines += ["", bold("fixes")]
        lines += format_table([[check.name, escape_controls(check.fix)] for check in fixes], indent="  ")
    lines += ["", f"{bold('proof')}     {_describe_proof(best, proof)}"]
    if code == Exit.OK:
        lines.append(f"{bold('sandbox')}   {best.name}: programs run isolated")
    else:
        warning = click.style("not isolated: programs run as your user, with your files and network", fg="yellow")
        lines.append(f"{bold('sandbox')}   {best.name}, {warning}; used only if named, or with --unsafe")
    for one in _list_providers(best)[1:]:
        note = "" if one["isolated"] or not one["works"] else ", not isolated: used only if named"
        lines.append(
            dim(f"others    {one['name']}{note}{': ' if one['reason'] else ''}{escape_controls(one['reason'])}")
        )
    return lines


def _describe_proof(best: "ProviderChoice", proof: "ProviderProof") -> str:
    from rookery.cli.terminal import escape_controls

    if proof.error:
        return click.style(f"no {best.name} sandbox could be created: {escape_controls(proof.error)}", fg="red")
    return (
        f"a {best.name} sandbox was created in {proof.create_ms:.0f} ms, a second one in "
        f"{proof.second_create_ms:.1f} ms; a command ran in {proof.exec_ms:.1f} ms; everything was removed after "
        f"{proof.close_ms:.0f} ms"
    )
