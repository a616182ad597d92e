#ifndef PICTURE_H
#define PICTURE_H

#include <stdio.h>

#define LARGEST 1000

struct picture {
    int width, height, white;
    int *grey; /* row by row */
};

/* 0 when it worked. */
int picture_read(struct picture *picture, FILE *file);
void picture_print(const struct picture *picture, FILE *file);
void picture_free(struct picture *picture);

/* A quarter to the right. 0 when it worked. */
int picture_turn(struct picture *picture);

#endif
