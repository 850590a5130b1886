// What the platform tells, without cmocka, so that it can be checked on any machine: its memory, by the
// call of the system too, and a clock that goes on; and its threads. Status 0: all is well.
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"

enum { CELLS = 600, CELL_BYTES = 4096 }; // more cells than a stream has room for

/* Copies cells in, and out again as soon as each is there, by two threads; the host then waits. */
static int copies_keep_their_order(const ms_backend *cpu, void *state, uint8_t *memory) {
    uint8_t *device = memory + CELLS * CELL_BYTES, *back = memory + 2 * CELLS * CELL_BYTES;
    int error = 0;
    for (int i = 0; i < CELLS; ++i) {
        const int at = i * CELL_BYTES;
        memset(memory + at, i % 255 + 1, CELL_BYTES);
        error |= cpu->copy_in(state, device + at, memory + at, CELL_BYTES);
        error |= cpu->record(state, MS_STREAM_TO_DEVICE, 0);
        error |= cpu->wait(state, MS_STREAM_TO_HOST, 0);
        error |= cpu->copy_out(state, back + at, device + at, CELL_BYTES);
    }
    error |= cpu->record(state, MS_STREAM_TO_HOST, 1);
    error |= cpu->wait(state, MS_STREAM_COMPUTE, 1);
    return error != 0 || memcmp(memory, back, CELLS * CELL_BYTES) != 0;
}

static int copy_streams(const ms_backend *cpu) {
    static uint8_t memory[3 * CELLS * CELL_BYTES];
    const ms_allocator host = {NULL, NULL, NULL, NULL};
    ms_open_args args;
    void *state;
    memset(&args, 0, sizeof args);
    args.host = &host;
    args.event_count = 2;
    if (!cpu->has_copy_streams || cpu->open(cpu->user, &args, &state) != 0) {
        return 1;
    }
    int status = copies_keep_their_order(cpu, state, memory);
    for (int i = 0; i < MSI_LINK_COUNT; i++) {
        status |= !((msi_cpu *)state)->streams[i].is_running;
    }
    cpu->close(state);
    return status;
}

int main(void) {
    ms_hardware hardware;
    msi_host asked;
    const ms_backend cpu = ms_backend_cpu();
    memset(&hardware, 0, sizeof hardware);
    cpu.hardware(cpu.user, &hardware);
    asked.root = "";
    asked.total_bytes = asked.free_bytes = UINT64_MAX;
    msi_ask_system(&asked);
    const double start_us = msi_platform_us();
    double now_us = start_us, least_us = 1e9;
    for (int changes = 0; changes < 100;) {
        const double next_us = msi_platform_us();
        if (next_us < now_us) {
            return 1;
        }
        least_us = next_us > now_us && next_us - now_us < least_us ? next_us - now_us : least_us;
        changes += next_us > now_us;
        now_us = next_us;
    }
    printf("%s: %llu bytes, %llu free; asked: %llu, %llu free; the clock steps by %g us\n",
           hardware.name, (unsigned long long)hardware.host_total_bytes,
           (unsigned long long)hardware.host_free_bytes, (unsigned long long)asked.total_bytes,
           (unsigned long long)asked.free_bytes, least_us);
    const uint64_t mebi = (uint64_t)1 << 20;
    const bool known = hardware.host_total_bytes > mebi && hardware.host_free_bytes >= 4096;
    const bool told = asked.total_bytes > mebi && asked.total_bytes < UINT64_MAX &&
                      asked.free_bytes <= asked.total_bytes;
    return known && told && least_us < 100.0 && copy_streams(&cpu) == 0 ? 0 : 1;
}
