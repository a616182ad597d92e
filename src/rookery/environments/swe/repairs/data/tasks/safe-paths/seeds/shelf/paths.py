import posixpath
from pathlib import Path
from urllib.parse import unquote


def resolve(folder, request):
    """The file that a request means, or None."""
    parts = [part for part in request.split("/") if part not in ("", ".", "..")]
    path = posixpath.normpath(posixpath.join(folder, unquote("/".join(parts))))
    if not path.startswith(posixpath.normpath(folder)):
        return None
    return Path(path)
