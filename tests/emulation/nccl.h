/* A stand-in for NCCL 2.14 and newer: the parts that this project uses, between processes of one machine
 * that each have an emulated GPU (cuda_runtime.h). They meet in a file (meeting.h), whose path is in the id.
 *
 * - A collective is two operations of its stream: one that brings what is sent, and one that fetches what
 *   is received, when all have brought theirs. Between them other streams run in their adversarial order.
 * - A communicator that does not block answers InProgress, and enqueues only after it has been asked a few
 *   times (ncclCommGetAsyncError), or at the end of a group. The members of a group run last to first.
 * - A rank that never comes leaves the others waiting: queries of events and streams go on to be answered
 *   with NotReady, and ncclCommAbort drops what is under way; whatever waits dies in the end.
 * - A communicator that is destroyed while a collective of it is queued is a mistake, and so is a second
 *   call before the first is settled.
 */
#ifndef NCCL_H_
#define NCCL_H_

#include <cuda_runtime.h>

#define NCCL_VERSION(x, y, z) ((x)*10000 + (y)*100 + (z))
#define NCCL_VERSION_CODE     NCCL_VERSION(2, 14, 3)

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ncclComm *ncclComm_t;

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct ncclUniqueId {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum ncclResult_t {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclNumResults = 8
} ncclResult_t;

typedef struct ncclConfig_t {
    size_t size;
    unsigned magic, version;
    int blocking;
} ncclConfig_t;

#define NCCL_CONFIG_INITIALIZER                                                                    \
    { sizeof(ncclConfig_t), 0xcafebeef, NCCL_VERSION_CODE, 1 }

typedef enum ncclRedOp_t { ncclSum = 0 } ncclRedOp_t;

typedef enum ncclDataType_t {
    ncclInt8 = 0,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclBfloat16 = 9
} ncclDataType_t;

ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error);
const char *ncclGetErrorString(ncclResult_t result);

ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);
ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBroadcast(const void *send, void *receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
