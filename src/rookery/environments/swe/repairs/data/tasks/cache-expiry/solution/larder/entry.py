class Entry:
    def __init__(self, value, now):
        self.value = value
        self.at = now

    def is_fresh(self, now, keep):
        return now - self.at < keep
