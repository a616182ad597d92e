"""Pack a subpackage of the runtime into one program text, for interpreters that cannot see its files.

The text contains the sources of the subpackage and a small importer, so that its modules import each other with
ordinary statements. When `main` is called, the modules are gone from `sys.modules` and the importer from
`sys.meta_path`. This module runs in the process that uses a sandbox, in the keeper (the daemon that creates local
sandboxes) and in pid 1 of a sandbox. The program text runs in a sandbox.
"""

import os
from _frozen_importlib_external import MAGIC_NUMBER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

_ROOT: "Final" = os.path.dirname(os.path.abspath(__file__))
_PACKAGE: "Final" = "rookery.sandbox_runtime"
_PROGRAM: "Final" = """\
import builtins, marshal, sys
from _frozen_importlib import ModuleSpec
initial_modules = dict(sys.modules)
private_builtins = {private_builtins}
modules = {modules}
packages = {packages}

class BundleImporter:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, BundleImporter, is_package=name in packages) if name in modules else None

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        code = modules[module.__name__]
        if isinstance(code, str):
            code = compile(code, "<" + module.__name__ + ">", "exec", dont_inherit=True)
        if private_builtins is not None:
            module.__dict__["__builtins__"] = private_builtins
        exec(code, module.__dict__)

sys.meta_path.insert(0, BundleImporter)
from {entry} import main
sys.meta_path.remove(BundleImporter)
for name in modules:
    sys.modules.pop(name, None)
{call}
"""
_RUN_ARGUMENT: "Final" = (
    "import sys, binascii, marshal, zlib, _frozen_importlib_external as f\n"
    "exec(marshal.loads(zlib.decompress(binascii.a2b_base64(sys.argv[2]))) "
    "if f.MAGIC_NUMBER.hex() == sys.argv[1] else sys.argv[3])"
)


def build_source(subpackage: str, module: str, *, call: str = "main()", private_builtins: bool = False) -> str:
    """Return the source of a program that imports `main` from a module of a subpackage and calls it.

    The program runs on Python 3.8 and newer. `call` is the Python expression that calls `main`. It may use
    `initial_modules`, the contents of `sys.modules` before the first import. With `private_builtins`,
    the bundled modules get their own copy of the built-in names, which other code in the process cannot change.
    """
    sources = _read_sources(subpackage)
    return _render(repr(sources), sources, subpackage, module, call, private_builtins)


def build_code(subpackage: str, module: str, *, call: str = "main()", private_builtins: bool = False) -> bytes:
    """Return the program of `build_source`, compiled and marshalled.

    Only interpreters with the same bytecode version (`MAGIC_NUMBER`) as this one can run it.
    """
    import marshal

    sources = _read_sources(subpackage)
    compiled = {
        name: compile(source, f"<{name}>", "exec", dont_inherit=True, optimize=0)
        for name, source in sources.items()
    }
    text = _render(
        f"marshal.loads({marshal.dumps(compiled)!r})", sources, subpackage, module, call, private_builtins
    )
    return marshal.dumps(compile(text, f"<{subpackage}>", "exec", dont_inherit=True, optimize=0))


def build_command(subpackage: str, module: str) -> tuple[str, ...]:
    """Return the command line that runs the `main` of a bundled module with the sandbox's `python3`.

    The program is passed as an argument, as source and compiled. An interpreter with the same bytecode version as
    this one uses the compiled program, which saves a third of the start-up time.
    """
    import binascii
    import zlib

    code = binascii.b2a_base64(zlib.compress(build_code(subpackage, module)), newline=False).decode()
    return ("python3", "-c", _RUN_ARGUMENT, MAGIC_NUMBER.hex(), code, build_source(subpackage, module))


def _read_sources(subpackage: str) -> dict[str, str]:
    """Return the sources of a subpackage's modules by full name. Its parent packages have empty sources."""
    sources = dict.fromkeys(_list_packages(subpackage), "")
    directory = f"{_ROOT}/{subpackage}"
    for file in sorted(os.listdir(directory)):
        if file.endswith(".py") and file != "__init__.py":
            with open(f"{directory}/{file}", encoding="utf-8") as source:
                sources[f"{_PACKAGE}.{subpackage}.{file[:-3]}"] = source.read()
    return sources


def _list_packages(subpackage: str) -> list[str]:
    return [_PACKAGE.partition(".")[0], _PACKAGE, f"{_PACKAGE}.{subpackage}"]


def _render(
    modules: str, sources: dict[str, str], subpackage: str, module: str, call: str, private_builtins: bool
) -> str:
    entry = f"{_PACKAGE}.{subpackage}.{module}"
    assert entry in sources, entry
    return _PROGRAM.format(
        private_builtins="dict(vars(builtins))" if private_builtins else "None",
        modules=modules,
        packages=_list_packages(subpackage),
        entry=entry,
        call=call,
    )
