#ifndef RING_H
#define RING_H

#include <stddef.h>

struct ring {
    unsigned char *bytes;
    size_t room;  /* of bytes */
    size_t start; /* where the oldest byte is */
    size_t count; /* how many there are */
};

/* 0 when it worked. */
int ring_open(struct ring *ring, size_t room);
void ring_close(struct ring *ring);

/* How many bytes were stored, copied or taken out. */
size_t ring_put(struct ring *ring, const void *from, size_t length);
size_t ring_peek(const struct ring *ring, void *to, size_t length);
size_t ring_get(struct ring *ring, void *to, size_t length);

void ring_clear(struct ring *ring);

#endif
