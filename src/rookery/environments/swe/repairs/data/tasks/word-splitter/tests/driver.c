/* Texts that lie right before, and right behind, memory that cannot be read; words with marks behind them. Reads texts as
   hexadecimal lines, prints the words in the same way. */
#define _DEFAULT_SOURCE
#include "words.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096

static char line[8192];

static unsigned char *trapped(void)
{
    unsigned char *pages = mmap(NULL, 3 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (pages == MAP_FAILED || mprotect(pages + PAGE, PAGE, PROT_READ | PROT_WRITE) != 0)
        return NULL;
    return pages + PAGE;
}

int main(void)
{
    unsigned char *text = trapped(), *words = trapped();
    char (*into)[WORD_MOST + 1];
    size_t most, length, count, first = 0, n, i;
    unsigned byte, ends, start;

    if (text == NULL || words == NULL)
        return 3;
    while (scanf("%zu %u %8191s", &most, &ends, line) == 3) {
        length = (strlen(line) - 1) / 2;
        start = ends ? PAGE - (unsigned)length : 0;
        memset(text, '"', PAGE);
        for (n = 0; n < length; n++) {
            sscanf(line + 1 + 2 * n, "%2x", &byte);
            text[start + n] = (unsigned char)byte;
        }
        memset(words, '#', PAGE);
        into = (void *)(words + PAGE - most * (WORD_MOST + 1));
        count = words_split((const char *)text + start, length, into, most);
        printf("%zu", count);
        for (n = 0; n < most && n < count; n++) {
            printf(" ");
            for (i = 0; i <= WORD_MOST && into[n][i] != '\0'; i++)
                printf("%02x", (unsigned char)into[n][i]);
            printf(i > WORD_MOST ? "!" : ".");
        }
        printf("\n");
        for (first = 0; first < PAGE - most * (WORD_MOST + 1); first++)
            if (words[first] != '#')
                return 4;
        for (n = count; n < most; n++)
            for (i = 0; i <= WORD_MOST; i++)
                if (into[n][i] != '#')
                    return 5;
    }
    return 0;
}
