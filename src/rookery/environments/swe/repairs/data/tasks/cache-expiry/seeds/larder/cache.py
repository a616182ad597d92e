from collections import OrderedDict

from larder.entry import Entry


class Larder:
    def __init__(self, room, keep, clock):
        if room < 1:
            raise ValueError("a larder needs room for one entry at least")
        self._room = room
        self._keep = keep
        self._clock = clock
        self._entries = OrderedDict()

    def put(self, key, value):
        now = self._clock()
        if key not in self._entries:
            while len(self._entries) >= self._room:
                self._entries.popitem(last=False)
        self._entries[key] = Entry(value, now)
        self._entries.move_to_end(key)

    def get(self, key, default=None):
        now = self._clock()
        entry = self._entries.get(key)
        if entry is None:
            return default
        if not entry.is_fresh(now, self._keep):
            del self._entries[key]
            return default
        entry.touch(now)
        self._entries.move_to_end(key)
        return entry.value

    def keys(self):
        now = self._clock()
        return sorted(key for key, entry in self._entries.items() if entry.is_fresh(now, self._keep))

    def __len__(self):
        return len(self.keys())
