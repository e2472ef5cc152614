/* The machine that the environment describes, and what a mask leaves of it. */
#define _GNU_SOURCE
#include "standin.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static Machine the_machine;
static int described;

int env_int(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

int context_path(char *out, size_t size, int pid, const char *uuid, const char *what) {
    const char *folder = getenv("OUTBOARD_STANDIN_STATE");
    if (!folder || !*folder) return 0;
    return snprintf(out, size, "%s/%d@%s@%s", folder, pid, uuid, what) < (int)size;
}

void uuid_bytes(const char *uuid, unsigned char out[16]) {
    int half = 0;
    memset(out, 0, 16);
    for (const char *c = uuid + 4; *c && half < 32; c++) {
        if (!isxdigit((unsigned char)*c)) continue;
        int value = isdigit((unsigned char)*c) ? *c - '0' : tolower((unsigned char)*c) - 'a' + 10;
        out[half / 2] |= (unsigned char)(value << (half % 2 ? 0 : 4));
        half++;
    }
}

static void describe(Device *device, const char *uuid, const char *pci, const char *parent) {
    snprintf(device->uuid, sizeof device->uuid, "%s", uuid);
    snprintf(device->pci, sizeof device->pci, "%s", pci);
    snprintf(device->parent, sizeof device->parent, "%s", parent);
    sscanf(pci, "%x:%x:%x", (unsigned *)&device->domain, (unsigned *)&device->bus, (unsigned *)&device->slot);
}

const Machine *machine(void) {
    if (described) return &the_machine;
    described = 1;
    const char *text = getenv("OUTBOARD_STANDIN_GPUS");
    char *copy = strdup(text ? text : ""), *rest = copy, *entry;
    while ((entry = strsep(&rest, ",")) && the_machine.count < MAX_GPUS) {
        char *instances = entry, *gpu = strsep(&instances, "/"), *pci = strchr(gpu, '@');
        if (!pci) continue;
        *pci++ = 0;
        int i = the_machine.count++;
        Device *device = &the_machine.gpu[i];
        describe(device, gpu, pci, "");
        char *mig;
        while ((mig = strsep(&instances, "/")) && device->instances < MAX_INSTANCES)
            describe(&the_machine.instance[i][device->instances++], mig, pci, gpu);
    }
    free(copy);
    return &the_machine;
}

/* -- the mask ------------------------------------------------------------------------------------
 * Written from what was measured on two H200s (driver 580). Not measured, and so only assumed: blanks
 * round a UUID are skipped like those round a number; text behind a UUID makes it invalid; a duplicate
 * is one among the valid entries before the first invalid one; an empty CUDA_DEVICE_ORDER is the
 * default; all rows about MIG (a GPU in MIG mode shows its first instance). */

enum { NUMBER = 1, UUID, INSTANCE };

/* Which device an ordinal or UUID of a GPU means: under MIG its first instance. */
static const Device *usable(int i) {
    const Machine *m = machine();
    return m->gpu[i].instances ? &m->instance[i][0] : &m->gpu[i];
}

static const Device *by_uuid(const char *token) {
    const Machine *m = machine();
    size_t length = strcspn(token, " \t");
    if (token[length + strspn(token + length, " \t")]) return NULL;
    const Device *found = NULL;
    int hits = 0;
    for (int i = 0; i < m->count; i++) {
        if (length > 4 && !strncmp(token, "GPU-", 4) && !strncasecmp(token, m->gpu[i].uuid, length)) {
            found = usable(i);
            hits++;
        }
        for (int k = 0; k < m->gpu[i].instances; k++)
            if (!strncmp(token, "MIG-", 4) && length == strlen(m->instance[i][k].uuid) &&
                !strncasecmp(token, m->instance[i][k].uuid, length)) {
                found = &m->instance[i][k];
                hits++;
            }
    }
    return hits == 1 ? found : NULL; /* a prefix of two GPUs is invalid */
}

/* The device of one entry, or NULL for an invalid one. *kind is fixed by the first entry. */
static const Device *one_entry(const char *token, const int *order, int *kind) {
    token += strspn(token, " \t");
    int this_kind = !strncmp(token, "GPU-", 4) ? UUID : !strncmp(token, "MIG-", 4) ? INSTANCE : NUMBER;
    if (!*kind) *kind = this_kind;
    if (this_kind != *kind) return NULL;
    if (this_kind != NUMBER) return by_uuid(token);
    char *end;
    long value = strtol(token, &end, 10); /* like strtoul: "0x1" is 0, "1.0" and "1;0" are 1 */
    if (end == token || value < 0 || value >= machine()->count) return NULL;
    return usable(order[value]);
}

static int device_order(int order[MAX_GPUS]) {
    const char *wanted = getenv("CUDA_DEVICE_ORDER");
    const char *fastest = getenv("OUTBOARD_STANDIN_FASTEST_FIRST");
    for (int i = 0; i < MAX_GPUS; i++) order[i] = i;
    if (wanted && !strcmp(wanted, "PCI_BUS_ID")) return 0;
    if (wanted && *wanted && strcmp(wanted, "FASTEST_FIRST")) return 101;
    for (int i = 0; fastest && *fastest && i < machine()->count; i++) {
        char *end;
        long value = strtol(fastest, &end, 10);
        if (end != fastest && value >= 0 && value < machine()->count) order[i] = (int)value;
        fastest = *end ? end + 1 : end;
    }
    return 0;
}

int resolve_mask(const Device *visible[MAX_GPUS], int *count) {
    int order[MAX_GPUS], kind = 0, code = device_order(order);
    *count = 0;
    if (code) return code;
    const char *mask = getenv("CUDA_VISIBLE_DEVICES");
    if (!mask) {
        for (int i = 0; i < machine()->count; i++) visible[(*count)++] = usable(order[i]);
        return *count ? 0 : 100;
    }
    char *copy = strdup(mask), *rest = copy, *token;
    while ((token = strsep(&rest, ",")) && *count < MAX_GPUS) {
        const Device *device = one_entry(token, order, &kind);
        if (!device) break; /* an invalid entry ends the list, without a word */
        for (int i = 0; i < *count; i++)
            if (visible[i] == device) code = 101;
        visible[(*count)++] = device;
    }
    free(copy);
    if (code) *count = 0;
    return code ? code : *count ? 0 : 100;
}
