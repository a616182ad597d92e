#ifndef SINK_H
#define SINK_H

#include <stdio.h>

struct sink {
    const char *path;
    FILE *file;
};

/* All return 0 when it worked. */
int sink_open(struct sink *sink, const char *path);
int sink_write(struct sink *sink, const char *line);
int sink_reopen(struct sink *sink);
int sink_close(struct sink *sink);

#endif
