/* What the stand-in libcuda and the stand-in NVML share: the machine that the environment describes.
 *
 * OUTBOARD_STANDIN_GPUS           the GPUs in PCI order, "GPU-<uuid>@0000:00:06.0,...". A GPU in MIG mode
 *                                 lists its instances behind it: "GPU-<uuid>@<pci>/MIG-<uuid>/MIG-<uuid>"
 * OUTBOARD_STANDIN_FASTEST_FIRST  indices into that list in the order FASTEST_FIRST gives, "1,0"
 * OUTBOARD_STANDIN_STATE          a folder for what must be seen across processes: a file
 *                                 "<pid>@<uuid>@compute" (or @graphics, @mps) for each live context, its
 *                                 text the bytes used. Tests add files by hand; files of dead pids do
 *                                 not count.
 * OUTBOARD_STANDIN_CUINIT         a code that cuInit returns, whatever else is set
 * OUTBOARD_STANDIN_COMPUTE_MODE   0, 1, 2 or 3 for all GPUs
 * OUTBOARD_STANDIN_NVML_INIT      a code that nvmlInit returns (9: driver not loaded)
 * OUTBOARD_STANDIN_NVML_LISTS     a code that the process lists return (3: not supported, 4: no permission)
 * OUTBOARD_STANDIN_NVML_PIDS      added to every pid in the lists: what a pid namespace looks like
 */
#ifndef STANDIN_H
#define STANDIN_H

#include <stddef.h>

#define MAX_GPUS 16
#define MAX_INSTANCES 8

typedef struct {
    char uuid[48]; /* "GPU-..." or "MIG-...", lower case */
    char pci[24];  /* 0000:00:06.0 */
    int domain, bus, slot;
    char parent[48]; /* of an instance: its GPU's UUID; else empty */
    int instances;   /* of a GPU: how many; 0 = not in MIG mode */
} Device;

typedef struct {
    Device gpu[MAX_GPUS];
    Device instance[MAX_GPUS][MAX_INSTANCES];
    int count;
} Machine;

/* Filled from the environment at the first call. */
const Machine *machine(void);

/* What CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER leave: 0, 100 or 101 as cuInit, and the list. */
int resolve_mask(const Device *visible[MAX_GPUS], int *count);

void uuid_bytes(const char *uuid, unsigned char out[16]);
int env_int(const char *name, int otherwise);
/* The path of a context's file in the state folder; 0 when there is no folder. */
int context_path(char *out, size_t size, int pid, const char *uuid, const char *what);

#endif
