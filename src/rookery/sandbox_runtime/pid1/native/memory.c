/* Move the memory of the zygote into a sealed file, of which it and its forks have private mappings.
 *
 * A fork copies the page tables of anonymous memory, and its end frees them: half a millisecond for the 9 MB of a warm
 * interpreter, twice for every sandbox with a Python command. Page tables of private mappings of a file are not copied. A
 * process maps what it reads, and copies what it writes, from the file.
 *
 * The memory is not anonymous any more: after MADV_DONTNEED it has its old content instead of zeros, and what mremap
 * adds to it has the content of other memory, or causes SIGBUS beyond the end of the file. Therefore the allocators
 * must do neither with blocks that exist before the copy. pymalloc only unmaps its arenas. glibc's malloc uses
 * MADV_DONTNEED only in `malloc_trim` and in the arenas of threads, which the zygote does not have, and mremap only in
 * a `realloc` of a block that has a mapping of its own (128 KB or more): in CPython, lists and byte arrays that grow,
 * and a new interpreter has none of this size. Other allocators are not known to meet this: `native_init.py` permits
 * the copy only in CPython with the GIL, and `zygote.c` only with glibc. */
#include "native.h"

#define MAX_AREAS 512

struct Area {
    unsigned long start, end;
    int protection;
};

/* Return whether the line of /proc/self/smaps that lists the flags of a mapping allows to replace the mapping. */
static int is_replaceable(const char *flags) {
    /* grows down (the stack), shadow stack, wiped or not copied on fork, locked, huge pages, sealed, memory tags */
    static const char *const refused[] = {" gd", " ss", " wf", " dc", " lo", " ht", " sl", " mt"};
    for (size_t at = 0; at < sizeof refused / sizeof *refused; at++)
        if (strstr(flags, refused[at]))
            return 0;
    return 1;
}

/* List the private mappings with anonymous memory and without code, except the one that holds `state`. Return their
 * number. */
static int list_areas(struct Area *areas) {
    char line[8192], access[8] = "", new_access[8];
    unsigned long start = 0, end = 0, anonymous = 0, first, last, own = (unsigned long)(uintptr_t)&state;
    int count = 0;
    FILE *file = fopen("/proc/self/smaps", "re");
    if (!file)
        return 0;
    while (count < MAX_AREAS && fgets(line, sizeof line, file)) {
        if (sscanf(line, "%lx-%lx %7s", &first, &last, new_access) == 3) {
            start = first, end = last, anonymous = 0;
            memcpy(access, new_access, sizeof access);
        } else if (sscanf(line, "Anonymous: %lu", &anonymous) == 1)
            continue;
        else if (strncmp(line, "VmFlags:", 8) == 0 && anonymous && access[0] == 'r' && strcmp(access + 2, "-p") == 0 &&
                 is_replaceable(line) && !(start < own + sizeof state && own < end))
            areas[count++] = (struct Area){start, end, access[1] == 'w' ? PROT_READ | PROT_WRITE : PROT_READ};
    }
    fclose(file);
    return count;
}

/* Replace the private memory of this process by private mappings of a sealed copy. Leave it as it is if the copy fails.
 * Nothing may be allocated between the copy and the end. */
void share_memory(void) {
    struct Area areas[MAX_AREAS];
    int count = list_areas(areas);
    off_t at = 0;
    int fd = memfd_create("interpreter", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return;
    for (int number = 0; number < count; number++) {
        size_t size = areas[number].end - areas[number].start;
        if (pwrite(fd, (const void *)areas[number].start, size, at) != (ssize_t)size) {
            close(fd);
            return;
        }
        at += (off_t)size;
    }
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) {
        at = 0;
        for (int number = 0; number < count; number++) {
            size_t size = areas[number].end - areas[number].start;
            void *place = (void *)areas[number].start;
            if (mmap(place, size, areas[number].protection, MAP_PRIVATE | MAP_FIXED, fd, at) == MAP_FAILED) {
                static const char message[] = "zygote: mmap failed\n";
                /* The memory may be gone. The keeper continues without a zygote. */
                _exit(write(STDERR_FILENO, message, sizeof message - 1) < 0 ? 2 : 1);
            }
            at += (off_t)size;
        }
    }
    close(fd);
}
