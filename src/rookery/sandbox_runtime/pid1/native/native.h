/* The common path of pid 1 of a `local` sandbox in C: setup without an image, and starting and reaping commands.
 *
 * The keeper loads this library with ctypes (`native_init.py`). Its zygote (`zygote.c`) forks the sandboxes. Pid 1 of a
 * sandbox stays in the library as long as only common things happen: if Python code ran in it, the kernel would copy
 * hundreds of memory pages that CPython writes reference counts to, which is more than half of the cost of a sandbox
 * (section "sandbox" of docs/reference/benchmarks.md).
 *
 * Everything else is left to Python (`local_init.py`, `init.py`): `run_zygote` then returns in pid 1, and `state` says
 * how far it came. There is no way back. A message that the library cannot handle is passed on, and a command that does
 * not start is started once more by Python, so errors of commands are reported in one place.
 *
 * The guarantees of `local_init.py` and `init.py` apply, and the order of the system calls is the same as there. Sizes
 * of messages are checked, although only the keeper and the owner of the sandbox can send them.
 */
#ifndef ROOKERY_NATIVE_H
#define ROOKERY_NATIVE_H
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_MESSAGE (64 << 10)
#define MAX_FDS 20
#define MAX_COMMANDS 16
#define MAX_STRINGS 4096
#define MAX_MOUNT_OPTIONS 4000 /* as in root_filesystem.py */
#define START_ERRORS 1024 /* as in init.py */
#define KEEPER_FD 3
#define PID1_UID 65535
#define ZYGOTE_NAME "zygote" /* as in native_init.py */
#define TAG_LIMIT 10 /* RLIMIT_LOCKS; see guard.py */
#define NOSUID_NODEV (MS_NOSUID | MS_NODEV)

/* Reasons why `start_sandbox` returns in a new process (`State.stage`). */
enum { AT_MOUNT = 1, AT_CONFIGURE, AT_SERVE, IN_COMMAND };

/* Constants of guard_protocol.py. */
enum { SPAWN = 1, KILL = 2, KILL_ALL = 5 };
enum { ENDED = 1, ALL_KILLED = 3 };
enum { EXITED = 0, TIME_LIMIT = 1, KILLED = 3, NO_DIRECTORY = 5 };
enum { FLAG_WARM = 2 };

struct __attribute__((packed)) Request {
    uint8_t op;
    uint32_t number;
    double wall, cpu;
    int64_t memory;
    uint32_t argc;
    int32_t user, group;
    uint8_t flags;
};

struct __attribute__((packed)) Report {
    uint8_t kind;
    uint32_t number;
    uint8_t reason;
    int32_t status;
    double cpu;
    int64_t peak;
    double wall;
    uint32_t left;
};

/* A request to the zygote. Its descriptors: the sandbox's connection to the keeper, network namespace, cgroup v2 (with
 * `in_cgroup`), and `tasks` files of v1 cgroups. */
struct ForkRequest { uint64_t flags; uint32_t uid, in_cgroup; };

/* Messages of the keeper to a sandbox without an image, mounts or the host's network. Others get JSON. The lower layers
 * of its overlay, with a colon after each, follow the first message. `port` is the loopback port of its owner, or 0. */
struct MountMessage { char kind; uint8_t unused; uint16_t port; uint32_t uid; uint64_t size; };
struct LimitsMessage { char kind; uint8_t unused; uint16_t port; uint32_t uid; uint64_t disk; };
enum { MOUNT_MESSAGE = 'M', LIMITS_MESSAGE = 'L' };

struct Command {
    uint32_t number;
    int32_t pid, tag, started_alone;
    double started, deadline;
    int64_t start_ticks;
};

/* What all sandboxes of a keeper have in common. Strings and arrays belong to the keeper and are never changed. */
struct Shared {
    int32_t keeper_pid, warm;            /* warm: the keeper is a warm interpreter */
    int32_t shares_memory;               /* the allocators of this interpreter allow `share_memory` */
    uint64_t interpreter_device, interpreter_inode;
    const char *const *trees;            /* pairs: source below the keeper's directory, target in the sandbox */
    const char *const *masks;            /* the same for files of /proc */
    const char *skeleton, *mount_point, *devpts_options;
    const struct sock_fprog *filter;
};

/* What Python needs to continue in pid 1 or in a command. Field order: see `native_init.py`. */
struct State {
    int32_t stage, channel, layer, oom_score_fd, listener, start_errors_fd, user, last_tag, childless, piped;
    uint64_t disk, tag_base;
    uint32_t plan_uid, last_number;
    int32_t message_size, fd_count, report_size, command_count;
    int32_t fds[MAX_FDS];
    struct Command commands[MAX_COMMANDS];
    struct Report report;                /* a report that the owner's full socket did not accept */
    int32_t argc, string_count;          /* of the command, IN_COMMAND: working directory, arguments, environment */
    char program[4096], oom_score[16];
    char message[MAX_MESSAGE + 4096];    /* a request with a text of MAX_MESSAGE, and a NUL */
};

extern struct State state;
extern int sync_fd; /* pid 1's connection to the keeper during the setup */

ssize_t receive(int fd);
ssize_t send_with_fds(int socket, const void *data, size_t size, const int *fds, size_t count);
void close_received(void);
void read_memory_layout(void);
void share_memory(void);
void show_command_line(char **strings, int argc, const char *end);
void lower_limit(int pid, int which, rlim_t hard, rlim_t soft);
int set_capabilities(uint32_t effective, uint32_t permitted);
int set_up(const struct Shared *shared, const int *task_fds, int task_count);
void serve(const struct Shared *shared);

#endif
