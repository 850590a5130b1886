/* Collectives between processes with an emulated GPU each. See nccl.h. */
#include "private.h"

#include "internal.h"
#include "meeting.h"
#include "nccl.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <vector>

namespace {

/* A collective that a program has called. */
struct called {
    ncclComm_t comm;
    uint64_t number; /* among those of its communicator, from 1; 0: it is in a graph */
    meeting_call call;
    const void *send;
    void *receive;
    cudaStream_t stream;
};

int error_of_all; /* emulation_nccl_error */
int group_depth;
std::vector<called> grouped;
std::vector<ncclComm_t> comms; /* never freed: operations may hold them */

} // namespace

struct ncclComm {
    meeting *at; /* NULL: it is gone */
    uint32_t rank, count;
    bool is_blocking, is_aborted;
    int questions;            /* that are answered with InProgress */
    std::vector<called> held; /* is enqueued then */
    uint64_t calls, present, fetched;
    cudaStream_t stream; /* of the latest */
    bool is_ending;      /* until all has been fetched */
    uint64_t random;
    char path[NCCL_UNIQUE_ID_BYTES];
    ncclResult_t error;
};

namespace {

struct meeting_held {
    explicit meeting_held(meeting *with) : m(with) {
        ::meeting_lock(m);
    }
    ~meeting_held() {
        pthread_mutex_unlock(&m->lock);
    }
    meeting *const m;
};

void forget() {
    error_of_all = group_depth = 0;
    grouped.clear();
    for (size_t i = 0; i < comms.size(); i++) {
        comms[i]->is_aborted = true;
    }
}

const bool is_used = (nccl_reset = forget, true);

/* ---- operations ---- */

bool is_pointless(ncclComm_t comm) {
    return comm->is_aborted || emulation_is_broken();
}

bool can_bring(void *, void *arguments) {
    const called *const c = static_cast<const called *>(arguments);
    if (is_pointless(c->comm)) {
        return true;
    }
    const meeting_held lock(c->comm->at);
    return meeting_is_free(lock.m) && !lock.m->has_come[c->comm->rank];
}

void bring(void *, void *arguments) {
    const called *const c = static_cast<const called *>(arguments);
    if (!emulation_works() || c->comm->is_aborted) {
        return;
    }
    const meeting_held lock(c->comm->at);
    if (meeting_arrive(lock.m, c->comm->rank, &c->call, memory_open(c->send))) {
        emulation_die("NCCL: a collective with more than %d bytes, or of a root that is not there",
                      MEETING_STAGE_BYTES);
    }
    c->comm->present = c->number;
}

bool can_fetch(void *, void *arguments) {
    const called *const c = static_cast<const called *>(arguments);
    if (is_pointless(c->comm)) {
        return true;
    }
    const meeting_held lock(c->comm->at);
    return (!c->number || c->comm->present == c->number) && meeting_is_ready(lock.m, c->comm->rank);
}

void fetch(void *, void *arguments) {
    const called *const c = static_cast<const called *>(arguments);
    if (!emulation_works() || c->comm->is_aborted) {
        return;
    }
    const meeting_held lock(c->comm->at);
    if (meeting_take(lock.m, c->comm->rank, memory_open(c->send), memory_open(c->receive))) {
        emulation_die("NCCL: %s", lock.m->difference);
    }
    c->comm->fetched += c->number != 0;
}

ncclResult_t enqueue(const called &c) {
    const size_t bytes = meeting_sent(c.comm->at, &c.call);
    const uint64_t cost = 10000 + bytes / 10;
    const cudaError_t error =
        emulation_enqueue_when(c.stream, can_bring, bring, &c, sizeof(c), cost);
    return error || emulation_enqueue_when(c.stream, can_fetch, fetch, &c, sizeof(c), 0)
               ? ncclUnhandledCudaError
               : ncclSuccess;
}

/* Now, or after a few questions. */
ncclResult_t begin(ncclComm_t comm, const std::vector<called> &calls) {
    comm->held = calls;
    comm->random = comm->random * UINT64_C(6364136223846793005) + 1442695040888963407u;
    comm->questions = comm->is_blocking ? 0 : static_cast<int>(comm->random >> 60 & 3);
    if (comm->questions) {
        return ncclInProgress;
    }
    ncclResult_t result = ncclSuccess;
    for (size_t i = 0; i < comm->held.size() && result == ncclSuccess; i++) {
        result = enqueue(comm->held[i]);
    }
    comm->held.clear();
    return result;
}

bool is_ready(ncclComm_t comm) {
    const meeting_held lock(comm->at);
    return lock.m->attached == comm->count;
}

/* ---- calls ---- */

bool is_type(ncclDataType_t type, bool adds, ms_dtype *dtype) {
    *dtype = type == ncclFloat32    ? MS_DTYPE_F32
             : type == ncclFloat16  ? MS_DTYPE_F16
             : type == ncclBfloat16 ? MS_DTYPE_BF16
                                    : MS_DTYPE_I8;
    return type == ncclFloat32 || type == ncclFloat16 || type == ncclBfloat16 ||
           (type == ncclInt8 && !adds);
}

ncclResult_t call(const char *name, tc_kind kind, const void *send, void *receive, size_t count,
                  ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    const emulation_lock lock;
    called c;
    memset(static_cast<void *>(&c), 0, sizeof(c));
    if (emulation_fails(name) || emulation_is_broken()) {
        return ncclUnhandledCudaError;
    }
    if (!comm || !comm->at || comm->is_aborted || comm->questions || !is_ready(comm)) {
        return ncclInvalidUsage;
    }
    c.comm = comm;
    c.call.kind = kind;
    c.call.count = count;
    c.call.root = static_cast<uint32_t>(root);
    c.send = send;
    c.receive = receive;
    c.stream = stream;
    if (!is_type(type, meeting_adds(kind), &c.call.dtype) || c.call.root >= comm->count ||
        !emulation_is_stream(stream) || !emulation_holds(send, meeting_sent(comm->at, &c.call)) ||
        !emulation_holds(receive, meeting_received(comm->at, &c.call))) {
        return ncclInvalidArgument;
    }
    if (count == 0) {
        return ncclSuccess;
    }
    c.number = emulation_is_captured(stream) ? 0 : ++comm->calls;
    comm->stream = stream;
    if (group_depth) {
        grouped.push_back(c);
        return comm->is_blocking || (comm->calls & 1) ? ncclSuccess : ncclInProgress;
    }
    return begin(comm, std::vector<called>(1, c));
}

/* The file, made by the rank that comes first; or NULL. */
meeting *map(const char *path) {
    const size_t bytes = meeting_bytes(MEETING_MOST_RANKS);
    const int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || flock(file, LOCK_EX) != 0) {
        return nullptr;
    }
    const bool is_new = lseek(file, 0, SEEK_END) == 0;
    void *const at = is_new && ftruncate(file, static_cast<off_t>(bytes)) != 0
                         ? MAP_FAILED
                         : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (is_new && at != MAP_FAILED) {
        meeting_open(static_cast<meeting *>(at), 0);
    }
    flock(file, LOCK_UN); /* the mapping would keep it */
    close(file);
    return at == MAP_FAILED ? nullptr : static_cast<meeting *>(at);
}

/* Its operations that are left do nothing. */
void leave(ncclComm_t comm) {
    comm->is_aborted = true;
    comm->held.clear();
    comm->questions = 0;
}

} // namespace

void emulation_nccl_error(int error) {
    const emulation_lock lock;
    error_of_all = error;
}

const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return result < ncclNumResults ? texts[result] : "unknown result code";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    const emulation_lock lock;
    if (emulation_fails("ncclGetUniqueId")) {
        return ncclSystemError;
    }
    memset(id, 0, sizeof(*id));
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    snprintf(id->internal, sizeof(id->internal), "/tmp/emulated-nccl-%ld-%ld-%ld",
             static_cast<long>(getpid()), static_cast<long>(now.tv_sec), now.tv_nsec);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    const emulation_lock lock;
    *made = nullptr;
    if (emulation_fails("ncclCommInitRankConfig")) {
        return ncclSystemError;
    }
    meeting *const at = map(id.internal);
    if (!at || rank < 0 || rank >= ranks || ranks > MEETING_MOST_RANKS ||
        config->magic != 0xcafebeef) {
        return ncclInvalidArgument;
    }
    ncclComm_t const comm = new ncclComm();
    comm->at = at;
    comm->rank = static_cast<uint32_t>(rank);
    comm->count = static_cast<uint32_t>(ranks);
    comm->is_blocking = config->blocking != 0;
    memcpy(comm->path, id.internal, sizeof(comm->path));
    comms.push_back(comm);
    *made = comm;
    {
        const meeting_held at_door(at);
        at->count = at->attached ? at->count : comm->count;
        if (at->count != comm->count || at->attached == at->count) {
            return comm->error = ncclInvalidUsage;
        }
        at->attached++;
        if (at->attached == at->count) {
            unlink(comm->path);
        }
    }
    if (!comm->is_blocking) {
        return ncclInProgress;
    }
    while (!is_ready(comm)) {
        usleep(50);
    }
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    const emulation_lock lock;
    if (!comm || !comm->at || comm->is_aborted) {
        return ncclInvalidArgument;
    }
    if (error_of_all) {
        comm->error = static_cast<ncclResult_t>(error_of_all);
    }
    if (!comm->error && comm->questions && --comm->questions == 0) {
        for (size_t i = 0; i < comm->held.size() && comm->error == ncclSuccess; i++) {
            comm->error = enqueue(comm->held[i]);
        }
        comm->held.clear();
    }
    const bool is_under_way = comm->is_ending && comm->fetched != comm->calls;
    if (is_under_way && emulation_is_stream(comm->stream)) {
        emulation_go_on(comm->stream);
    }
    *error = comm->error                                          ? comm->error
             : is_under_way || comm->questions || !is_ready(comm) ? ncclInProgress
                                                                  : ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    const emulation_lock lock;
    if (!comm || comm->is_aborted || comm->questions) {
        return ncclInvalidUsage;
    }
    if (comm->is_blocking) {
        emulation_die("NCCL: the end of a communicator that blocks is not emulated");
    }
    comm->is_ending = true;
    return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    const emulation_lock lock;
    if (!comm || comm->is_aborted) {
        return ncclInvalidUsage;
    }
    if (comm->fetched != comm->calls) {
        emulation_die("NCCL: a communicator is destroyed while a collective of it is queued");
    }
    leave(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    const emulation_lock lock;
    if (!comm || comm->is_aborted) {
        return ncclInvalidUsage;
    }
    unlink(comm->path);
    leave(comm);
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void) {
    const emulation_lock lock;
    group_depth++;
    return ncclSuccess;
}

/* All of one communicator. Last to first, alike in all ranks. */
ncclResult_t ncclGroupEnd(void) {
    const emulation_lock lock;
    if (group_depth == 0) {
        return ncclInvalidUsage;
    }
    if (--group_depth || grouped.empty()) {
        return ncclSuccess;
    }
    const std::vector<called> reversed(grouped.rbegin(), grouped.rend());
    grouped.clear();
    for (size_t i = 0; i < reversed.size(); i++) {
        if (reversed[i].comm != reversed[0].comm) {
            emulation_die("NCCL: a group of two communicators is not emulated");
        }
    }
    return begin(reversed[0].comm, reversed);
}

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
    return call("ncclAllReduce", TC_ALL_REDUCE, send, receive, count, type, 0, comm, stream);
}

ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t, ncclComm_t comm, cudaStream_t stream) {
    return call("ncclReduceScatter", TC_REDUCE_SCATTER, send, receive, count, type, 0, comm,
                stream);
}

ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    return call("ncclAllGather", TC_ALL_GATHER, send, receive, count, type, 0, comm, stream);
}

ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
    return call("ncclBroadcast", TC_BROADCAST, send, receive, count, type, root, comm, stream);
}
