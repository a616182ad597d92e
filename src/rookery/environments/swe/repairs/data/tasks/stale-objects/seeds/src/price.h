#ifndef PRICE_H
#define PRICE_H

#include "units.h"

#define CENTS_PER_KILO 1250

/* In cents. */
long price_of_pounds(long pounds);

#endif
