/* The zygote: a fork of the keeper that forks sandboxes. */
#include "native.h"

/* Fork pid 1 of a sandbox as a child of the keeper. Return its pid or, negative, an errno; 0 in the new process. */
static long fork_sandbox(const struct Shared *shared, const struct ForkRequest *request, int *pidfd) {
    struct clone_args args = {
        .flags = request->flags | CLONE_PARENT | CLONE_PIDFD | (request->in_cgroup ? CLONE_INTO_CGROUP : 0),
        .pidfd = (uint64_t)(uintptr_t)pidfd,
        .cgroup = request->in_cgroup ? (uint64_t)state.fds[2] : 0,
    };
    if (syscall(SYS_setns, state.fds[1], CLONE_NEWNET) < 0)
        return -errno;
    /* Resources that the kernel counts per user are also charged to the user who creates a user namespace. */
    if (syscall(SYS_setresuid, -1, request->uid, -1) < 0)
        return -errno;
    long pid = syscall(SYS_clone3, &args, sizeof args);
    if (pid == 0)
        return 0;
    if (pid < 0) {
        pid = -errno;
        *pidfd = -1; /* the kernel may have stored a descriptor that it closed again */
    }
    if (syscall(SYS_setresuid, -1, 0, -1) < 0 || prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0 ||
        getppid() != shared->keeper_pid)
        _exit(1); /* the change of user had cleared the signal */
    return pid;
}

/* Tell the keeper on descriptor 3 that the zygote is ready, then fork sandboxes as the keeper asks for them. Runs in the
 * zygote, a fork of the keeper that does nothing else, so that no process has to copy the pages that all sandboxes
 * share. Returns only in sandboxes, with `state` set. */
void run_zygote(const struct Shared *shared) {
    struct ForkRequest request;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0 || getppid() != shared->keeper_pid)
        _exit(1);
    prctl(PR_SET_NAME, ZYGOTE_NAME, 0, 0, 0);
    read_memory_layout();
#ifdef __GLIBC__
    if (shared->shares_memory)
        share_memory();
#endif
    int32_t ready = 0;
    if (send_with_fds(KEEPER_FD, &ready, sizeof ready, NULL, 0) < 0)
        _exit(1);
    for (;;) {
        ssize_t size = receive(KEEPER_FD);
        if (size < 0)
            continue;
        if (size != sizeof request || state.fd_count < 2)
            _exit(0);
        memcpy(&request, state.message, sizeof request);
        int pidfd = -1, first_task = request.in_cgroup ? 3 : 2;
        long pid = fork_sandbox(shared, &request, &pidfd);
        if (pid == 0) {
            sync_fd = state.fds[0];
            state.channel = state.layer = state.oom_score_fd = state.listener = state.start_errors_fd = state.user = -1;
            state.childless = 1;
            state.stage = set_up(shared, state.fds + first_task, state.fd_count - first_task);
            if (!state.stage) {
                state.stage = AT_SERVE;
                serve(shared);
            }
            return;
        }
        close_received();
        int32_t answer = (int32_t)pid;
        if (send_with_fds(KEEPER_FD, &answer, sizeof answer, &pidfd, pidfd >= 0) < 0)
            _exit(0);
        if (pidfd >= 0)
            close(pidfd);
    }
}
