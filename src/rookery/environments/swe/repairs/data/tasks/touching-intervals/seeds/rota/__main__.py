import sys

from rota.reading import BadBooking, read, show
from rota.spans import gaps, merged

DAY = (8 * 60, 18 * 60)


def main(arguments):
    if arguments not in (["busy"], ["free"]):
        print("usage: python3 -m rota busy|free", file=sys.stderr)
        return 2
    try:
        taken = merged(read(sys.stdin))
    except BadBooking as error:
        print(f"not a booking: {error}", file=sys.stderr)
        return 2
    for span in taken if arguments == ["busy"] else gaps(taken, DAY):
        print(show(span))
    return 0


sys.exit(main(sys.argv[1:]))
