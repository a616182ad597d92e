#!/bin/sh
# As the grader: an interpreter of the system decides, whatever the working folder and the variables say. What is
# graded runs as another user, through ROOKERY_RUN where it is offered (see grading.py).
cd / || exit 1
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH
for python in /usr/bin/python3 /usr/local/bin/python3 "$(command -v python3)"; do
    [ -x "$python" ] && exec "$python" -I -B "$(dirname "$0")/grading.py"
done
echo "these tests need python3, which is not in this box" >&2
exit 1
