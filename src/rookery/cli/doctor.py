"""`rookery doctor`: what this machine can isolate and how, what is missing, and what would add it.

Promises:
- it does not guess: it makes a sandbox of the provider that would be used, runs a command in it and closes it;
- everything that is not fine comes with the command or setting that would make it so;
- it changes nothing and leaves nothing;
- exit code 0 where a provider that isolates works, 3 where none does.
"""

from typing import TYPE_CHECKING, Any, Final

import click

from rookery.cli.errors import Exit

if TYPE_CHECKING:
    from rookery.sandboxes import Best
    from rookery.sandboxes.local.machine import Check
    from rookery.sandboxes.local.probe import Proof

_SIGNS: Final = {"ok": ("ok", "green"), "weaker": ("weaker", "yellow"), "missing": ("missing", "red")}
_HELP = """Says what this machine can isolate and how, what is missing, and the command that would add it.

It makes a sandbox, runs a command in it and closes it again. Exit code 0: programs can be isolated here. 3: they
cannot.
"""


@click.command(help=_HELP, short_help="Say what this machine can isolate, and what is missing.")
@click.option("--json", is_flag=True, help="One JSON object on stdout.")
def doctor(json: bool) -> int:
    from rookery.sandboxes import best_provider, open_provider
    from rookery.sandboxes.docker import probe as docker
    from rookery.sandboxes.local import machine, probe

    local = probe.local_proof()
    engine = docker.check()
    checks = [*machine.checks(local), engine]
    best = _about_docker(best_provider(), engine)
    proof = local if best.name == "local" else probe.prove(lambda home: open_provider(best.name, home))
    code = Exit.OK if best.isolated and not proof.error else Exit.FAILED
    if json:
        click.echo(_plain(checks, best, proof, code))
    else:
        click.echo("\n".join(_lines(checks, best, proof, code)))
    return code


def _about_docker(best: "Best", engine: "Check") -> "Best":
    """What stands in its way is the engine alone: the image is whoever's who runs something."""
    from msgspec.structs import replace

    refused = {name: why for name, why in best.refused.items() if name != engine.name}
    if engine.status == "info":
        refused[engine.name] = engine.found
    return replace(best, refused=refused)


def _plain(checks: "list[Check]", best: "Best", proof: "Proof", code: int) -> bytes:
    import msgspec

    plain: dict[str, Any] = {
        "isolated": code == Exit.OK,
        "provider": best.name,
        "providers": _providers(best),
        "checks": checks,
        "proof": {name: value for name, value in msgspec.to_builtins(proof).items() if name != "about"},
        "exit_code": int(code),
    }
    return msgspec.json.encode(plain)


def _providers(best: "Best") -> list[dict[str, Any]]:
    """All that are installed: the one that would be used first, then the others."""
    from rookery.core.errors import describe
    from rookery.sandboxes import is_isolated, provider_names

    found = []
    for name in sorted(provider_names(), key=lambda name: (name != best.name, name)):
        why = best.refused.get(name, "")
        try:
            isolated = is_isolated(name)
        except Exception as error:  # noqa: BLE001  (whatever a broken plug-in raises: the others are still told)
            isolated, why = False, why or describe(error)
        found.append({"name": name, "isolated": isolated, "works": not why, "why": why})
    return found


def _lines(checks: "list[Check]", best: "Best", proof: "Proof", code: int) -> list[str]:
    from rookery.cli.text import bold, clean, columns, dim, line, table

    rows = []
    for check in checks:
        word, colour = _SIGNS.get(check.status, ("", None))
        rows.append([click.style(word, fg=colour) if word else "", check.name, line(check.found, columns() - 30)])
    lines = table(rows)
    fixes = [check for check in checks if check.fix]
    if fixes:
        lines += ["", bold("what would help")]
        lines += table([[check.name, clean(check.fix)] for check in fixes], indent="  ")
    lines += ["", f"{bold('proof')}     {_proven(best, proof)}"]
    if code == Exit.OK:
        lines.append(f"{bold('sandbox')}   {best.name}: programs run isolated from you")
    else:
        said = click.style("not isolated: programs run as you, on your files and network", fg="yellow")
        lines.append(f"{bold('sandbox')}   {best.name}, {said}; it is used only by name or with --unsafe")
    for one in _providers(best)[1:]:
        said = "" if one["isolated"] or not one["works"] else ", not isolated: it is used only by name"
        lines.append(dim(f"others    {one['name']}{said}{': ' if one['why'] else ''}{clean(one['why'])}"))
    return lines


def _proven(best: "Best", proof: "Proof") -> str:
    from rookery.cli.text import clean

    if proof.error:
        return click.style(f"no {best.name} sandbox could be made: {clean(proof.error)}", fg="red")
    return (
        f"a {best.name} sandbox was made in {proof.create_ms:.0f} ms, a second one in {proof.again_ms:.1f} ms; "
        f"a command ran in {proof.exec_ms:.1f} ms; all of it was gone after {proof.close_ms:.0f} ms"
    )
