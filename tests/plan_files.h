/*  plan_files.h - files of ms_plan_save after something in them was changed: the checksum, and the hash
    of the programs to which they lead, are made right again, so that what comes after these checks is
    tested too. Include it after private.h. */
#ifndef PLAN_FILES_H
#define PLAN_FILES_H

#include <stdio.h>
#include <string.h>

/* Where the hash of a program may be, at the earliest. */
enum { PLAN_FILES_HEAD = 60 };

/* Makes the checksum right. */
static inline void plan_file_mend(uint8_t *data, size_t bytes) {
    uint64_t sum = msi_hash_bytes(0, data, bytes - MSI_PLAN_SUM_BYTES) | (uint64_t)1 << 63;
    for (int k = 0; k < MSI_PLAN_SUM_BYTES; ++k, sum >>= 7) {
        data[bytes - MSI_PLAN_SUM_BYTES + (size_t)k] =
            (uint8_t)((sum & 127) | (k + 1 < MSI_PLAN_SUM_BYTES ? 128u : 0u));
    }
}

/* The bytes of a number in a file. */
static inline size_t plan_file_encode(uint64_t number, uint8_t *bytes) {
    size_t count = 0;
    for (; number > 127; number >>= 7) {
        bytes[count++] = (uint8_t)((number & 127) | 128);
    }
    bytes[count] = (uint8_t)number;
    return count + 1;
}

/* Gives a file that was refused for its programs alone the hash of those to which it leads. There are 16
   bytes of room behind it. */
static inline bool plan_file_mend_programs(uint8_t *data, size_t *bytes, const char *error) {
    unsigned long long there, here;
    uint8_t old[16], now[16];
    const char *numbers = strstr(error, "another program") ? strrchr(error, '(') : NULL;
    if (!numbers || sscanf(numbers, "(%llx, and here %llx)", &there, &here) != 2) {
        return false;
    }
    const size_t before = plan_file_encode(there, old), after = plan_file_encode(here, now);
    for (size_t at = PLAN_FILES_HEAD; at + before < *bytes; ++at) {
        if (memcmp(data + at, old, before) == 0) {
            memmove(data + at + after, data + at + before, *bytes - at - before);
            memcpy(data + at, now, after);
            *bytes = *bytes + after - before;
            plan_file_mend(data, *bytes);
            return true;
        }
    }
    return false;
}

#endif // PLAN_FILES_H
