// Round trips between two processes over shared memory and two eventfds: the floor of any ring with doorbells.
//
//     pingpong BYTES
//
// For each uint64 N on standard input it makes N round trips and writes N uint64 nanoseconds, one for each, and then
// the CPU time of both processes. A round trip: copy BYTES in, ring; the other side copies them to where the answer
// goes and rings back; copy them out. That is as many copies as a Forward has.
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

static uint64_t nanoseconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void transfer(ssize_t done, size_t wanted) {
    if (done != (ssize_t)wanted) {
        exit(0); // the other side is gone
    }
}

static void ring(int doorbell) {
    uint64_t one = 1;
    transfer(write(doorbell, &one, sizeof one), sizeof one);
}

static void await(int doorbell) {
    uint64_t count;
    transfer(read(doorbell, &count, sizeof count), sizeof count);
}

static void answer(char *request, char *response, size_t bytes, const int doorbells[2]) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        await(doorbells[0]);
        memcpy(response, request, bytes);
        ring(doorbells[1]);
    }
}

int main(int argc, char **argv) {
    size_t bytes = argc == 2 ? strtoull(argv[1], NULL, 10) : 0;
    char *shared = mmap(NULL, 2 * bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    char *mine = malloc(2 * bytes);
    const int doorbells[2] = {eventfd(0, EFD_CLOEXEC), eventfd(0, EFD_CLOEXEC)};
    if (shared == MAP_FAILED || mine == NULL || doorbells[0] < 0 || doorbells[1] < 0) {
        return 1;
    }
    for (size_t i = 0; i < 2 * bytes; i++) {
        mine[i] = (char)random();
    }
    pid_t other = fork();
    if (other == 0) {
        answer(shared, shared + bytes, bytes, doorbells);
    }
    clockid_t other_clock;
    if (other < 0 || clock_getcpuclockid(other, &other_clock) != 0) {
        return 1;
    }
    uint64_t calls;
    while (read(STDIN_FILENO, &calls, sizeof calls) == sizeof calls) {
        size_t size = (calls + 1) * sizeof(uint64_t);
        uint64_t *took = malloc(size);
        uint64_t cpu = nanoseconds(CLOCK_PROCESS_CPUTIME_ID) + nanoseconds(other_clock);
        for (uint64_t call = 0; call < calls; call++) {
            uint64_t start = nanoseconds(CLOCK_MONOTONIC);
            memcpy(shared, mine, bytes);
            ring(doorbells[0]);
            await(doorbells[1]);
            memcpy(mine + bytes, shared + bytes, bytes);
            took[call] = nanoseconds(CLOCK_MONOTONIC) - start;
        }
        took[calls] = nanoseconds(CLOCK_PROCESS_CPUTIME_ID) + nanoseconds(other_clock) - cpu;
        transfer(write(STDOUT_FILENO, took, size), size);
        free(took);
    }
    kill(other, SIGKILL);
    return 0;
}
