/* Random uses of the buffer, whose memory has traps right behind it and marks before it. Reads a room and orders,
   prints what came of them. */
#define _DEFAULT_SOURCE
#include "ring.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int main(void)
{
    struct ring ring;
    char order[16], text[512];
    unsigned long room, number;
    unsigned char *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (page == MAP_FAILED || mprotect(page + 4096, 4096, PROT_NONE) != 0)
        return 3;
    while (scanf("%15s", order) == 1) {
        if (strcmp(order, "new") == 0) {
            if (scanf("%lu", &room) != 1 || ring_open(&ring, room) != 0)
                return 3;
            free(ring.bytes);
            ring.bytes = page + 4096 - room;
            memset(page, '#', 4096);
        } else if (strcmp(order, "put") == 0) {
            if (scanf("%511s", text) != 1)
                return 3;
            printf("%lu\n", (unsigned long)ring_put(&ring, text, strlen(text)));
        } else {
            if (scanf("%lu", &number) != 1 || number > 500)
                return 3;
            memset(text, '!', sizeof text);
            number = order[0] == 'g' ? ring_get(&ring, text, number) : ring_peek(&ring, text, number);
            printf("%.*s%c\n", (int)number, text, text[number]);
        }
        for (number = 0; number < 4096 - room; number++)
            if (page[number] != '#')
                return 4;
    }
    return 0;
}
