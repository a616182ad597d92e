#ifndef SHOW_H
#define SHOW_H

#define MARK "EUR"

void show(long cents);

#endif
