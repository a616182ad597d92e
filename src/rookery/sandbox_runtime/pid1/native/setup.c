/* Set up a sandbox from inside: cgroups, descriptors, file system, limits, privileges. As `local_init.py`. */
#include "native.h"

/* Report the failure of a step of the setup to the keeper and exit. */
static _Noreturn void fail(const char *what) {
    char text[512];
    int error = errno;
    int size = snprintf(text, sizeof text, "! OSError: [Errno %d] %s: %s", error, what, strerror(error));
    send(sync_fd, text, size < (int)sizeof text ? size : (int)sizeof text - 1, MSG_NOSIGNAL);
    _exit(2);
}

static void check(long result, const char *what) {
    if (result < 0)
        fail(what);
}

/* As `local_init._reset_descriptors`. */
static void reset_descriptors(void) {
    signal(SIGCHLD, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    int null = open("/dev/null", O_RDWR);
    check(null, "open /dev/null");
    if (sync_fd != KEEPER_FD)
        check(dup3(sync_fd, KEEPER_FD, O_CLOEXEC), "dup3");
    sync_fd = KEEPER_FD;
    for (int target = 0; target < KEEPER_FD; target++)
        check(dup2(null, target), "dup2");
    check(syscall(SYS_close_range, KEEPER_FD + 1, ~0U, 0), "close_range");
}

static void make_directory(const char *name, mode_t mode, uint32_t owner) {
    check(mkdir(name, 0755), name);
    if (mode != 0755)
        check(chmod(name, mode), name);
    if (owner)
        check(chown(name, owner, owner), name);
}

/* As `root_filesystem.enter` for a sandbox without an image. All relative paths are below the keeper's directory.
 * `snapshots` are the lower layers of the overlay before the skeleton; see `MountMessage`. */
static void mount_root(const struct Shared *shared, uint32_t uid, uint64_t size, const char *snapshots) {
    char text[MAX_MOUNT_OPTIONS];
    int parts[32], count = 0;
    uint64_t inodes = size / 2048 > 1024 ? size / 2048 : 1024;
    snprintf(text, sizeof text, "size=%" PRIu64 ",nr_inodes=%" PRIu64 ",mode=755", size, inodes);
    check(mount("tmpfs", shared->mount_point, "tmpfs", NOSUID_NODEV, text), "mount tmpfs");
    int above = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    check(above, "open");
    check(chdir(shared->mount_point), "chdir");
    make_directory("shm", 01777, 0);
    make_directory("upper", 0755, 0);
    if (!*snapshots) {
        make_directory("upper/work", 0755, uid);
        make_directory("upper/tmp", 01777, 0);
        make_directory("upper/var", 0755, 0);
        make_directory("upper/var/tmp", 01777, 0);
        make_directory("upper/run", 0755, uid);
    }
    make_directory("under", 0755, 0);
    make_directory("root", 0755, 0);
    const char *options = "lowerdir=%s../%s,upperdir=upper,workdir=under,userxattr";
    if ((size_t)snprintf(text, sizeof text, options, snapshots, shared->skeleton) >= sizeof text) {
        errno = E2BIG;
        fail("too many layers");
    }
    check(mount("overlay", "root", "overlay", NOSUID_NODEV, text), "mount overlay");
    state.layer = open("upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    check(state.layer, "open upper");
    check(fchdir(above), "fchdir");
    close(above);
    for (int kind = 0; kind < 2; kind++)
        for (const char *const *pair = kind ? shared->masks : shared->trees; *pair; pair += 2) {
            if (count == 32) {
                errno = E2BIG;
                fail("too many mounts");
            }
            parts[count] = (int)syscall(SYS_open_tree, AT_FDCWD, pair[0], 1 /* CLONE */ | O_CLOEXEC | AT_RECURSIVE);
            check(parts[count++], pair[0]);
        }
    snprintf(text, sizeof text, "%s/root", shared->mount_point);
    check(chdir(text), "chdir");
    check(syscall(SYS_pivot_root, ".", "."), "pivot_root");
    int at = 0;
    for (const char *const *pair = shared->trees; *pair; pair += 2, at++)
        if (syscall(SYS_move_mount, parts[at], "", AT_FDCWD, pair[1], 4 /* EMPTY_PATH */) < 0 && !*snapshots)
            fail(pair[1]); /* with a snapshot, a program may have removed the mount point before */
    check(mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, shared->devpts_options), "mount devpts");
    /* Read-only: a program that could write `oom_score_adj` could make the kernel kill pid 1 in its place. */
    check(mount("proc", "/proc", "proc", NOSUID_NODEV | MS_NOEXEC | MS_RDONLY, NULL), "mount proc");
    for (const char *const *pair = shared->masks; *pair; pair += 2, at++)
        if (syscall(SYS_move_mount, parts[at], "", AT_FDCWD, pair[1], 4) < 0 && errno != ENOENT)
            fail(pair[1]); /* the file depends on the kernel's configuration */
    for (at = 0; at < count; at++)
        close(parts[at]);
    check(umount2(".", MNT_DETACH), "umount");
    check(chdir("/"), "chdir /");
}

/* As `local_init._configure`: apply the limits and give up all privileges that pid 1 does not need. */
static void configure(const struct Shared *shared, uint32_t uid, uint64_t disk) {
    char text[128];
    if (disk != state.disk) {
        uint64_t inodes = disk / 2048 > 1024 ? disk / 2048 : 1024;
        snprintf(text, sizeof text, "size=%" PRIu64 ",nr_inodes=%" PRIu64, disk, inodes);
        check(mount("none", "/dev/shm", NULL, MS_REMOUNT | NOSUID_NODEV, text), "remount tmpfs");
    }
    if (uid != state.plan_uid) {
        check(chown("/work", uid, uid), "chown");
        check(chown("/run", uid, uid), "chown");
    }
    state.user = (int32_t)uid;
    struct rlimit tags;
    check(getrlimit(TAG_LIMIT, &tags), "getrlimit");
    state.tag_base = tags.rlim_max == RLIM_INFINITY ? 1ULL << 40 : tags.rlim_max > 1ULL << 33 ? tags.rlim_max : 0;
    lower_limit(0, RLIMIT_CORE, 0, 0);
    lower_limit(0, RLIMIT_MEMLOCK, 1 << 20, 1 << 20);
    lower_limit(0, RLIMIT_MSGQUEUE, 1 << 20, 1 << 20);
    lower_limit(0, RLIMIT_NOFILE, 65536, 4096);
    check(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl");
    check(prctl(PR_SET_SECUREBITS, 0xCF, 0, 0, 0), "prctl"); /* a change of user neither adds nor removes any */
    for (int number = 0; number < 64 && prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0; number++)
        ;
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    /* A user that no program can have: none of them can signal pid 1 or change its limits and priority. */
    check(setresgid(PID1_UID, PID1_UID, PID1_UID), "setresgid");
    check(setresuid(PID1_UID, PID1_UID, PID1_UID), "setresuid");
    uint32_t kept = 1U << CAP_SETUID | 1U << CAP_SETGID | 1U << CAP_KILL;
    kept |= 1U << CAP_SYS_PTRACE | 1U << CAP_SYS_RESOURCE;
    check(set_capabilities(kept, kept | 1U << CAP_DAC_READ_SEARCH), "capset");
    check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl");
    long listener = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, shared->filter);
    state.listener = (int)listener;
    if (state.listener < 0)
        check(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, shared->filter), "seccomp");
    check(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl");        /* the change of user had set it */
    check(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "prctl"); /* the change of user had cleared it */
}

/* As `local_init._bind_loopback`: bind a port for the owner, so that no program in the sandbox can take it. */
static int bind_loopback(uint16_t port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check(fd, "socket");
    check(bind(fd, (struct sockaddr *)&address, sizeof address), "bind");
    return fd;
}

/* Tell the keeper that the sandbox is ready, and give it descriptors of the writable layer, the root and, unless it is
 * -1, the socket for the owner. */
static void send_ready(int owner_socket) {
    int fds[3] = {state.layer, open("/", O_PATH | O_DIRECTORY | O_CLOEXEC), owner_socket};
    const char *text = owner_socket < 0 ? "ready layer root" : "ready layer root listener";
    int count = owner_socket < 0 ? 2 : 3;
    check(fds[1], "open /");
    check(send_with_fds(sync_fd, text, strlen(text), fds, (size_t)count), "sendmsg");
    for (int at = 0; at < count; at++)
        close(fds[at]);
    close(sync_fd);
    state.layer = -1;
}

/* Set up the sandbox. Return the stage at which Python has to take over, or 0. */
int set_up(const struct Shared *shared, const int *task_fds, int task_count) {
    struct MountMessage plan;
    struct LimitsMessage limits;
    check(prctl(PR_SET_NAME, "sandbox", 0, 0, 0), "prctl");
    check(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "prctl");
    int parent = getppid();
    if (parent != 0 && parent != shared->keeper_pid)
        _exit(1);
    for (int at = 0; at < task_count; at++)
        check(write(task_fds[at], "0", 1), "join cgroup");
    reset_descriptors();
    check(prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl");
    state.oom_score_fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
    check(state.oom_score_fd, "open oom_score_adj");
    if (receive(sync_fd) <= 0)
        _exit(0);
    if (state.message[0] != MOUNT_MESSAGE || state.message_size < (int)sizeof plan || state.fd_count)
        return AT_MOUNT;
    memcpy(&plan, state.message, sizeof plan);
    state.message[state.message_size] = 0; /* `message` is larger than a message */
    check(setresgid(0, 0, 0), "setresgid");
    check(setresuid(0, 0, 0), "setresuid");
    if (setgroups(0, NULL) < 0 && errno != EPERM)
        fail("setgroups");
    check(unshare(CLONE_NEWCGROUP), "unshare"); /* the cgroups that we have joined become the root inside */
    umask(022);
    mount_root(shared, plan.uid, plan.size, state.message + sizeof plan);
    check(sethostname("sandbox", 7), "sethostname");
    state.disk = plan.size;
    state.plan_uid = plan.uid;
    check(send(sync_fd, "mounted", 7, MSG_NOSIGNAL), "send");
    if (receive(sync_fd) <= 0)
        _exit(0);
    if (state.message[0] != LIMITS_MESSAGE || state.message_size != sizeof limits || state.fd_count != 1)
        return AT_CONFIGURE;
    memcpy(&limits, state.message, sizeof limits);
    state.channel = state.fds[0];
    state.fd_count = 0;
    check(fcntl(state.channel, F_SETFL, O_RDWR | O_NONBLOCK), "fcntl");
    int owner_socket = limits.port ? bind_loopback(limits.port) : -1;
    configure(shared, limits.uid, limits.disk);
    ssize_t size = pread(state.oom_score_fd, state.oom_score, sizeof state.oom_score - 1, 0);
    check(size, "read oom_score_adj");
    state.oom_score[size] = 0;
    send_ready(owner_socket);
    return 0;
}
