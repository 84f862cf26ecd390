// SPDX-License-Identifier: Apache-2.0
/* Records the calls to the fake driver and its libraries: those of every rank in the order of its host's calls, with
 * their work on the device. A virtual clock walks the record (python_plugin/sluice/planning/device_clock.py).
 *
 * Dry: work that only fills rows is recorded and not executed, so that a layer of any size takes milliseconds. Kernels
 * that order routes run, since the host reads their counts; so do copies and messages that are too small to be rows.
 * All other kernels, GEMMs and messages do not. Memory is reserved without pages, so untouched memory takes none. */
#pragma once

#include <stdint.h>
#include <stdio.h>

typedef enum sluice_fake_event_kind_e {
  SLUICE_FAKE_LAUNCH = 0,
  SLUICE_FAKE_COPY,       /* name: direction */
  SLUICE_FAKE_FILL,       /* the driver's memset */
  SLUICE_FAKE_GEMM,       /* name: the entry; parts: m, n, k; number: the SMs that the library was told, 0: all */
  SLUICE_FAKE_MESSAGES,   /* one group of NCCL's; units: its sends and receives; parts: peer, bytes sent, received */
  SLUICE_FAKE_RECORD,     /* an event is recorded */
  SLUICE_FAKE_WAIT,       /* a stream waits for one */
  SLUICE_FAKE_HOST_WAIT,  /* the host sees that an event has passed; name: the call */
  SLUICE_FAKE_HOST_DRAIN, /* the host waits for a stream */
  SLUICE_FAKE_HOST_CALL, /* calls that a steady-state pass should not make: creation of memory, streams, events; name */
  SLUICE_FAKE_HEADER,    /* the hosts of all ranks exchange headers, each its n-th; no call of the driver */
  SLUICE_FAKE_PRIORITY,  /* of a stream that is not the default, before all other events; number: below 0 */
  SLUICE_FAKE_MARK       /* a mark set by the host; name */
} sluice_fake_event_kind_t;

/* Unused members are 0. A rank is the device of the stream or context. */
typedef struct sluice_fake_event_s {
  sluice_fake_event_kind_t kind;
  int32_t rank, stream;
  const char* name; /* of static storage */
  int64_t ticket;   /* number of a record of an event */
  /* of a kernel: units (a warp takes one at a time), and elements per unit (bytes for moved rows) */
  int64_t units, length;
  uint64_t reads, writes; /* bytes */
  int64_t comm, number;   /* of a group: its communicator, and its number within it */
  int64_t first, count;   /* of its parts */
} sluice_fake_event_t;

typedef struct sluice_fake_part_s {
  int64_t of[3];
} sluice_fake_part_t;

/* Makes all work dry until the next reset. */
void sluice_fake_cuda_make_dry(void);
/* Clears the record, and turns recording on or off. */
void sluice_fake_cuda_record(int on);
void sluice_fake_cuda_mark(int32_t rank, const char* name); /* of static storage */
void sluice_fake_cuda_header(int32_t rank);
int64_t sluice_fake_cuda_recorded(sluice_fake_event_kind_t kind); /* number of recorded events of a kind */
/* JSON: a list for each event, [kind, rank, ...]; the events of a rank in the order of its calls. */
void sluice_fake_cuda_write_record(FILE* out);

/* For the fakes; all require the lock. note_event returns the event's number, -1 while recording is off; parts are
 * copied. */
int64_t sluice_fake_note_event(const sluice_fake_event_t* event, const sluice_fake_part_t* parts);
/* Bytes that are counted until the next call belong to that event; -1: to none. */
void sluice_fake_count_bytes_for(int64_t event);
void sluice_fake_count_bytes(uint64_t bytes, int is_write);
void sluice_fake_note_priorities(void); /* of all streams */
int sluice_fake_is_dry(void);
int sluice_fake_is_recorded(void);
int sluice_fake_is_carried(uint64_t bytes); /* whether a message of that size is executed */
int sluice_fake_is_copied(uint64_t bytes);  /* whether a copy or fill of that size is */
int sluice_fake_is_executed(const char* kernel);
void sluice_fake_forget_record(void); /* of a reset */

/* Returns whether the kernel is known. (kernel_work.c) */
int sluice_fake_kernel_work(const char* name, const void* args, int64_t* out_units, int64_t* out_length);
