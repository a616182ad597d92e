#include "show.h"

#include <stdio.h>

void show(long cents)
{
    printf("%ld.%02ld %s\n", cents / 100, cents % 100, MARK);
}
