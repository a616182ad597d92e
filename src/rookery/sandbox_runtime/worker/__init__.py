"""The program of a persistent Python worker inside a sandbox. Standard library only; Python 3.8 and newer.

`monitor` is the parent process. It enforces limits, kills process trees (`processes`), and takes and returns to
savepoints (`savepoints`). It never runs the user's code. `interpreter` is its child: it runs cells (`cells`,
`display`) and talks to the monitor (`channel`). `protocol` defines the frames between host, monitor and
interpreter; `linux` wraps system calls.
"""
