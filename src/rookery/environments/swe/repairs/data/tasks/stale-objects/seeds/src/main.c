#include "price.h"
#include "show.h"

#include <stdlib.h>

int main(int count, char **words)
{
    if (count != 2)
        return 2;
    show(price_of_pounds(strtol(words[1], NULL, 10)));
    return 0;
}
