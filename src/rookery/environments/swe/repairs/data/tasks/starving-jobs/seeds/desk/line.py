"""The jobs that wait."""

import heapq


class Line:
    def __init__(self):
        self._heap = []

    def __len__(self):
        return len(self._heap)

    def add(self, job):
        heapq.heappush(self._heap, job)

    def wait(self, ticks):
        """So many ticks went by."""
        for job in self._heap:
            job.waited += ticks

    def next(self):
        return heapq.heappop(self._heap)
