/* Stand-in libnvidia-ml: what nvidia-ml-py asks for the outside witness. Never looks at a mask. */
#define _GNU_SOURCE
#include "standin.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
static const unsigned long long TOTAL_BYTES = 16ull << 30;
static int users;

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_sub_system_id;
    char bus_id[32];
} PciInfo;
typedef struct {
    unsigned long long total, free, used;
} Memory;
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} MemoryV2;
typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} Process;

#define NEED_INIT \
    if (!users) return UNINITIALIZED

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int code = env_int("OUTBOARD_STANDIN_NVML_INIT", 0);
    if (!code) users++;
    return code;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    NEED_INIT;
    users--;
    return OK;
}

const char *nvmlErrorString(int code) {
    switch (code) {
        case NOT_SUPPORTED: return "Not Supported";
        case 4: return "Insufficient Permissions";
        case NOT_FOUND: return "Not Found";
        case 9: return "Driver Not Loaded";
        default: return "stand-in error";
    }
}

static int text(char *out, unsigned size, const char *value) {
    NEED_INIT;
    return snprintf(out, size, "%s", value) < (int)size ? OK : INSUFFICIENT_SIZE;
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) { return text(out, size, "stand-in"); }
int nvmlSystemGetNVMLVersion(char *out, unsigned size) { return text(out, size, "stand-in"); }

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    NEED_INIT;
    *version = 13000;
    return OK;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    NEED_INIT;
    *count = (unsigned)machine()->count;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, const Device **device) {
    NEED_INIT;
    if (index >= (unsigned)machine()->count) return INVALID_ARGUMENT;
    *device = &machine()->gpu[index];
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, const Device **device) {
    NEED_INIT;
    for (int i = 0; i < machine()->count; i++) {
        if (!strcmp(machine()->gpu[i].uuid, uuid)) return *device = &machine()->gpu[i], OK;
        for (int k = 0; k < machine()->gpu[i].instances; k++)
            if (!strcmp(machine()->instance[i][k].uuid, uuid)) return *device = &machine()->instance[i][k], OK;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(const Device *device, char *out, unsigned size) { return text(out, size, device->uuid); }

int nvmlDeviceGetName(const Device *device, char *out, unsigned size) {
    return text(out, size, *device->parent ? "Stand-in GPU MIG 1g.5gb" : "Stand-in GPU");
}

int nvmlDeviceGetIndex(const Device *device, unsigned *index) {
    NEED_INIT;
    *index = (unsigned)(device - machine()->gpu);
    return OK;
}

int nvmlDeviceGetMinorNumber(const Device *device, unsigned *minor) { return nvmlDeviceGetIndex(device, minor); }

int nvmlDeviceGetPciInfo_v3(const Device *device, PciInfo *info) {
    NEED_INIT;
    memset(info, 0, sizeof *info);
    info->domain = (unsigned)device->domain;
    info->bus = (unsigned)device->bus;
    info->device = (unsigned)device->slot;
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "%04X:%02X:%02X.0", info->domain & 0xffff,
             info->bus & 0xff, info->device & 0xff);
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:%02X.0", info->domain, info->bus, info->device);
    return OK;
}

int nvmlDeviceGetComputeMode(const Device *device, int *mode) {
    NEED_INIT;
    (void)device;
    *mode = env_int("OUTBOARD_STANDIN_COMPUTE_MODE", 0);
    return OK;
}

/* -- MIG ----------------------------------------------------------------------------------------- */

int nvmlDeviceGetMigMode(const Device *device, unsigned *current, unsigned *pending) {
    NEED_INIT;
    if (*device->parent) return INVALID_ARGUMENT;
    *current = *pending = device->instances > 0;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(const Device *device, unsigned *count) {
    NEED_INIT;
    *count = device->instances ? MAX_INSTANCES - 1 : 0;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(const Device *device, unsigned index, const Device **out) {
    NEED_INIT;
    if (index >= (unsigned)device->instances) return NOT_FOUND;
    *out = &machine()->instance[device - machine()->gpu][index];
    return OK;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(const Device *device, const Device **out) {
    NEED_INIT;
    return *device->parent ? nvmlDeviceGetHandleByUUID(device->parent, out) : NOT_FOUND;
}

/* -- who is on it -------------------------------------------------------------------------------- */

/* A GPU in MIG mode shows what runs in its instances too. */
static int is_on(const Device *device, const char *uuid) {
    if (!strcmp(device->uuid, uuid)) return 1;
    for (int k = 0; k < device->instances; k++)
        if (!strcmp(machine()->instance[device - machine()->gpu][k].uuid, uuid)) return 1;
    return 0;
}

/* Reads the state folder; fills at most `room` rows and returns how many there are. */
static unsigned scan(const Device *device, const char *what, Process *rows, unsigned room) {
    const char *folder = getenv("OUTBOARD_STANDIN_STATE");
    DIR *entries = folder ? opendir(folder) : NULL;
    struct dirent *entry;
    unsigned count = 0;
    while (entries && (entry = readdir(entries))) {
        int pid;
        char uuid[64], kind[16], path[512];
        if (sscanf(entry->d_name, "%d@%63[^@]@%15s", &pid, uuid, kind) != 3) continue;
        if ((what && strcmp(kind, what)) || !is_on(device, uuid)) continue;
        if (kill(pid, 0) && errno == ESRCH) continue;
        unsigned long long used = 0;
        if (context_path(path, sizeof path, pid, uuid, kind)) {
            FILE *file = fopen(path, "r");
            if (file && fscanf(file, "%llu", &used) != 1) used = 0;
            if (file) fclose(file);
        }
        if (count < room)
            rows[count] = (Process){(unsigned)(pid + env_int("OUTBOARD_STANDIN_NVML_PIDS", 0)), used, ~0u, ~0u};
        count++;
    }
    if (entries) closedir(entries);
    return count;
}

static int list(const Device *device, const char *what, unsigned *count, Process *rows) {
    NEED_INIT;
    int code = env_int("OUTBOARD_STANDIN_NVML_LISTS", 0);
    if (code) return code;
    unsigned room = *count;
    *count = scan(device, what, rows, rows ? room : 0);
    return *count > room ? INSUFFICIENT_SIZE : OK;
}

#define LIST(name, what)                                                                                      \
    int nvmlDeviceGet##name##RunningProcesses_v2(const Device *d, unsigned *n, Process *p) { return list(d, what, n, p); } \
    int nvmlDeviceGet##name##RunningProcesses_v3(const Device *d, unsigned *n, Process *p) { return list(d, what, n, p); }
LIST(Compute, "compute")
LIST(Graphics, "graphics")
LIST(MPSCompute, "mps")

static unsigned long long used_bytes(const Device *device) {
    static Process rows[256];
    unsigned count = scan(device, NULL, rows, 256);
    unsigned long long used = 1ull << 20; /* what the driver itself takes */
    for (unsigned i = 0; i < count && i < 256; i++) used += rows[i].used;
    return used;
}

int nvmlDeviceGetMemoryInfo(const Device *device, Memory *memory) {
    NEED_INIT;
    unsigned long long used = used_bytes(device);
    *memory = (Memory){TOTAL_BYTES, TOTAL_BYTES - used, used};
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(const Device *device, MemoryV2 *memory) {
    NEED_INIT;
    unsigned long long used = used_bytes(device);
    *memory = (MemoryV2){memory->version, TOTAL_BYTES, 0, TOTAL_BYTES - used, used};
    return OK;
}
