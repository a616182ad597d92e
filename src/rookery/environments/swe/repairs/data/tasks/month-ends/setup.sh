git add README.md billing/__init__.py billing/months.py
commit "2026-03-02T10:00:00" "Months"
cp billing/schedule.py /tmp/schedule.new && cat > billing/schedule.py <<'OLD'
"""When a subscription is due."""

from billing.months import moved


def due(start, count):
    return [moved(start, number) for number in range(count)]
OLD
git add billing/schedule.py
commit "2026-03-09T15:31:00" "The schedule of a subscription"
cp /tmp/schedule.new billing/schedule.py && rm /tmp/schedule.new
git add -A
commit "2026-07-20T08:47:00" "Other steps than a month, and backwards"
