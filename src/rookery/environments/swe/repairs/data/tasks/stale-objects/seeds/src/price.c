#include "price.h"

long price_of_pounds(long pounds)
{
    return pounds * GRAMS_PER_POUND * CENTS_PER_KILO / 1000;
}
