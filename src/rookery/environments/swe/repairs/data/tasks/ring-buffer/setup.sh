git add README.md
commit "2026-04-11T08:20:00" "What the buffer does"
git add ring.h ring.c
commit "2026-04-11T10:02:00" "The buffer"
git add -A
commit "2026-04-12T09:45:00" "A program to try it with"
