#include "picture.h"

#include <stdlib.h>

int picture_read(struct picture *picture, FILE *file)
{
    int i;

    picture->grey = NULL;
    if (fscanf(file, "P2 %d %d %d", &picture->width, &picture->height, &picture->white) != 3)
        return -1;
    if (picture->width < 1 || picture->width > LARGEST || picture->height < 1 || picture->height > LARGEST)
        return -1;
    picture->grey = malloc(sizeof *picture->grey * picture->width * picture->height);
    if (picture->grey == NULL)
        return -1;
    for (i = 0; i < picture->width * picture->height; i++) {
        if (fscanf(file, "%d", &picture->grey[i]) != 1) {
            picture_free(picture);
            return -1;
        }
    }
    return 0;
}

void picture_print(const struct picture *picture, FILE *file)
{
    int x, y;

    fprintf(file, "P2\n%d %d\n%d\n", picture->width, picture->height, picture->white);
    for (y = 0; y < picture->height; y++)
        for (x = 0; x < picture->width; x++)
            fprintf(file, "%d%c", picture->grey[y * picture->width + x], x + 1 < picture->width ? ' ' : '\n');
}

void picture_free(struct picture *picture)
{
    free(picture->grey);
    picture->grey = NULL;
}
