/* The floor: two processes and no Python. The same two copies and the same stamp check as every scheme.
 *
 *   spin    both poll a sequence word on its own cache line (each on a core of its own, if there are two)
 *   futex   both always sleep in futex(2)
 *
 * usage: floor spin|futex CTRL_BYTES STATE_BYTES SECONDS WORK_NS VARY THINK_NS ONE_CORE
 * stdout: int64: nanoseconds in steps, CPU nanoseconds the host spent in them, then one sample a step: its
 * nanoseconds less those the worker worked.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield")
#else
#define RELAX() ((void)0)
#endif
#define MOST (1 << 22)
#define PAGES(n) (((n) + 4095) & ~4095ul)

typedef struct {
    _Alignas(128) _Atomic uint32_t request;
    _Alignas(128) _Atomic uint32_t reply;
    _Alignas(128) _Atomic int64_t worked;
    _Atomic int stop;
} line_t;

static int64_t now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The nth processor we may use, when there are two. */
static void pin(int nth, int one_core) {
    cpu_set_t all, mine;
    CPU_ZERO(&mine);
    if (sched_getaffinity(0, sizeof all, &all) || CPU_COUNT(&all) < 2) return;
    if (one_core) nth = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &all) && nth-- == 0) CPU_SET(cpu, &mine);
    sched_setaffinity(0, sizeof mine, &mine);
}

static void ring(_Atomic uint32_t *word, uint32_t value, int futex) {
    atomic_store_explicit(word, value, memory_order_release);
    if (futex) syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void await(_Atomic uint32_t *word, uint32_t value, int futex) {
    uint32_t have;
    while ((have = atomic_load_explicit(word, memory_order_acquire)) != value) {
        if (futex) syscall(SYS_futex, word, FUTEX_WAIT, have, NULL, NULL, 0);
        else RELAX();
    }
}

static int64_t busy(int64_t ns) {
    int64_t started = now(CLOCK_MONOTONIC), t = started;
    while (t < started + ns) t = now(CLOCK_MONOTONIC);
    return t - started;
}

int main(int argc, char **argv) {
    if (argc != 9) return 2;
    int futex = !strcmp(argv[1], "futex"), one_core = atoi(argv[8]);
    size_t ctrl_bytes = strtoul(argv[2], 0, 10), state_bytes = strtoul(argv[3], 0, 10);
    int64_t length = (int64_t)(atof(argv[4]) * 1e9), work = atoll(argv[5]), think = atoll(argv[7]);
    double vary = atof(argv[6]);
    size_t all = PAGES(sizeof(line_t)) + PAGES(ctrl_bytes) + PAGES(state_bytes);
    char *memory = mmap(0, all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    line_t *line = (line_t *)memory;
    char *ctrl = memory + PAGES(sizeof(line_t)), *state = ctrl + PAGES(ctrl_bytes);
    char *own_ctrl = aligned_alloc(4096, PAGES(ctrl_bytes));
    char *own_state = aligned_alloc(4096, PAGES(state_bytes));
    memset(own_ctrl, 1, ctrl_bytes), memset(own_state, 2, state_bytes), memset(memory, 0, all);
    pid_t worker = fork();
    if (worker == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pin(1, one_core);
        for (uint32_t i = 1;; i++) {
            await(&line->request, i, futex);
            if (atomic_load(&line->stop)) _exit(0);
            if (work) {
                double part = 1 + vary * (2 * drand48() - 1);
                atomic_store_explicit(&line->worked, busy(work * part), memory_order_relaxed);
            }
            memcpy(own_state, ctrl, 4); /* the stamp */
            memcpy(state, own_state, state_bytes);
            ring(&line->reply, i, futex);
        }
    }
    pin(0, one_core);
    int64_t *samples = malloc(sizeof(int64_t) * MOST), in_steps = 0, on_cpu = 0;
    int64_t started = now(CLOCK_MONOTONIC), warm = started + length / 4, end = warm + length;
    long taken = 0;
    for (uint32_t i = 1; taken < MOST; i++) {
        if (think) busy(think);
        int64_t cpu = work ? now(CLOCK_THREAD_CPUTIME_ID) : 0;
        int64_t t = now(CLOCK_MONOTONIC);
        memcpy(own_ctrl, &i, 4);
        memcpy(ctrl, own_ctrl, ctrl_bytes);
        ring(&line->request, i, futex);
        await(&line->reply, i, futex);
        if (memcmp(state, &i, 4)) return 3;
        int64_t u = now(CLOCK_MONOTONIC);
        if (u > end && taken > 20) {
            atomic_store(&line->stop, 1);
            ring(&line->request, i + 1, futex);
            break;
        }
        if (t < warm) continue;
        samples[taken++] = u - t - atomic_load_explicit(&line->worked, memory_order_relaxed);
        in_steps += u - t;
        if (work) on_cpu += now(CLOCK_THREAD_CPUTIME_ID) - cpu;
    }
    kill(worker, SIGKILL);
    waitpid(worker, 0, 0);
    fwrite(&in_steps, sizeof(int64_t), 1, stdout);
    fwrite(&on_cpu, sizeof(int64_t), 1, stdout);
    fwrite(samples, sizeof(int64_t), taken, stdout);
    return 0;
}
