#include "words.h"

struct word {
    char *bytes; /* NULL where there is no room for it */
    size_t length;
};

static void add(struct word *word, char byte)
{
    if (word->bytes != NULL && word->length < WORD_MOST)
        word->bytes[word->length++] = byte;
}

static int is_blank(char byte)
{
    return byte == ' ' || byte == '\t';
}

/* A backslash; `at` is behind it. Returns where the text goes on. */
static size_t escaped(const char *text, size_t length, size_t at, struct word *word)
{
    if (at >= length) {
        add(word, '\\');
        return at;
    }
    add(word, text[at]);
    return at + 1;
}

/* What stands between quotes; `at` is behind the first one. Returns where the text goes on. */
static size_t quoted(const char *text, size_t length, size_t at, struct word *word)
{
    while (at < length && text[at] != '"') {
        if (text[at] == '\\')
            at = escaped(text, length, at + 1, word);
        else
            add(word, text[at++]);
    }
    return at < length ? at + 1 : at;
}

size_t words_split(const char *text, size_t length, char words[][WORD_MOST + 1], size_t most)
{
    struct word word;
    size_t at = 0, count = 0;

    for (;;) {
        while (at < length && is_blank(text[at]))
            at++;
        if (at >= length)
            return count;
        word.bytes = count < most ? words[count] : NULL;
        word.length = 0;
        while (at < length && !is_blank(text[at])) {
            if (text[at] == '"')
                at = quoted(text, length, at + 1, &word);
            else if (text[at] == '\\')
                at = escaped(text, length, at + 1, &word);
            else
                add(&word, text[at++]);
        }
        if (word.bytes != NULL)
            word.bytes[word.length] = '\0';
        count++;
    }
}
