"""Python programs that a warm interpreter must run exactly as a new one does."""

# ruff: noqa: E501  (a program is read best as it is)

from dataclasses import dataclass, field
from textwrap import dedent
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PythonProgram:
    """One program. `files` are written into its working directory."""

    name: str
    argv: tuple[str, ...]
    stdin: bytes = b""
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    warm: bool = True
    """True if a warm interpreter can run it without starting a new one."""


def code(name: str, text: str, *args: str, options: tuple[str, ...] = (), **more: Any) -> PythonProgram:
    return PythonProgram(name=name, argv=("python3", *options, "-c", dedent(text), *args), **more)


def script(name: str, text: str, *args: str, **more: Any) -> PythonProgram:
    return PythonProgram(
        name=name, argv=("python3", f"{name}.py", *args), files={f"{name}.py": dedent(text)}, **more
    )


PRINT_STATE = """
import sys, os
print(sys.argv, sys.orig_argv, sys.flags, sys.path, sys.executable, sys.prefix, sys.base_prefix, sys.exec_prefix)
print(sorted(sys.modules), sys.warnoptions, sys._xoptions, sys.dont_write_bytecode, sys.getrecursionlimit())
print(sys.meta_path[1:], len(sys.meta_path), len(sys.path_hooks), sys.gettrace(), sys.getprofile())
print({k: repr(v) for k, v in globals().items() if k.startswith('__') and k != '__builtins__'})
print(type(__builtins__), sorted(vars(__builtins__) if not isinstance(__builtins__, dict) else __builtins__))
"""

PROGRAMS = [
    code("nothing", "pass"),
    code("prints", "print('hello', 1, None)"),
    code("an_exit_code", "import sys; sys.exit(7)"),
    code("a_negative_exit_code", "import sys; sys.exit(-1)"),
    code("a_large_exit_code", "raise SystemExit(1000)"),
    code("an_exit_with_words", "import sys; sys.exit('words')"),
    code("an_exit_with_a_list", "import sys; sys.exit([1, 2])"),
    code("an_exit_of_none", "exit()"),
    code("an_exit_of_true", "raise SystemExit(True)"),
    code("an_uncaught_exception", "def f(): raise ValueError('no')\nf()"),
    code("an_exception_without_words", "raise KeyError"),
    code("a_chained_exception", "try:\n 1 / 0\nexcept ZeroDivisionError as e:\n raise OSError('x') from e"),
    code("a_context_of_an_exception", "try:\n 1 / 0\nexcept ZeroDivisionError:\n {}['x']"),
    code("a_group_of_exceptions", "raise ExceptionGroup('many', [ValueError(1), TypeError(2)])"),
    code("a_note", "e = ValueError('x'); e.add_note('a note'); raise e"),
    code("a_syntax_error", "x = = 1"),
    code("an_indentation_error", "if 1:\nx = 1"),
    code("an_unfinished_string", "print('x"),
    code("a_name_error_with_a_hint", "prin = 1\nprimt(2)"),
    code("an_assertion", "assert 1 == 2, 'never'"),
    code("a_recursion_error", "def f(n): return f(n + 1)\nf(0)"),
    code("how_deep_it_goes", "def f(n):\n try: return f(n + 1)\n except RecursionError: return n\nprint(f(0))"),
    code("what_it_sees", PRINT_STATE),
    code("what_it_sees_with_arguments", PRINT_STATE, "a", "-b", "--c=d", "", "ünïcode"),
    code("what_it_sees_isolated", PRINT_STATE, options=("-I",)),
    code("what_it_sees_without_an_environment", PRINT_STATE, options=("-E", "-s")),
    code("what_it_sees_without_bytecode", PRINT_STATE, options=("-B",)),
    code("what_it_sees_unbuffered", PRINT_STATE + "print(sys.stdout.write_through)", options=("-u",)),
    code("options_in_one_word", PRINT_STATE, options=("-Bu",)),
    PythonProgram(name="code_in_the_word_of_the_option", argv=("python3", "-cprint(1)", "x")),
    PythonProgram(name="code_after_options_in_one_word", argv=("python3", "-uc", "print(1)", "x")),
    code("developer_mode", "import sys; print(sys.flags)", options=("-X", "dev"), warm=False),
    code("warnings_as_errors", "import warnings; warnings.warn('x')", options=("-W", "error"), warm=False),
    code("optimised", "assert 0; print(__debug__)", options=("-O",), warm=False),
    code("without_a_site", "import sys; print(sorted(sys.modules))", options=("-S",), warm=False),
    PythonProgram(name="its_version", argv=("python3", "-V"), warm=False),
    PythonProgram(name="a_missing_word", argv=("python3", "-c"), warm=False),
    PythonProgram(name="an_unknown_option", argv=("python3", "-Z"), warm=False),
    PythonProgram(name="a_missing_script", argv=("python3", "missing.py")),
    PythonProgram(name="a_missing_module", argv=("python3", "-m", "missing_module")),
    PythonProgram(name="a_missing_submodule", argv=("python3", "-m", "json.missing")),
    PythonProgram(name="a_module_of_the_library", argv=("python3", "-m", "json.tool"), stdin=b'{"a": [1, 2]}'),
    PythonProgram(name="a_module_with_bad_input", argv=("python3", "-m", "json.tool"), stdin=b"{"),
    PythonProgram(
        name="a_module_of_its_own",
        argv=("python3", "-m", "mine", "x"),
        files={"mine.py": PRINT_STATE + "\nraise ValueError(__spec__)"},
    ),
    PythonProgram(
        name="a_package",
        argv=("python3", "-m", "pack", "x"),
        files={"pack/__init__.py": "print('init', __name__)", "pack/__main__.py": PRINT_STATE},
    ),
    script("a_script", PRINT_STATE, "a", "b"),
    script("a_script_that_fails", "def f():\n    raise ValueError('no')\n\nif __name__ == '__main__':\n    f()\n"),
    script("a_script_with_a_syntax_error", "x = 1\ny = (\n"),
    script("a_script_with_an_encoding", "# -*- coding: latin-1 -*-\nprint(ascii('\u00e9'))\n"),
    script("a_script_that_imports", "import helper\nprint(helper.__file__, helper.x)\n"),
    PythonProgram(name="a_script_elsewhere", argv=("python3", "sub/x.py"), files={"sub/x.py": PRINT_STATE, "sub/y.py": ""}),
    PythonProgram(name="an_absolute_script", argv=("python3", "/work/abs.py"), files={"abs.py": PRINT_STATE}),
    PythonProgram(name="a_folder", argv=("python3", "app", "x"), files={"app/__main__.py": PRINT_STATE}),
    PythonProgram(name="a_folder_without_a_main", argv=("python3", "empty"), files={"empty/x.py": ""}),
    PythonProgram(name="a_program_from_its_input", argv=("python3",), stdin=PRINT_STATE.encode()),
    PythonProgram(name="a_program_from_its_input_with_arguments", argv=("python3", "-", "a"), stdin=PRINT_STATE.encode()),
    PythonProgram(name="a_bad_program_from_its_input", argv=("python3",), stdin=b"x = = 1\n"),
    PythonProgram(name="no_program_at_all", argv=("python3",)),
    PythonProgram(name="a_failing_program_from_its_input", argv=("python3",), stdin=b"def f():\n  1/0\nf()\n"),
    code("its_input", "import sys; print(repr(sys.stdin.read()))", stdin=b"a\r\nb\xff\n"),
    code("its_input_in_lines", "import sys\nfor line in sys.stdin: print(repr(line))", stdin=b"a\nb\n\nc"),
    code("a_question", "print(input('? '))", stdin=b"answer\nmore"),
    code("a_question_without_an_answer", "input('? ')"),
    code("bytes", "import sys; sys.stdout.buffer.write(bytes(range(256)) + sys.stdin.buffer.read())", stdin=b"\0\xff"),
    code("its_variables", "import os; print(sorted(os.environ.items()))", env={"A": "b", "EMPTY": "", "X": "ü=y"}),
    code(
        "variables_of_its_children",
        """
            import os, subprocess, posix
            os.environ['NEW'] = '1'
            del os.environ['A']
            print(sorted(subprocess.run(['env'], capture_output=True, text=True).stdout.splitlines()))
            print(sorted(posix.environ))
        """,
        env={"A": "b"},
    ),
    code(
        "what_the_kernel_says",
        """
            import os
            for name in ('cmdline', 'environ', 'comm'):
                print(open(f'/proc/self/{name}', 'rb').read())
            keep = ('Umask', 'PPid', 'Uid', 'Gid', 'Groups', 'Threads', 'Sig', 'Cap', 'NoNewPrivs', 'Seccomp')
            for line in open('/proc/self/status'):
                if line.startswith('SigIgn'):  # but 32 and 33, the C library's own: whoever started us may ignore them
                    print(hex(int(line.split()[1], 16) & ~(3 << 31)))
                elif line.startswith(keep) and not line.startswith('SigQ'):
                    print(line, end='')
            print(os.getpid() == os.getsid(0) == os.getpgid(0), os.getcwd(), os.nice(0), os.sched_getscheduler(0))
            import resource
            names = [n for n in dir(resource) if n.startswith('RLIMIT_')]
            print({n: resource.getrlimit(getattr(resource, n)) for n in names})
            print(open('/proc/self/oom_score_adj').read(), open('/proc/self/loginuid').read())
            print(open('/proc/self/cgroup').read())
        """,
    ),
    code(
        "its_descriptors",
        """
            import os
            found = {fd: os.readlink(f'/proc/self/fd/{fd}').partition(':')[0] for fd in os.listdir('/proc/self/fd')
                     if os.path.exists(f'/proc/self/fd/{fd}') or int(fd) < 3}
            print(found, [os.get_inheritable(fd) for fd in range(3)])
        """,
    ),
    code(
        "its_signals",
        """
            import signal
            for number in sorted(signal.valid_signals()):
                print(number, signal.getsignal(number))
            print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.set_wakeup_fd(-1))
        """,
    ),
    code("kills_itself", "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGKILL)"),
    code("ends_by_a_term", "import os, signal; print('lost'); os.kill(os.getpid(), signal.SIGTERM)"),
    code("interrupts_itself", "import os, signal\ndef f(): os.kill(os.getpid(), signal.SIGINT)\nf()\nprint(1)"),
    code("catches_its_interrupt", "import signal\ntry: signal.raise_signal(2)\nexcept KeyboardInterrupt: print('caught')"),
    code("aborts", "import os; os.abort()"),
    code("a_broken_pipe", "import os; r, w = os.pipe(); os.close(r); os.write(w, b'x')"),
    code("leaves_at_once", "import os; print('lost'); os._exit(3)"),
    code("leaves_at_once_after_flushing", "import os; print('kept', flush=True); os._exit(3)"),
    code("streams", "import sys; print([(s, s.line_buffering, s.errors, s.newlines, s.buffer, s.mode) for s in "
         "(sys.stdin, sys.stdout, sys.stderr)], sys.__stdout__ is sys.stdout)"),
    code("encodings", "import sys, locale; print(sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), "
         "locale.getpreferredencoding(), locale.setlocale(locale.LC_ALL), locale.getlocale(), "
         "sys.getdefaultencoding())"),
    code("another_locale", "import sys; print(sys.flags, sys.stdout.encoding)", env={"LANG": "C"}, warm=False),
    code("no_locale", "import sys; print(sys.flags, sys.stdin.errors)", env={"LANG": ""}, warm=False),
    code("a_hash_seed", "print(hash('a'))", env={"PYTHONHASHSEED": "1"}, warm=False),
    code("a_path_of_its_own", PRINT_STATE, env={"PYTHONPATH": "/work/lib"}, warm=False),
    code("unbuffered_by_a_variable", PRINT_STATE + "print(sys.stdout.write_through)", env={"PYTHONUNBUFFERED": "1"}),
    code("no_bytecode_by_a_variable", PRINT_STATE, env={"PYTHONDONTWRITEBYTECODE": "x"}),
    code("no_home", "import site; print(site.USER_BASE)", env={"HOME": ""}, warm=False),
    code("a_time_zone", "import time; print(time.tzname, time.localtime(0)[:6])", env={"TZ": "Asia/Tokyo"}),
    code("a_site_of_its_own", "import mine; print(mine.x)", warm=False, files={
        f".local/lib/python3.{minor}/site-packages/mine.py": "x = 1" for minor in range(8, 15)}),
    code("its_site", "import site; print(site.ENABLE_USER_SITE, site.USER_BASE, site.USER_SITE, site.PREFIXES)"),
    code("handlers_at_its_end", """
        import atexit, sys
        atexit.register(print, 'second')
        atexit.register(lambda: print('first', sys._getframe().f_back))
        def bad(): raise ValueError('at the end')
        atexit.register(bad)
        print('done')
    """),
    code("handlers_after_a_failure", "import atexit; atexit.register(print, 'still'); raise ValueError('x')"),
    code("handlers_after_an_exit", "import atexit, sys; atexit.register(print, 'still'); sys.exit(3)"),
    code("an_exit_in_a_handler", "import atexit, sys; atexit.register(sys.exit, 5)"),
    code("what_dies_at_the_end", """
        class Dies:
            def __init__(self, name): self.name = name
            def __del__(self): print('gone', self.name)
        a = Dies('a'); _b = Dies('b')
        c = [Dies('c')]; c.append(c)
        print('done')
    """),
    code("a_thread_that_goes_on", """
        import threading, time
        def work():
            time.sleep(0.05)
            print('worked', threading.current_thread() is not threading.main_thread())
        threading.Thread(target=work).start()
        print('main')
    """),
    code("a_daemon", "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"),
    code("a_thread_that_fails", """
        import threading
        def work(): raise ValueError('in a thread')
        t = threading.Thread(target=work, name='worker'); t.start(); t.join()
    """),
    code("threads", """
        import threading, _thread
        print(threading.main_thread().ident == threading.get_ident(), threading.active_count())
        print(threading.current_thread(), threading.main_thread().is_alive())
    """.replace("print(threading.current_thread(), ", "print(threading.current_thread().name, ")),
    code("a_pool_of_threads", "from concurrent.futures import ThreadPoolExecutor as P\nwith P(4) as p: "
         "print(list(p.map(abs, range(-9, 0))))"),
    script("a_pool_of_forks", """
        import multiprocessing as mp
        def square(x): return x * x
        if __name__ == '__main__':
            with mp.get_context('fork').Pool(2) as pool:
                print(pool.map(square, range(5)))
    """),
    script("a_pool_of_spawns", """
        import multiprocessing as mp
        def square(x): return x * x
        if __name__ == '__main__':
            with mp.get_context('spawn').Pool(1) as pool:
                print(pool.map(square, range(5)))
    """),
    code("a_fork", """
        import os
        print('before', flush=True)
        pid = os.fork()
        if pid == 0:
            print('child', os.getppid() == 1)
            raise SystemExit(4)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """),
    code("a_python_of_its_own", "import subprocess, sys; print(subprocess.run([sys.executable, '-c', "
         "'import sys; print(sys.flags, sys.executable)'], capture_output=True))"),
    code("a_shell", "import subprocess; print(subprocess.run('echo $0 $USER; exit 3', shell=True, capture_output=True))"),
    code("a_replacement", "import os, sys; os.execv(sys.executable, ['python3', '-c', 'print(1)'])"),
    code("a_loop", "import asyncio\nasync def f():\n await asyncio.sleep(0.01)\n p = await asyncio."
         "create_subprocess_exec('true')\n print(await p.wait())\nasyncio.run(f())"),
    code("an_interrupted_loop", "import asyncio, signal\nasync def f():\n signal.raise_signal(2)\n await "
         "asyncio.sleep(5)\nasyncio.run(f())"),
    code("pickles", """
        import pickle, dataclasses, copy
        @dataclasses.dataclass
        class Point:
            x: int
            y: 'int' = 2
        p = Point(1)
        print(pickle.loads(pickle.dumps(p)), copy.deepcopy(p), Point.__module__, Point.__qualname__)
    """),
    code("annotations", "x: int = 1\nprint(__annotations__)\ndef f(a: 'B') -> 1: pass\nprint(f.__annotations__)"),
    code("futures", "from __future__ import annotations\ndef f(a: B): pass\nprint(f.__annotations__)"),
    code("temporary_files", "import tempfile, os\nwith tempfile.TemporaryDirectory() as d: print(os.path.dirname(d))\n"
         "with tempfile.NamedTemporaryFile() as f: f.write(b'x')"),
    code("a_warning", "import warnings; warnings.warn('old', DeprecationWarning); warnings.warn('new')"),
    code("an_escape_that_warns", "print('\\d')"),
    code("a_deprecated_call", "import unittest; unittest.makeSuite(unittest.TestCase)"),
    code("an_open_file", "open('/etc/passwd')"),
    code("a_hook_for_exceptions", "import sys\nsys.excepthook = lambda *a: print(a[0], sys.exc_info(), sys._getframe()"
         ".f_back)\n1/0"),
    code("a_bad_hook_for_exceptions", "import sys\ndef hook(*a): 1/0\nsys.excepthook = hook\nraise ValueError('x')"),
    code("frames", """
        import sys, traceback, inspect
        print(sys._getframe().f_back, len(inspect.stack()), sys._current_frames().keys() and 1)
        def f(): traceback.print_stack(); print(sys._getframe(1).f_back)
        f()
        print(sys._getframe().f_code.co_filename, sys._getframe().f_code.co_flags)
    """),
    code("garbage", "import gc; print(gc.isenabled(), gc.get_threshold(), gc.collect() >= 0, gc.garbage)"),
    code("numbers_at_random", "import random; print(len({random.random() for _ in range(3)}))"),
    code("printing_to_a_closed_stream", "import sys; sys.stdout.close(); print('x')"),
    code("closed_streams", "import sys; sys.stdout.close(); sys.stderr.close()"),
    code("a_full_device", "import sys; sys.stdout = open('/dev/full', 'w'); print('x')"),
    code("no_streams", "import sys; sys.stdout = sys.stderr = None; print('x')"),
    code("a_large_output", "print('x' * 100000)\nimport sys; print('y' * 100000, file=sys.stderr)"),
    code("doctests", "import doctest, sys\ndef f():\n '''\n >>> f()\n 1\n '''\n return 1\n"
         "print(doctest.testmod(sys.modules['__main__']))"),
    PythonProgram(
        name="unit_tests",
        argv=("python3", "-m", "unittest", "-q", "test_x"),
        files={"test_x.py": "import unittest\nclass T(unittest.TestCase):\n def test_a(self): self.assertTrue(1)\n"},
    ),
    code("a_great_deal_of_the_library", """
        import argparse, array, ast, base64, bisect, bz2, calendar, cmath, collections, configparser, contextlib
        import csv, ctypes, datetime, decimal, difflib, dis, email, enum, errno, fcntl, fractions, functools, glob
        import gzip, hashlib, heapq, hmac, html, http.client, importlib.metadata, inspect, io, ipaddress, itertools
        import json, linecache, logging, lzma, math, mimetypes, mmap, numbers, operator, os, pathlib, pickle, platform
        import pprint, queue, random, re, resource, sched, secrets, select, selectors, shelve, shlex, shutil, signal
        import socket, socketserver, sqlite3, ssl, statistics, string, struct, subprocess, sysconfig, tarfile
        import tempfile, textwrap, threading, time, timeit, tokenize, traceback, types, typing, unicodedata, unittest
        import urllib.request, uuid, venv, weakref, xml.etree.ElementTree, zipfile, zlib, zoneinfo
        print(ctypes.CDLL(None).getpid() == os.getpid(), struct.pack('<i', 1), array.array('i', [1]), math.pi)
        print(json.loads('[1]'), re.findall('a+', 'aaba'), hashlib.sha256(b'x').hexdigest(), platform.python_version())
        print(socket.socketpair()[0].family, select.select([], [], [], 0), sqlite3.connect(':memory:').execute(
            'select 1').fetchall(), datetime.date(2000, 1, 1), decimal.Decimal('1.1'), resource.getpagesize())
        call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda x: x + 1)
        print(call(1), sorted(__import__('sys').builtin_module_names)[:5], sysconfig.get_paths()['stdlib'])
    """),
    code("packages", "import importlib.util, sys; print(importlib.util.find_spec('pip'), "
         "importlib.util.find_spec('no_such'))"),
    code("breaks", "breakpoint()"),
    code("its_own_path_first", "import json; print(json.x)", files={"json.py": "x = 'mine'"}),
]  # fmt: skip
