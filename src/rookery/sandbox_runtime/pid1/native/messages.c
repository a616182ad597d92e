/* Messages with file descriptors, and other system calls that several files use. */
#include "native.h"

struct State state;
int sync_fd;

/* Receive a message with file descriptors into `state`. Return its size; 0 if the other end is closed or a part of the
 * message is lost; -1 on EAGAIN. */
ssize_t receive(int fd) {
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int) * MAX_FDS)];
    struct iovec part = {state.message, sizeof state.message - 1};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    ssize_t size = recvmsg(fd, &header, MSG_CMSG_CLOEXEC);
    if (size < 0)
        return errno == EAGAIN || errno == EINTR ? -1 : 0;
    state.message_size = (int32_t)size;
    state.fd_count = 0;
    for (struct cmsghdr *one = CMSG_FIRSTHDR(&header); one; one = CMSG_NXTHDR(&header, one))
        if (one->cmsg_level == SOL_SOCKET && one->cmsg_type == SCM_RIGHTS) {
            size_t count = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t at = 0; at < count && state.fd_count < MAX_FDS; at++)
                memcpy(&state.fds[state.fd_count++], CMSG_DATA(one) + at * sizeof(int), sizeof(int));
        }
    if (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
        close_received();
        return 0;
    }
    return size;
}

/* Send a message with at most three file descriptors. */
ssize_t send_with_fds(int socket, const void *data, size_t size, const int *fds, size_t count) {
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int) * 3)] = {0};
    struct iovec part = {(void *)data, size};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (count) {
        header.msg_control = control;
        header.msg_controllen = CMSG_SPACE(sizeof(int) * count);
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int) * count);
        memcpy(CMSG_DATA(rights), fds, sizeof(int) * count);
    }
    return sendmsg(socket, &header, MSG_NOSIGNAL);
}

void close_received(void) {
    for (int at = 0; at < state.fd_count; at++)
        close(state.fds[at]);
    state.fd_count = 0;
}

/* Lower a resource limit, but never raise it: that needs a privilege. Pid 0 is this process. */
void lower_limit(int pid, int which, rlim_t hard, rlim_t soft) {
    struct rlimit limit;
    if (prlimit(pid, which, NULL, &limit) < 0)
        return; /* the process has ended */
    limit.rlim_max = limit.rlim_max < hard ? limit.rlim_max : hard;
    limit.rlim_cur = soft < limit.rlim_max ? soft : limit.rlim_max;
    prlimit(pid, which, &limit, NULL);
}

int set_capabilities(uint32_t effective, uint32_t permitted) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{effective, permitted, 0}, {0, 0, 0}};
    return (int)syscall(SYS_capset, &header, data);
}
