import sys

from shelf.answer import answer


def main(arguments):
    if len(arguments) != 1:
        print("usage: python3 -m shelf FOLDER", file=sys.stderr)
        return 2
    for line in sys.stdin:
        print(answer(arguments[0], line.rstrip("\n")), flush=True)
    return 0


sys.exit(main(sys.argv[1:]))
