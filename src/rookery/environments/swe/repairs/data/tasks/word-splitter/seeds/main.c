#include "words.h"

#include <stdio.h>

#define EIGHT 8

static char line[1024];

/* The length of the next line, without its end; -1 where there is none. */
static int next_line(void)
{
    int length = 0, byte;

    while ((byte = getchar()) != EOF && byte != '\n')
        if (length < 1000)
            line[length++] = (char)byte;
    return byte == EOF && length == 0 ? -1 : length;
}

int main(void)
{
    char words[EIGHT][WORD_MOST + 1];
    size_t count, n;
    int length;

    while ((length = next_line()) >= 0) {
        count = words_split(line, (size_t)length, words, EIGHT);
        printf("%zu\n", count);
        for (n = 0; n < count && n < EIGHT; n++)
            printf("<%s>\n", words[n]);
    }
    return 0;
}
