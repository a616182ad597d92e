import json

from shelf.paths import resolve


def answer(folder, request):
    path = resolve(folder, request)
    if path is None or not path.is_file():
        return "404"
    return "200 " + json.dumps(path.read_text(encoding="utf-8"))
