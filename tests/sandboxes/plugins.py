"""Install test providers as third-party packages: a module and its entry point."""

from pathlib import Path

_MODULE = """
from rookery.sandboxes.subprocess_provider import SubprocessProvider


class Provider(SubprocessProvider):
    name = {name!r}
    isolated = {isolated}

    def check(self, spec):
        {check}
"""


def plugin(folder: Path, name: str, *, check: str, isolated: bool = True, module: str = "") -> None:
    """Install a provider that runs programs as `subprocess` does. `check` is the body of its method."""
    (folder / f"plugin_{name}.py").write_text(_MODULE.format(name=name, isolated=isolated, check=check))
    info = folder / f"plugin_{name}-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plugin-{name}\nVersion: 1.0\n")
    target = module or f"plugin_{name}"
    (info / "entry_points.txt").write_text(f"[rookery.sandboxes]\n{name} = {target}:Provider\n")
