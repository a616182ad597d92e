#include "picture.h"

#include <string.h>

int main(int count, char **words)
{
    struct picture picture;
    int quarters;

    if (count != 2 || strlen(words[1]) != 1 || words[1][0] < '0' || words[1][0] > '3') {
        fprintf(stderr, "usage: turn 0..3\n");
        return 2;
    }
    if (picture_read(&picture, stdin) != 0) {
        fprintf(stderr, "turn: this is no picture\n");
        return 2;
    }
    for (quarters = words[1][0] - '0'; quarters > 0; quarters--)
        if (picture_turn(&picture) != 0)
            return 1;
    picture_print(&picture, stdout);
    picture_free(&picture);
    return 0;
}
