#include "sink.h"

int sink_open(struct sink *sink, const char *path)
{
    sink->path = path;
    sink->file = fopen(path, "a");
    return sink->file == NULL ? -1 : 0;
}

int sink_write(struct sink *sink, const char *line)
{
    if (fprintf(sink->file, "%s\n", line) < 0)
        return -1;
    return fflush(sink->file);
}

int sink_reopen(struct sink *sink)
{
    sink_close(sink);
    return sink_open(sink, sink->path);
}

int sink_close(struct sink *sink)
{
    return fclose(sink->file);
}
