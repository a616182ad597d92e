import io
import json
import sys

from table import rows


def main(arguments):
    if arguments not in (["rows"], ["width"]):
        print("usage: python3 -m table rows|width", file=sys.stderr)
        return 2
    text = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8").read()
    table = list(rows(text))
    if arguments == ["width"]:
        print(max((len(row) for row in table), default=0))
    else:
        for row in table:
            print(json.dumps(row))
    return 0


sys.exit(main(sys.argv[1:]))
