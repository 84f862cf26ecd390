/* What the fake driver and its libraries see, as data: the calls of every rank in the order in which its host makes
 * them, with what each does on the device. A virtual clock walks it (python_plugin/sluice/planning/device_clock.py).
 *
 * Dry: work that only fills rows is recorded and not done, so that a layer of any size takes milliseconds. Kernels that
 * order routes run, since the host reads what they count; so do copies and messages that are too small to be rows. All
 * other kernels, GEMMs and messages do not. Memory is reserved without pages: what nothing touches takes none. */
#ifndef SLUICE_BACKEND_DEVICE_CUDA_FAKE_FAKE_RECORD_H_
#define SLUICE_BACKEND_DEVICE_CUDA_FAKE_FAKE_RECORD_H_

#include <stdint.h>
#include <stdio.h>

typedef enum sluice_fake_event_kind_e {
  SLUICE_FAKE_LAUNCH = 0,
  SLUICE_FAKE_COPY,       /* name: where to */
  SLUICE_FAKE_FILL,       /* the driver's memset */
  SLUICE_FAKE_GEMM,       /* name: the entry; parts: m, n, k */
  SLUICE_FAKE_MESSAGES,   /* one group of NCCL's; parts: peer, bytes sent, bytes received */
  SLUICE_FAKE_RECORD,     /* an event is recorded */
  SLUICE_FAKE_WAIT,       /* a stream waits for one */
  SLUICE_FAKE_HOST_WAIT,  /* the host sees that one has passed; name: how */
  SLUICE_FAKE_HOST_DRAIN, /* the host waits for a stream */
  SLUICE_FAKE_HOST_CALL,  /* what a settled pass should not call: memory, streams, events that are made; name */
  SLUICE_FAKE_MARK        /* what the host says of itself; name */
} sluice_fake_event_kind_t;

/* Unused members are 0. A rank is the device whose stream or context it is. */
typedef struct sluice_fake_event_s {
  sluice_fake_event_kind_t kind;
  int32_t rank, stream;
  const char* name;       /* of static storage */
  int64_t ticket;         /* number of a record of an event */
  int64_t units, length;  /* of a kernel: what warps take one at a time, and elements of one (bytes, where rows move) */
  uint64_t reads, writes; /* bytes */
  int64_t comm, number;   /* of a group: its communicator, and its place among that one's */
  int64_t first, count;   /* of its parts */
} sluice_fake_event_t;

typedef struct sluice_fake_part_s {
  int64_t of[3];
} sluice_fake_part_t;

/* Until the next reset. */
void sluice_fake_cuda_make_dry(void);
/* Forgets what was recorded; from now on calls are, or are not. */
void sluice_fake_cuda_record(int on);
void sluice_fake_cuda_mark(int32_t rank, const char* name);       /* of static storage */
int64_t sluice_fake_cuda_recorded(sluice_fake_event_kind_t kind); /* how many */
/* JSON: a list for each event, [kind, rank, ...], the list of a rank's in the order of its calls. */
void sluice_fake_cuda_write_record(FILE* out);

/* For the fakes, all locked. note_event: its number, -1 while nothing is recorded; parts are copied. */
int64_t sluice_fake_note_event(const sluice_fake_event_t* event, const sluice_fake_part_t* parts);
/* Bytes that are noted until the next call belong to that event; -1: to none. */
void sluice_fake_count_bytes_for(int64_t event);
void sluice_fake_count_bytes(uint64_t bytes, int is_write);
int sluice_fake_is_dry(void);
int sluice_fake_is_recorded(void);
int sluice_fake_is_carried(uint64_t bytes); /* whether a copy or message of that size is done */
int sluice_fake_is_executed(const char* kernel);
void sluice_fake_forget_record(void); /* of a reset */

/* Whether the kernel is known. (kernel_work.c) */
int sluice_fake_kernel_work(const char* name, const void* args, int64_t* out_units, int64_t* out_length);

#endif /* SLUICE_BACKEND_DEVICE_CUDA_FAKE_FAKE_RECORD_H_ */
