/* Stand-in libcuda: initialisation, identity, contexts. Only what Outboard calls. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int initialised, visible_count;
const Device *visible[MAX_GPUS];
static Context contexts[MAX_GPUS];
static pid_t owner; /* a forked child finds CUDA unusable, as with the driver */

#define MAX_DEPTH 16
static __thread Context *stack[MAX_DEPTH];
static __thread int depth;

#define NEED_INIT \
    if (!initialised || owner != getpid()) return 3
#define NEED_DEVICE(dev) \
    NEED_INIT;           \
    if ((dev) < 0 || (dev) >= visible_count) return 101

int cuInit(unsigned flags) {
    if (flags) return 1;
    if (initialised) return owner == getpid() ? 0 : 3;
    int code = env_int("OUTBOARD_STANDIN_CUINIT", 0);
    if (!code) code = resolve_mask(visible, &visible_count);
    if (code) return code;
    for (int i = 0; i < visible_count; i++) contexts[i].ordinal = i;
    initialised = 1;
    owner = getpid();
    return 0;
}

static const struct {
    int code;
    const char *name, *text;
} ERRORS[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory is mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered region"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int error_row(int code) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == code) return (int)i;
    return -1;
}

int cuGetErrorName(int code, const char **out) {
    int row = error_row(code);
    *out = row < 0 ? NULL : ERRORS[row].name;
    return row < 0 ? 1 : 0;
}

int cuGetErrorString(int code, const char **out) {
    int row = error_row(code);
    *out = row < 0 ? NULL : ERRORS[row].text;
    return row < 0 ? 1 : 0;
}

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}

int cuDeviceGetCount(int *count) {
    NEED_INIT;
    *count = visible_count;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    NEED_DEVICE(ordinal);
    *device = ordinal;
    return 0;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    NEED_DEVICE(device);
    uuid_bytes(visible[device]->uuid, uuid);
    return 0;
}

/* The old symbol: under MIG the physical GPU's. */
int cuDeviceGetUuid(unsigned char *uuid, int device) {
    NEED_DEVICE(device);
    uuid_bytes(*visible[device]->parent ? visible[device]->parent : visible[device]->uuid, uuid);
    return 0;
}

int cuDeviceGetPCIBusId(char *out, int size, int device) {
    NEED_DEVICE(device);
    snprintf(out, (size_t)size, "%s", visible[device]->pci);
    return 0;
}

int cuDeviceGetName(char *out, int size, int device) {
    NEED_DEVICE(device);
    snprintf(out, (size_t)size, "Stand-in GPU%s", *visible[device]->parent ? " MIG 1g.5gb" : "");
    return 0;
}

int cuDeviceGetAttribute(int *out, int attribute, int device) {
    NEED_DEVICE(device);
    switch (attribute) {
        case 20: *out = env_int("OUTBOARD_STANDIN_COMPUTE_MODE", 0); return 0;
        case 33: *out = visible[device]->bus; return 0;
        case 34: *out = visible[device]->slot; return 0;
        case 50: *out = visible[device]->domain; return 0;
        case 125: *out = 1; return 0;
        default: return 1;
    }
}

int ordinal_of(const char *uuid) {
    for (int i = 0; i < visible_count; i++)
        if (!strcmp(visible[i]->uuid, uuid)) return i;
    return -1;
}

/* -- contexts ------------------------------------------------------------------------------------ */

void publish_context(const Context *context) {
    char path[512];
    if (!context_path(path, sizeof path, getpid(), visible[context->ordinal]->uuid, "compute")) return;
    if (!context->retained) {
        unlink(path);
        return;
    }
    FILE *file = fopen(path, "w");
    if (!file) return;
    fprintf(file, "%llu", context->used);
    fclose(file);
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    NEED_DEVICE(device);
    *flags = 0;
    *active = contexts[device].retained > 0;
    return 0;
}

int cuDevicePrimaryCtxRetain(Context **context, int device) {
    NEED_DEVICE(device);
    if (env_int("OUTBOARD_STANDIN_COMPUTE_MODE", 0) == 2) return 46;
    contexts[device].retained++;
    publish_context(&contexts[device]);
    *context = &contexts[device];
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    NEED_DEVICE(device);
    if (!contexts[device].retained) return 201;
    contexts[device].retained--;
    publish_context(&contexts[device]);
    return 0;
}

Context *current_context(void) {
    Context *top = depth ? stack[depth - 1] : NULL;
    return top && top->retained ? top : NULL;
}

int cuCtxGetCurrent(Context **context) {
    NEED_INIT;
    *context = depth ? stack[depth - 1] : NULL;
    return 0;
}

int cuCtxSetCurrent(Context *context) {
    NEED_INIT;
    if (!depth) depth = 1;
    stack[depth - 1] = context;
    if (!context) depth--;
    return 0;
}

int cuCtxPushCurrent_v2(Context *context) {
    NEED_INIT;
    if (!context || depth == MAX_DEPTH) return 1;
    stack[depth++] = context;
    return 0;
}

int cuCtxPopCurrent_v2(Context **context) {
    NEED_INIT;
    if (!depth) return 201;
    *context = stack[--depth];
    return 0;
}

int cuCtxGetDevice(int *device) {
    NEED_INIT;
    if (!current_context()) return 201;
    *device = current_context()->ordinal;
    return 0;
}

int cuCtxSynchronize(void) {
    NEED_INIT;
    return current_context() ? 0 : 201;
}
