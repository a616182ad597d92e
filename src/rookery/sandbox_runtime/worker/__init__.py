"""The program of a persistent Python worker inside a sandbox. Standard library only; Python 3.8 and newer.

`monitor` is the parent process. It enforces limits, kills process trees (`processes`), and manages savepoints,
which are forks of the interpreter to which the worker can return (`savepoints`). It never runs the user's code.
`interpreter` is its child: it runs cells, the pieces of source code that the host sends (`cells`, `display`),
and talks to the monitor (`channel`). `protocol` defines the messages between host, monitor and interpreter;
`linux` wraps system calls.
"""
