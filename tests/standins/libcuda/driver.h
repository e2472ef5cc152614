/* What cuda.c and cuda_memory.c share. */
#ifndef DRIVER_H
#define DRIVER_H

#include "standin.h"

#include <stdint.h>

typedef struct {
    int ordinal;
    int retained;
    unsigned long long used; /* bytes allocated in it */
} Context;

extern int initialised, visible_count;
extern const Device *visible[MAX_GPUS];

Context *current_context(void);
/* Writes the context's file again, after `used` changed. */
void publish_context(const Context *context);
/* Ordinal of a visible device by UUID, -1 when it is hidden. */
int ordinal_of(const char *uuid);

#endif
