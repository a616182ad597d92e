#include "ring.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 65536

static char line[MOST + 16], bytes[MOST];

int main(int count, char **words)
{
    struct ring ring;
    long room = count == 2 ? strtol(words[1], NULL, 10) : 0;
    size_t found;

    if (room < 1 || room > MOST || ring_open(&ring, (size_t)room) != 0) {
        fprintf(stderr, "usage: ring 1..%d\n", MOST);
        return 2;
    }
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "put ", 4) == 0) {
            printf("%zu\n", ring_put(&ring, line + 4, strlen(line + 4)));
        } else if (strncmp(line, "get ", 4) == 0 || strncmp(line, "peek ", 5) == 0) {
            found = strtoul(strchr(line, ' ') + 1, NULL, 10);
            if (found > sizeof bytes)
                found = sizeof bytes;
            found = line[0] == 'g' ? ring_get(&ring, bytes, found) : ring_peek(&ring, bytes, found);
            fwrite(bytes, 1, found, stdout);
            putchar('\n');
        } else if (strcmp(line, "size") == 0) {
            printf("%zu\n", ring.count);
        } else if (strcmp(line, "clear") == 0) {
            ring_clear(&ring);
            printf("0\n");
        } else {
            printf("?\n");
        }
    }
    ring_close(&ring);
    return 0;
}
