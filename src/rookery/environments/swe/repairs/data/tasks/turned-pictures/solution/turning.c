#include "picture.h"

#include <stdlib.h>

int picture_turn(struct picture *picture)
{
    int width = picture->height, height = picture->width;
    int *grey = malloc(sizeof *grey * width * height);
    int x, y;

    if (grey == NULL)
        return -1;
    for (y = 0; y < picture->height; y++)
        for (x = 0; x < picture->width; x++)
            grey[x * width + (width - 1 - y)] = picture->grey[y * picture->width + x];
    free(picture->grey);
    picture->grey = grey;
    picture->width = width;
    picture->height = height;
    return 0;
}
