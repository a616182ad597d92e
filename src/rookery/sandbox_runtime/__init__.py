"""Programs that Rookery runs in other processes: inside sandboxes, as pid 1 of sandboxes, and in their guards.

The package uses the standard library only and imports nothing else of Rookery, so that each of its programs starts
in milliseconds and needs no installed package. How a program gets to its process depends on where that process is:

| program | runs in | how it gets there |
|---|---|---|
| `guard` | the parent process of a `subprocess` sandbox, on the host | `launcher`, from this directory |
| `pid1.local_init` | pid 1 of a `local` sandbox | a fork of the keeper (`sandboxes.local.keeper`) |
| `pid1.docker_init` | pid 1 of a container | this directory is mounted into the container |
| `python.fork_server` | a warm Python interpreter in a sandbox | `bundle`: one source text in a memory file |
| `worker.monitor` | a persistent Python worker in a sandbox | `bundle`: over standard input |
| `grader.runner`, `grader.submission` | sandboxes for unit tests and submissions | `bundle`: as an argument |

`python`, `worker` and `grader` also run in the Python of a container image: they support Python 3.8 and newer.
"""
