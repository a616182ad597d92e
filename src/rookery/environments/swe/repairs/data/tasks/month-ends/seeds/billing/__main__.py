import argparse
import datetime
import sys

from billing.schedule import due


def main():
    parser = argparse.ArgumentParser(prog="billing")
    parser.add_argument("start", type=datetime.date.fromisoformat)
    parser.add_argument("count", type=int)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--back", action="store_true")
    options = parser.parse_args()
    if options.count < 1 or options.every < 1:
        parser.error("count and months must be 1 at least")
    step = -options.every if options.back else options.every
    for date in due(options.start, options.count, step):
        print(date.isoformat())


sys.exit(main())
