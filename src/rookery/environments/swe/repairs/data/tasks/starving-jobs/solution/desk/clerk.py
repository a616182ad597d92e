"""Who decides."""

from desk.line import Line


class Clerk:
    def __init__(self, jobs):
        self._coming = list(jobs)
        self._line = Line()
        self._tick = 0

    def work(self):
        """Pairs of a tick and the job that is started then."""
        while self._coming or self._line:
            self._let_in()
            if not self._line:
                self._pass(self._coming[0].arrived - self._tick)
                continue
            job = self._line.next(self._tick)
            yield self._tick, job
            self._pass(job.length)

    def _let_in(self):
        while self._coming and self._coming[0].arrived <= self._tick:
            self._line.add(self._coming.pop(0))

    def _pass(self, ticks):
        self._tick += ticks
