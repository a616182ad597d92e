"""Lifetime tricks: each program tries to outlive its command or its sandbox."""

from tests.sandboxes.hostile.program import MB, HostileProgram

SHORT = {"wall": 0.7, "memory": 512 * MB}
_DETACHED = """
    def detached(work):
        if os.fork():
            return
        os.setsid()
        if os.fork():
            os._exit(0)
        work()
        os._exit(0)
"""

PROGRAMS = [
    HostileProgram(
        name="forks_twice_and_sleeps",
        text=_DETACHED + "\n    detached(lambda: time.sleep(600))\n    time.sleep(600)",
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(
        name="ignores_every_signal",
        text="""
            for number in range(1, 65):
                try:
                    signal.signal(number, signal.SIG_IGN)
                except (OSError, ValueError):
                    pass
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
            while True:
                time.sleep(600)
        """,
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(name="stops_itself", text="os.kill(0, signal.SIGSTOP)", status=("time_limit",), limits=SHORT),
    HostileProgram(
        name="stops_everyone",
        text="os.fork()\nos.fork()\nwhile True: os.kill(-1, signal.SIGSTOP)",
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(name="kills_everyone", text="os.kill(-1, signal.SIGKILL)", status=("exited", "signaled")),
    HostileProgram(
        name="sends_every_signal_to_the_first_process",
        text="""
            for _ in range(3):
                for number in range(1, 65):
                    try:
                        os.kill(1, number)
                    except OSError:
                        pass
        """,
    ),
    HostileProgram(
        name="runs_ahead_of_a_killer",
        text="""
            if os.fork() == 0:
                while True:
                    if os.fork():
                        os._exit(0)
            time.sleep(600)
        """,
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(
        name="runs_ahead_of_a_killer_through_sessions",
        text="""
            for _ in range(4):
                if os.fork() == 0:
                    while True:
                        try:
                            if os.fork():
                                os._exit(0)
                            os.setsid()
                        except OSError:
                            pass
            time.sleep(600)
        """,
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(
        name="wakes_whoever_is_stopped",
        text="""
            for _ in range(3):
                if os.fork() == 0:
                    os.setsid()
                    while True:
                        try:
                            os.kill(-1, signal.SIGCONT)
                            if os.fork():
                                os._exit(0)
                        except OSError:
                            pass
            time.sleep(600)
        """,
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(
        name="hides_its_environment",
        text=_DETACHED
        + """
    detached(lambda: os.execve("/proc/self/exe", ["x", "-c", "import time; time.sleep(600)"], {}))
    time.sleep(600)
        """,
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(
        name="claims_to_be_an_earlier_command",
        text=_DETACHED
        + """
    mark = {"ROOKERY_COMMAND": "1"}
    detached(lambda: os.execve("/proc/self/exe", ["x", "-c", "import time; time.sleep(600)"], mark))
    time.sleep(600)
        """,
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(
        name="claims_to_be_a_later_command",
        text=_DETACHED
        + """
    import resource
    hard = resource.getrlimit(10)[1]
    for step in (1, 2, 1000, hard):
        if os.fork() == 0:
            resource.setrlimit(10, (hard - step,) * 2)
            mark = {"ROOKERY_COMMAND": "1"}
            detached(lambda: os.execve("/proc/self/exe", ["x", "-c", "import time; time.sleep(600)"], mark))
            os._exit(0)
    time.sleep(600)
        """,
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(
        name="buries_its_environment",
        text=_DETACHED
        + """
    long = {f"A{n}": "x" * 100_000 for n in range(15)}
    detached(lambda: os.execve("/proc/self/exe", ["x", "-c", "import time; time.sleep(600)"], long))
    time.sleep(600)
        """,
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(
        name="looks_dead",
        text=_DETACHED
        + """
    import ctypes
    ctypes.CDLL(None).prctl(15, b") Z 1 1 1 (x", 0, 0, 0)
    detached(lambda: time.sleep(600))
    time.sleep(600)
        """,
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(
        name="adopts_its_own_orphans",
        text=_DETACHED
        + """
    import ctypes
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    detached(lambda: time.sleep(600))
    time.sleep(600)
        """,
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(
        name="makes_a_long_chain",
        text="for _ in range(25):\n    if os.fork():\n        time.sleep(600)\n    os.setsid()\ntime.sleep(600)",
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(
        name="leaves_zombies",
        text="for _ in range(20):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(600)",
        status=("time_limit",),
        limits=SHORT,
    ),
    HostileProgram(
        name="leaves_a_daemon",
        text=_DETACHED
        + """
    def stay():
        null = os.open("/dev/null", os.O_RDWR)
        for at in range(3):
            os.dup2(null, at)
        time.sleep(600)
    detached(stay)
        """,
        leaves_processes=True,
    ),
    HostileProgram(
        name="leaves_a_daemon_with_its_output",
        text=_DETACHED + "\n    detached(lambda: time.sleep(600))\n    print('gone', flush=True)",
        leaves_processes=True,
    ),
    HostileProgram(
        name="leaves_a_daemon_that_writes",
        text=_DETACHED + "\n    def flood():\n        while True: os.write(1, bytes(65536))\n    detached(flood)",
        status=("exited", "output_limit"),
        leaves_processes=True,
    ),
    HostileProgram(
        name="leaves_a_fork_chain",
        text=_DETACHED
        + """
    def chain():
        while True:
            if os.fork():
                os._exit(0)
    detached(chain)
        """,
        leaves_processes=True,
    ),
    HostileProgram(
        name="leaves_a_bomb",
        text=_DETACHED
        + """
    def bomb():
        while True:
            try:
                os.fork()
            except OSError:
                pass
    detached(bomb)
        """,
        leaves_processes=True,
    ),
]
