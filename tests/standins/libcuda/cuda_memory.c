/* Stand-in libcuda: memory, copies, handles for other processes, streams and counts.
 *
 * Device memory is a memfd, mapped twice: the address that is handed out cannot be touched by the CPU
 * (a program that tries dies here as it does with a GPU), the copies use the other one. Another process
 * opens it through /proc/<pid>/fd, so nothing is left behind when a process dies. All work is done when
 * a call returns; streams only check how they are used. */
#define _GNU_SOURCE
#include "driver.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { FREE, DEVICE, IMPORTED, HOST, MANAGED };
typedef struct {
    int kind, fd, ordinal;
    char *base, *inside; /* what the caller sees; what the copies use */
    size_t size;
    Context *context;
} Range;
#define MAX_RANGES 4096
static Range ranges[MAX_RANGES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct {
    char bytes[64];
} Handle;
typedef struct {
    char what[8]; /* "memory" */
    int pid, fd;
    uint64_t size;
    unsigned char uuid[16];
} Inside;

#define NEED_CONTEXT \
    if (!initialised) return 3; \
    if (!current_context()) return 201

static Range *range_of(const void *pointer) {
    for (int i = 0; i < MAX_RANGES; i++)
        if (ranges[i].kind && (char *)pointer >= ranges[i].base && (char *)pointer < ranges[i].base + ranges[i].size)
            return &ranges[i];
    return NULL;
}

static Range *add_range(int kind, int fd, char *base, char *inside, size_t size) {
    pthread_mutex_lock(&lock);
    Range *found = NULL;
    for (int i = 0; i < MAX_RANGES && !found; i++)
        if (!ranges[i].kind) found = &ranges[i];
    if (found) {
        Context *context = current_context();
        *found = (Range){kind, fd, context->ordinal, base, inside, size, context};
        if (kind == DEVICE) context->used += size;
    }
    pthread_mutex_unlock(&lock);
    if (found && kind == DEVICE) publish_context(found->context);
    return found;
}

static void remove_range(Range *range) {
    if (range->kind == DEVICE) {
        range->context->used -= range->size;
        publish_context(range->context);
    }
    if (range->kind != HOST) {
        munmap(range->base, range->size);
        if (range->inside != range->base) munmap(range->inside, range->size);
    }
    if (range->fd >= 0) close(range->fd);
    memset(range, 0, sizeof *range);
}

/* Where the copies reach a range of device (or managed) memory; NULL outside of any. */
static char *reach(uint64_t pointer, size_t size) {
    Range *range = range_of((void *)pointer);
    if (!range || range->kind == HOST || pointer + size > (uint64_t)range->base + range->size) return NULL;
    return range->inside + (pointer - (uint64_t)range->base);
}

static int map_device(int kind, int fd, size_t size, uint64_t *pointer) {
    char *inside = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *base = mmap(NULL, size, PROT_NONE, MAP_SHARED, fd, 0);
    if (inside == MAP_FAILED || base == MAP_FAILED || !add_range(kind, fd, base, inside, size)) return 2;
    *pointer = (uint64_t)base;
    return 0;
}

int cuMemAlloc_v2(uint64_t *pointer, size_t size) {
    NEED_CONTEXT;
    if (!size) return 1;
    int fd = memfd_create("standin-gpu", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return 2;
    return map_device(DEVICE, fd, size, pointer);
}

int cuMemAllocManaged(uint64_t *pointer, size_t size, unsigned flags) {
    NEED_CONTEXT;
    (void)flags;
    char *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || !add_range(MANAGED, -1, base, base, size)) return 2;
    *pointer = (uint64_t)base;
    return 0;
}

int cuMemFree_v2(uint64_t pointer) {
    NEED_CONTEXT;
    Range *range = range_of((void *)pointer);
    if (!range || (uint64_t)range->base != pointer || (range->kind != DEVICE && range->kind != MANAGED)) return 1;
    remove_range(range);
    return 0;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t pointer) {
    NEED_CONTEXT;
    Range *range = range_of((void *)pointer);
    if (!range || range->kind == HOST) return 1;
    *base = (uint64_t)range->base;
    *size = range->size;
    return 0;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
    NEED_CONTEXT;
    if (!reach(to, size)) return 1;
    memcpy(reach(to, size), from, size);
    return 0;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    NEED_CONTEXT;
    if (!reach(from, size)) return 1;
    memcpy(to, reach(from, size), size);
    return 0;
}

int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t size) {
    NEED_CONTEXT;
    if (!reach(to, size) || !reach(from, size)) return 1;
    memmove(reach(to, size), reach(from, size), size);
    return 0;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *stream) {
    (void)stream;
    return cuMemcpyHtoD_v2(to, from, size);
}

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) {
    (void)stream;
    return cuMemcpyDtoH_v2(to, from, size);
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *stream) {
    (void)stream;
    return cuMemcpyDtoD_v2(to, from, size);
}

typedef struct { /* CUDA_MEMCPY2D */
    size_t from_x, from_y;
    unsigned from_type;
    const void *from_host;
    uint64_t from_device;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    unsigned to_type;
    void *to_host;
    uint64_t to_device;
    void *to_array;
    size_t to_pitch, width, height;
} Copy2D;

int cuMemcpy2DAsync_v2(const Copy2D *copy, void *stream) {
    (void)stream;
    if (copy->from_type != 2 || copy->to_type != 2) return 1;
    if (copy->from_pitch < copy->width || copy->to_pitch < copy->width) return 1;
    for (size_t row = 0; row < copy->height; row++) {
        uint64_t to = copy->to_device + (copy->to_y + row) * copy->to_pitch + copy->to_x;
        uint64_t from = copy->from_device + (copy->from_y + row) * copy->from_pitch + copy->from_x;
        int code = cuMemcpyDtoD_v2(to, from, copy->width);
        if (code) return code;
    }
    return 0;
}

int cuMemsetD8_v2(uint64_t to, unsigned char byte, size_t size) {
    NEED_CONTEXT;
    if (!reach(to, size)) return 1;
    memset(reach(to, size), byte, size);
    return 0;
}

int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    NEED_CONTEXT;
    (void)flags;
    if (!address || !size) return 1;
    if (range_of(address)) return 712;
    return add_range(HOST, -1, address, address, size) ? 0 : 2;
}

int cuMemHostUnregister(void *address) {
    NEED_CONTEXT;
    Range *range = range_of(address);
    if (!range || range->kind != HOST || range->base != address) return 713;
    remove_range(range);
    return 0;
}

int cuPointerGetAttribute(void *out, int attribute, uint64_t pointer) {
    if (!initialised) return 3;
    Range *range = range_of((void *)pointer);
    if (!range) return 1;
    switch (attribute) {
        case 2: *(unsigned *)out = range->kind == HOST ? 1 : 2; return 0;
        case 8: *(char *)out = range->kind == MANAGED; return 0;
        case 9: *(int *)out = range->ordinal; return 0;
        case 10: *(char *)out = range->kind == DEVICE; return 0;
        default: return 1;
    }
}

/* -- for other processes ------------------------------------------------------------------------- */

int cuIpcGetMemHandle(Handle *handle, uint64_t pointer) {
    NEED_CONTEXT;
    Range *range = range_of((void *)pointer);
    if (!range || range->kind != DEVICE || (uint64_t)range->base != pointer) return 1;
    Inside inside = {"memory", getpid(), range->fd, range->size, {0}};
    uuid_bytes(visible[range->ordinal]->uuid, inside.uuid);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &inside, sizeof inside);
    return 0;
}

int cuIpcOpenMemHandle_v2(uint64_t *pointer, Handle handle, unsigned flags) {
    NEED_CONTEXT;
    Inside inside;
    char path[64];
    memcpy(&inside, &handle, sizeof inside);
    if (flags != 1 || strcmp(inside.what, "memory")) return 1;
    if (inside.pid == getpid()) return 201;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", inside.pid, inside.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return 1;
    int code = map_device(IMPORTED, fd, inside.size, pointer);
    for (int i = 0; !code && i < visible_count; i++) {
        unsigned char uuid[16];
        uuid_bytes(visible[i]->uuid, uuid);
        if (!memcmp(uuid, inside.uuid, 16)) range_of((void *)*pointer)->ordinal = i;
    }
    return code;
}

int cuIpcCloseMemHandle(uint64_t pointer) {
    NEED_CONTEXT;
    Range *range = range_of((void *)pointer);
    if (!range || range->kind != IMPORTED) return 1;
    remove_range(range);
    return 0;
}

int cuStreamCreate(void **stream, unsigned flags) {
    NEED_CONTEXT;
    (void)flags;
    *stream = malloc(1);
    return 0;
}

int cuStreamWriteValue32_v2(void *stream, uint64_t at, unsigned number, unsigned flags) {
    NEED_CONTEXT;
    (void)stream;
    (void)flags;
    if (at % 4 || !reach(at, 4)) return 1;
    *(volatile unsigned *)reach(at, 4) = number;
    return 0;
}

/* All work is done when a call returns, so what is waited for must be there: else a real stream would be stuck. */
int cuStreamWaitValue32_v2(void *stream, uint64_t at, unsigned number, unsigned flags) {
    NEED_CONTEXT;
    (void)stream;
    if (at % 4 || !reach(at, 4) || flags) return 1;
    return (int)(*(volatile unsigned *)reach(at, 4) - number) >= 0 ? 0 : 600;
}

int cuStreamSynchronize(void *stream) {
    NEED_CONTEXT;
    (void)stream;
    return 0;
}

int cuStreamDestroy_v2(void *stream) {
    free(stream);
    return 0;
}
