/* Start and reap the commands of a sandbox. As `init.py` and `guard.py`. */
#include "native.h"

#define KILL_SECONDS 5.0
#define STREAM_BLOCK 4096 /* size of the buffers of the streams that `warm_interpreter.open_piped_streams` opens */

static int signals;           /* descriptor that reports ended children */
static int32_t *start_errors; /* shared with forked interpreters, which store the errno of a failed start, by tag */

static double read_clock(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int is_directory(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

/* Find the first executable of a command, as a shell of the real user does, and store its path in `state.program`.
 * Return 0 if there is none or its path is too long. */
static int find_program(const char *name, const char *path, const char *directory) {
    size_t size_limit = sizeof state.program;
    if (strchr(name, '/') || !*name)
        return *name && (size_t)snprintf(state.program, size_limit, "%s", name) < size_limit;
    for (const char *end; *path; path = *end ? end + 1 : end) {
        end = strchrnul(path, ':');
        int length = (int)(end - path), size;
        if (*path == '/')
            size = snprintf(state.program, size_limit, "%.*s/%s", length, path, name);
        else
            size = snprintf(state.program, size_limit, "%s/%.*s/%s", directory, length, path, name);
        if ((size_t)size < size_limit && access(state.program, X_OK) == 0 && !is_directory(state.program))
            return 1;
    }
    return 0;
}

static int is_python(const char *program) {
    const char *name = strrchr(program, '/');
    return *program == '/' && strncmp(name + 1, "python", 6) == 0 && !name[7 + strspn(name + 7, "0123456789.")];
}

/* Return whether a program is the interpreter that the keeper runs on, outside of any virtual environment. */
static int is_own_interpreter(const struct Shared *shared, const char *program) {
    struct stat info;
    char path[sizeof state.program + 16];
    if (stat(program, &info) < 0)
        return 0;
    if (info.st_dev != shared->interpreter_device || info.st_ino != shared->interpreter_inode)
        return 0;
    size_t length = strlen(program);
    for (int level = 0; level < 2; level++) {
        while (length && program[length - 1] != '/')
            length--;
        snprintf(path, sizeof path, "%.*spyvenv.cfg", (int)length, program);
        if (access(path, F_OK) == 0)
            return 0;
        length -= length > 0;
    }
    return 1;
}

/* Map a file for `start_errors`. Python maps it too, if it takes over before a forked interpreter has started. */
static void map_start_errors(void) {
    size_t size = START_ERRORS * sizeof *start_errors;
    int fd = memfd_create("start_errors", MFD_CLOEXEC);
    if (fd < 0)
        return;
    void *page = MAP_FAILED;
    if (ftruncate(fd, (off_t)size) == 0)
        page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) {
        close(fd);
        return;
    }
    start_errors = page;
    state.start_errors_fd = fd;
}

/* No command may have the mapping: it could write to it. */
static void unmap_start_errors(void) {
    if (start_errors)
        munmap(start_errors, START_ERRORS * sizeof *start_errors);
    start_errors = NULL;
}

/* Page cache and socket buffers make the kernel kill the largest process. Commands are started with another score,
 * because otherwise that would be pid 1. */
static void set_oom_score(const char *score) {
    if (pwrite(state.oom_score_fd, score, strlen(score), 0) < 0)
        return; /* the command starts with the old score */
}

/* Return whether the standard streams are a seekable file at its start and two pipes, as those of most commands. */
static int has_piped_streams(void) {
    struct stat info;
    for (int fd = 0; fd < 3; fd++) {
        if (state.fd_count != 3 || fstat(fd, &info) < 0 || info.st_blksize != STREAM_BLOCK)
            return 0;
        if (fd ? !S_ISFIFO(info.st_mode) : !S_ISREG(info.st_mode) && !S_ISCHR(info.st_mode))
            return 0;
    }
    return !isatty(0) && lseek(0, 0, SEEK_CUR) == 0;
}

/* Turn a fork of pid 1 into the process of a command. Python continues in it, with the program. */
static void become_command(int user, int group, char **strings) {
    static const sigset_t none;
    if (setsid() < 0)
        _exit(1);
    int count = state.fd_count < 4 ? state.fd_count : 4;
    for (int target = 0; target < count; target++) /* the owner's descriptors are above 3: none is overwritten */
        if (dup2(state.fds[target], target) < 0)
            _exit(1);
    if (syscall(SYS_close_range, count, ~0U, 0) < 0)
        _exit(1);
    if (setresgid(group, group, group) < 0 || setresuid(user, user, user) < 0 || set_capabilities(0, 0) < 0 ||
        chdir(state.message + sizeof(struct Request)) < 0) {
        start_errors[state.last_tag % START_ERRORS] = errno;
        _exit(1);
    }
    unmap_start_errors(); /* before other programs of the user can write to this process's memory */
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
    sigprocmask(SIG_SETMASK, &none, NULL);
    state.piped = has_piped_streams();
    show_command_line(strings + 1, state.argc, state.message + state.message_size + 1);
    state.stage = IN_COMMAND;
}

/* Start a program with posix_spawn, as `spawn.py`. Return its pid, or 0 if Python has to find out why it failed. */
static int spawn(char **strings, int argc) {
    static posix_spawnattr_t attributes;
    static int prepared;
    posix_spawn_file_actions_t actions;
    sigset_t set;
    pid_t pid = 0;
    if (!prepared) {
        if (posix_spawnattr_init(&attributes))
            return 0;
        sigemptyset(&set);
        posix_spawnattr_setsigmask(&attributes, &set);
        for (int number = 1; number < 32; number++)
            if (number != SIGKILL && number != SIGSTOP)
                sigaddset(&set, number);
        posix_spawnattr_setsigdefault(&attributes, &set);
        posix_spawnattr_setflags(&attributes, POSIX_SPAWN_RESETIDS | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK |
                                                  POSIX_SPAWN_SETSID);
        prepared = 1;
    }
    if (posix_spawn_file_actions_init(&actions))
        return 0;
    int error = posix_spawn_file_actions_addchdir_np(&actions, strings[0]);
    for (int target = 0; target < state.fd_count && target < 4 && !error; target++)
        error = posix_spawn_file_actions_adddup2(&actions, state.fds[target], target);
    /* The environment moves by one place, so that a NULL can end the arguments. */
    memmove(strings + argc + 2, strings + argc + 1, sizeof *strings * (size_t)(state.string_count - argc));
    strings[argc + 1] = NULL;
    if (!error)
        error = posix_spawn(&pid, state.program, &actions, &attributes, strings + 1, strings + argc + 2);
    posix_spawn_file_actions_destroy(&actions);
    return error ? 0 : pid;
}

/* Start the command of the request in `state.message`. Return 0 if Python has to do it.
 * In a forked interpreter, `state.stage` is IN_COMMAND afterwards. */
static int start_command(const struct Shared *shared) {
    struct Request request;
    char *strings[MAX_STRINGS + 3];
    char *text = state.message + sizeof request, *end = state.message + state.message_size;
    memcpy(&request, state.message, sizeof request);
    int user = request.user >= 0 ? request.user : state.user;
    int group = request.group >= 0 ? request.group : user;
    if (request.flags & ~FLAG_WARM || user == PID1_UID || group == PID1_UID || state.command_count == MAX_COMMANDS)
        return 0;
    double now = read_clock(CLOCK_MONOTONIC);
    int64_t ticks = (int64_t)(read_clock(CLOCK_BOOTTIME) * (double)sysconf(_SC_CLK_TCK));
    *end = 0; /* `message` is larger than a message */
    int count = 0;
    const char *path = "";
    for (char *at = text; at <= end; at += strlen(at) + 1) {
        if (count == MAX_STRINGS)
            return 0;
        strings[count++] = at;
        if ((uint32_t)count > request.argc + 1 && strncmp(at, "PATH=", 5) == 0)
            path = at + 5;
    }
    if (request.argc < 1 || request.argc >= (uint32_t)count)
        return 0;
    strings[count] = NULL;
    state.argc = (int32_t)request.argc;
    state.string_count = count;
    if (setresgid(group, -1, -1) < 0 || setresuid(user, -1, -1) < 0)
        return 0; /* Python reports the same error */
    int pid = 0, error = 0;
    struct rlimit tag = {state.tag_base - (uint64_t)state.last_tag - 1, state.tag_base - (uint64_t)state.last_tag - 1};
    if (find_program(strings[1], path, strings[0])) {
        int python = request.flags & FLAG_WARM && is_python(state.program);
        int fork = python && shared->warm && is_own_interpreter(shared, state.program);
        if (fork && !start_errors)
            map_start_errors();
        if (fork ? start_errors != NULL : !python) {
            state.last_tag++;
            if (start_errors)
                start_errors[state.last_tag % START_ERRORS] = 0;
            if (state.tag_base)
                setrlimit(TAG_LIMIT, &tag);
            set_oom_score("1000");
            if (fork) {
                pid = (int)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
                if (pid == 0) {
                    become_command(user, group, strings);
                    return 1;
                }
            } else
                pid = spawn(strings, state.argc);
            set_oom_score(state.oom_score);
        }
    }
    error = setresuid(PID1_UID, -1, -1) | setresgid(PID1_UID, -1, -1);
    error |= prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* the child that shared our memory changed its user */
    if (error)
        _exit(1);
    if (pid <= 0)
        return 0;
    state.commands[state.command_count++] = (struct Command){
        .number = request.number,
        .pid = pid,
        .tag = state.last_tag,
        .started_alone = state.childless,
        .started = now,
        .deadline = request.wall > 0 ? now + request.wall : 0,
        .start_ticks = ticks,
    };
    state.childless = 0;
    if (request.number > state.last_number)
        state.last_number = request.number;
    if (request.memory > 0)
        lower_limit(pid, RLIMIT_DATA, (rlim_t)request.memory, (rlim_t)request.memory);
    if (request.cpu > 0) {
        rlim_t seconds = request.cpu > 1 ? (rlim_t)request.cpu + ((double)(rlim_t)request.cpu < request.cpu) : 1;
        lower_limit(pid, RLIMIT_CPU, seconds + 1, seconds);
    }
    memset(state.message, 0, (size_t)state.message_size); /* arguments of one command must not be visible to another */
    close_received();
    return 1;
}

/* Report the end of a command to the owner. Return 0 if Python has to queue the report. */
static int report_end(struct Command command, int reason, int status, const struct rusage *usage, uint32_t left) {
    state.report = (struct Report){
        .kind = ENDED,
        .number = command.number,
        .reason = (uint8_t)reason,
        .status = status,
        .cpu = (double)(usage->ru_utime.tv_sec + usage->ru_stime.tv_sec) +
               (double)(usage->ru_utime.tv_usec + usage->ru_stime.tv_usec) * 1e-6,
        .peak = (int64_t)usage->ru_maxrss << 10,
        .wall = read_clock(CLOCK_MONOTONIC) - command.started,
        .left = left,
    };
    if (send(state.channel, &state.report, sizeof state.report, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno == EAGAIN)
        state.report_size = sizeof state.report;
    return !state.report_size;
}

/* Reap ended processes and report commands. Return 0 if Python has to queue a report. */
static int reap(void) {
    struct signalfd_siginfo ignored[8];
    while (read(signals, ignored, sizeof ignored) > 0)
        ;
    for (;;) {
        int status;
        struct rusage usage;
        pid_t pid = wait4(-1, &status, WNOHANG, &usage);
        if (pid <= 0) {
            state.childless = pid < 0 && errno == ECHILD;
            return 1;
        }
        for (int at = 0; at < state.command_count; at++) {
            struct Command command = state.commands[at];
            if (command.pid != pid)
                continue;
            state.commands[at] = state.commands[--state.command_count];
            int error = start_errors ? start_errors[command.tag % START_ERRORS] : 0;
            int reason = error ? NO_DIRECTORY : EXITED;
            if (!report_end(command, reason, error ? error : status, error ? &(struct rusage){0} : &usage, 0))
                return 0;
            break;
        }
    }
}

/* Kill a command that has the sandbox to itself, with all its processes, and report it. As `Init.kill_namespace`.
 * Return 0 if Python has to do it. */
static int kill_command(int at, int reason) {
    struct Command command = state.commands[at];
    if (!command.started_alone || command.tag != state.last_tag || state.command_count != 1 || getpid() != 1)
        return 0;
    struct pollfd ended = {signals, POLLIN, 0};
    struct rusage usage = {0}, own = {0};
    int result = SIGKILL, status;
    double end = read_clock(CLOCK_MONOTONIC) + KILL_SECONDS;
    kill(-1, SIGKILL);
    poll(&ended, 1, 50);
    pid_t pid;
    while ((pid = wait4(-1, &status, WNOHANG, &usage)) >= 0) {
        if (pid == command.pid) {
            result = status;
            own = usage;
            state.command_count = 0;
        } else if (pid == 0) {
            if (read_clock(CLOCK_MONOTONIC) > end) {
                if (state.command_count)
                    return 0; /* blocked in the kernel */
                break;
            }
            /* Not at every SIGCHLD: waking up for each of a hundred processes would delay their end. */
            nanosleep(&(struct timespec){0, 1000000}, NULL);
            kill(-1, SIGKILL);
        }
    }
    state.childless = pid < 0;
    return report_end(command, reason, result, &own, pid < 0 ? 0 : 1);
}

/* Kill all processes of the sandbox and report their commands, then the request. As `Init.kill_everything`.
 * Return 0 if Python has to do it. */
static int kill_everything(uint32_t number) {
    struct pollfd ended = {signals, POLLIN, 0};
    double end = read_clock(CLOCK_MONOTONIC) + 2 * KILL_SECONDS;
    if (getpid() != 1)
        return 0;
    for (int round = 0; !state.childless; round++) {
        kill(-1, SIGKILL);
        if (round == 0)
            poll(&ended, 1, 50);
        else
            nanosleep(&(struct timespec){0, 1000000}, NULL); /* see kill_command */
        if (!reap() || read_clock(CLOCK_MONOTONIC) > end)
            return 0;
    }
    struct Report report = {.kind = ALL_KILLED, .number = number};
    return send(state.channel, &report, sizeof report, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0 || errno != EAGAIN;
}

/* Return the command with a number, or -1. */
static int find_command(uint32_t number) {
    for (int at = 0; at < state.command_count; at++)
        if (state.commands[at].number == number)
            return at;
    return -1;
}

/* Handle the request in `state.message`. Return 0 if Python has to do it. */
static int handle_request(const struct Shared *shared) {
    struct Request request;
    if (state.message_size < (int)sizeof request)
        return 0;
    memcpy(&request, state.message, sizeof request);
    if (request.op == SPAWN)
        return start_command(shared);
    if (request.op == KILL_ALL && request.user < 0 && !state.fd_count)
        return kill_everything(request.number);
    if (request.op != KILL || state.fd_count)
        return 0;
    int at = find_command(request.number); /* it may have ended meanwhile */
    return at < 0 || kill_command(at, KILLED);
}

/* Run commands until Python has to take over, in pid 1 or in a fork that becomes a command. */
static void run_commands(const struct Shared *shared) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_SETMASK, &set, NULL); /* programs start with no blocked signal */
    signals = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    if (signals < 0)
        return;
    state.message_size = 0;
    struct pollfd polled[3] = {{state.channel, POLLIN, 0}, {signals, POLLIN, 0}, {state.listener, POLLIN, 0}};
    for (;;) {
        double deadline = 0;
        int next = -1; /* the command with the earliest deadline */
        for (int at = 0; at < state.command_count; at++)
            if (state.commands[at].deadline && (next < 0 || state.commands[at].deadline < deadline))
                deadline = state.commands[next = at].deadline;
        double left = deadline ? (deadline - read_clock(CLOCK_MONOTONIC)) * 1000 + 1 : -1;
        if (deadline && left <= 1) {
            if (!kill_command(next, TIME_LIMIT))
                return;
            continue;
        }
        if (poll(polled, state.listener < 0 ? 2 : 3, left > 1e9 ? 1000000000 : (int)left) < 0 && errno != EINTR)
            return;
        if (polled[1].revents && !reap())
            return;
        if (state.listener >= 0 && polled[2].revents)
            return;
        if (polled[0].revents) {
            ssize_t size = receive(state.channel);
            if (size == 0)
                _exit(0); /* the owner has closed the connection */
            if (size < 0)
                continue;
            if (!handle_request(shared))
                return;
            if (state.stage == IN_COMMAND)
                return;
            state.message_size = 0;
        }
    }
}

void serve(const struct Shared *shared) {
    run_commands(shared);
    unmap_start_errors();
}
