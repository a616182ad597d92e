"""Import objects that the user names as `module:attribute`."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from rookery.core.errors import UsageError, describe


def import_attribute(name: str, kind: str) -> Any:
    """Return the object that `name` names, such as `graders:brief`. `kind` says what it is, for messages.

    Modules in the working directory are found, too. Raise `UsageError` if the object cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(f"{name!r:.80} does not name a {kind}: write module:function")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # console scripts start without the working directory in sys.path
    try:
        target: Any = import_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{module}, the module of the {kind} {name!r}, cannot be imported: {describe(error)}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise UsageError(f"{module} has no attribute {attribute!r}, so the {kind} {name!r} does not exist")
        target = getattr(target, part)
    return target
