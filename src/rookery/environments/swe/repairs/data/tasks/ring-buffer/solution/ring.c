#include "ring.h"

#include <stdlib.h>
#include <string.h>

int ring_open(struct ring *ring, size_t room)
{
    ring->bytes = malloc(room);
    ring->room = room;
    ring_clear(ring);
    return ring->bytes == NULL ? -1 : 0;
}

void ring_close(struct ring *ring)
{
    free(ring->bytes);
    ring->bytes = NULL;
}

void ring_clear(struct ring *ring)
{
    ring->start = ring->count = 0;
}

static size_t least(size_t one, size_t other)
{
    return one < other ? one : other;
}

size_t ring_put(struct ring *ring, const void *from, size_t length)
{
    const unsigned char *bytes = from;
    size_t end, first;

    length = least(length, ring->room - ring->count);
    end = ring->start + ring->count;
    if (end >= ring->room)
        end -= ring->room;
    first = least(length, ring->room - end);
    memcpy(ring->bytes + end, bytes, first);
    memcpy(ring->bytes, bytes + first, length - first);
    ring->count += length;
    return length;
}

size_t ring_peek(const struct ring *ring, void *to, size_t length)
{
    unsigned char *bytes = to;
    size_t first;

    length = least(length, ring->count);
    first = least(length, ring->room - ring->start);
    memcpy(bytes, ring->bytes + ring->start, first);
    memcpy(bytes + first, ring->bytes, length - first);
    return length;
}

size_t ring_get(struct ring *ring, void *to, size_t length)
{
    length = ring_peek(ring, to, length);
    ring->start += length;
    if (ring->start >= ring->room)
        ring->start -= ring->room;
    ring->count -= length;
    return length;
}
