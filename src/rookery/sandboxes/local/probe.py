"""Explain why no local sandbox can be created on this machine."""

import functools

from rookery.sandboxes.local import machine_checks
from rookery.sandboxes.probe import ProviderProof, probe_provider


def probe_local() -> ProviderProof:
    """Probe the local provider, once in a process."""
    return probe_provider("local")


@functools.cache
def find_problem() -> str:
    """Return why no local sandbox can be created here and what would help, or "" if one can."""
    proof = probe_local()
    if not proof.error:
        return ""
    missing = (check for check in machine_checks.run_checks(proof) if check.status == "missing")
    fixes = [f"{check.found[:1].upper()}{check.found[1:]}; to change that: {check.fix}." for check in missing]
    return " ".join([f"No local sandbox can be created on this machine: {proof.error}.", *fixes])
