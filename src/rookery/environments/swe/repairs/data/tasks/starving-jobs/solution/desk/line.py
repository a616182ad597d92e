"""The jobs that wait."""


class Line:
    def __init__(self):
        self._jobs = []

    def __len__(self):
        return len(self._jobs)

    def add(self, job):
        self._jobs.append(job)

    def next(self, tick):
        job = min(self._jobs, key=lambda job: (job.standing(tick), job.number))
        self._jobs.remove(job)
        return job
