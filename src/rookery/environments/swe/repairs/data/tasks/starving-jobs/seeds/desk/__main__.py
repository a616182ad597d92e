import sys

from desk.clerk import Clerk
from desk.job import Job


def main():
    jobs = []
    for number, line in enumerate(sys.stdin):
        if line.strip():
            tick, name, urgency, length = line.split()
            jobs.append(Job(number, int(tick), name, int(urgency), int(length)))
    for tick, job in Clerk(jobs).work():
        print(tick, job.name)


sys.exit(main())
