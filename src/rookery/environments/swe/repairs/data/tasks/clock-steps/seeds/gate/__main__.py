import argparse
import sys

from gate.limiter import Limiter


def main():
    parser = argparse.ArgumentParser(prog="gate")
    parser.add_argument("--burst", type=int, required=True)
    parser.add_argument("--rate", type=int, required=True)
    options = parser.parse_args()
    limiter = Limiter(options.burst, options.rate)
    for line in sys.stdin:
        if line.strip():
            at, client, cost = line.split()
            print("yes" if limiter.allows(int(at), client, int(cost)) else "no")


sys.exit(main())
