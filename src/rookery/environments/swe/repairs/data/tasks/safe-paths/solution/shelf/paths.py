import os
from pathlib import Path
from urllib.parse import unquote_to_bytes


def resolve(folder, request):
    """The file that a request means, or None."""
    if not request.startswith("/"):
        return None
    try:
        text = unquote_to_bytes(request).decode("utf-8")
    except UnicodeDecodeError:
        return None
    if "\0" in text:
        return None
    parts = []
    for part in text.split("/"):
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    root = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(root, *parts))
    if os.path.commonpath([root, path]) != root:
        return None
    return Path(path)
