PATIENCE = 10
"""After so many ticks a job moves up by one."""


class Job:
    def __init__(self, number, arrived, name, urgency, length):
        self.number = number
        self.arrived = arrived
        self.name = name
        self.urgency = urgency
        self.length = length
        self.waited = 0

    @property
    def standing(self):
        return self.urgency - self.waited // PATIENCE

    def __lt__(self, other):
        return (self.urgency, self.number) < (other.urgency, other.number)
