/* Show the command line of a Python command, which is a fork of the zygote, in /proc. Equivalent of `set_command_line` in
 * `cpython_internals.py`. */
#include "native.h"

static struct prctl_mm_map layout; /* where code, data, heap and stack are, in the zygote and its forks */

/* Read the memory layout of this process. Without it, commands keep the name and the command line of the zygote. */
void read_memory_layout(void) {
    char text[1024];
    unsigned long long fields[52] = {0};
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0)
        return;
    text[size] = 0;
    char *at = strrchr(text, ')');
    if (!at || !at[1] || !at[2])
        return;
    at += 3; /* the state, field 3, is a letter */
    for (int number = 4; number < 52 && *at; number++)
        fields[number] = strtoull(at, &at, 10);
    layout = (struct prctl_mm_map){
        .start_code = fields[26],
        .end_code = fields[27],
        .start_data = fields[45],
        .end_data = fields[46],
        .start_brk = fields[47],
        .start_stack = fields[28],
        .exe_fd = UINT32_MAX,
    };
}

/* Make the name, /proc/self/cmdline and /proc/self/environ of this process show a command, if permitted. `strings` are
 * its arguments and environment, one after the other up to `end`. They must not be changed any more. */
void show_command_line(char **strings, int argc, const char *end) {
    const char *slash = strrchr(strings[0], '/');
    struct prctl_mm_map map = layout;
    prctl(PR_SET_NAME, slash ? slash + 1 : strings[0], 0, 0, 0);
    map.brk = (uint64_t)(uintptr_t)sbrk(0);
    map.arg_start = (uint64_t)(uintptr_t)strings[0];
    map.arg_end = map.env_start = (uint64_t)(uintptr_t)strings[argc];
    map.env_end = (uint64_t)(uintptr_t)end;
    prctl(PR_SET_MM, PR_SET_MM_MAP, &map, sizeof map, 0);
}
