PATIENCE = 10
"""After so many ticks a job moves up by one."""


class Job:
    def __init__(self, number, arrived, name, urgency, length):
        self.number = number
        self.arrived = arrived
        self.name = name
        self.urgency = urgency
        self.length = length

    def standing(self, tick):
        return self.urgency - (tick - self.arrived) // PATIENCE
