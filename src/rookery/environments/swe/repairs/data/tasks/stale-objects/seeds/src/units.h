#ifndef UNITS_H
#define UNITS_H

#define GRAMS_PER_POUND 454

#endif
