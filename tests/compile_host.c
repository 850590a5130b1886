// What the platform tells, without cmocka, so that it can be checked on any machine: its memory, by the
// call of the system too, and a clock that goes on. Status 0: all is well.
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"

int main(void) {
    ms_hardware hardware;
    msi_host asked;
    const ms_backend cpu = ms_backend_cpu();
    memset(&hardware, 0, sizeof hardware);
    cpu.hardware(cpu.user, &hardware);
    asked.root = "";
    asked.total_bytes = asked.free_bytes = UINT64_MAX;
    msi_ask_system(&asked);
    const double start_us = msi_now_us();
    double now_us = start_us, least_us = 1e9;
    for (int changes = 0; changes < 100;) {
        const double next_us = msi_now_us();
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
    return known && told && least_us < 100.0 ? 0 : 1;
}
