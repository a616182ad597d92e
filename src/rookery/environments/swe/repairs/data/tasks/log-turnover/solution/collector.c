#include "sink.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static volatile sig_atomic_t wanted; /* a new log */

static void on_hangup(int number)
{
    (void)number;
    wanted = 1;
}

static int write_pid(const char *path)
{
    FILE *file = fopen(path, "w");

    if (file == NULL)
        return -1;
    fprintf(file, "%ld\n", (long)getpid());
    return fclose(file);
}

int main(int count, char **words)
{
    struct sigaction action;
    struct sink sink;
    char *line = NULL;
    size_t room = 0;
    ssize_t length;

    if (count != 3) {
        fprintf(stderr, "usage: collector LOG PIDFILE\n");
        return 2;
    }
    memset(&action, 0, sizeof action);
    action.sa_handler = on_hangup;
    action.sa_flags = SA_RESTART;
    sigaction(SIGHUP, &action, NULL);
    if (sink_open(&sink, words[1]) != 0 || write_pid(words[2]) != 0) {
        perror("collector");
        return 1;
    }
    while ((length = getline(&line, &room, stdin)) != -1) {
        if (length > 0 && line[length - 1] == '\n')
            line[length - 1] = '\0';
        if (wanted) {
            wanted = 0;
            if (sink_reopen(&sink) != 0)
                return 1;
        }
        if (sink_write(&sink, line) != 0)
            return 1;
    }
    free(line);
    unlink(words[2]);
    return sink_close(&sink) == 0 ? 0 : 1;
}
