git add README.md Makefile collector.c sink.c sink.h
commit "2026-01-08T13:00:00" "A collector"
git add -A
commit "2026-01-15T17:25:00" "Logs are put aside"
