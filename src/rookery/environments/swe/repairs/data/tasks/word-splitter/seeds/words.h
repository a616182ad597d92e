#ifndef WORDS_H
#define WORDS_H

#include <stddef.h>

#define WORD_MOST 31

/* How many words the text has; the first `most` of them are stored. */
size_t words_split(const char *text, size_t length, char words[][WORD_MOST + 1], size_t most);

#endif
