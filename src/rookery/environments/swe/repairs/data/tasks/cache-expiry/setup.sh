git add README.md
commit "2026-02-03T09:12:00" "What a larder is meant to do"
cp larder/cache.py /tmp/cache.new && cat > larder/cache.py <<'OLD'
from larder.entry import Entry


class Larder:
    def __init__(self, room, keep, clock):
        self._room = room
        self._keep = keep
        self._clock = clock
        self._entries = {}

    def put(self, key, value):
        self._entries[key] = Entry(value, self._clock())

    def get(self, key, default=None):
        entry = self._entries.get(key)
        if entry is None or not entry.is_fresh(self._clock(), self._keep):
            return default
        return entry.value
OLD
git add larder
commit "2026-02-03T11:40:00" "First version, without a bound"
cp /tmp/cache.new larder/cache.py && rm /tmp/cache.new
git add -A
commit "2026-02-17T16:05:00" "Bounded: the least recently used entry goes"
