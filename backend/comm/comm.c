#include "backend/comm/all_reduce.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/base/log.h"
#include "backend/base/math.h"
#include "backend/base/structs.h"

#define SECOND_NS           UINT64_C(1000000000)
#define DEFAULT_TIMEOUT_NS  (30 * 60 * SECOND_NS)
#define DEFAULT_WARN_NS     (30 * SECOND_NS)
#define NOTE_AFTER_NS       SECOND_NS
#define SLICE_NS            (SECOND_NS / 5) /* a transport without an abort of its own still ends within this */
#define MAX_LAGGARDS_LISTED 8

/* ---- config, life ---------------------------------------------------------------------------------------------- */

void sluice_comm_config_init(sluice_comm_config_t* out_config, size_t struct_size) {
  if (out_config == NULL || struct_size < sizeof(size_t)) return;
  memset(out_config, 0, struct_size);
  out_config->struct_size = struct_size;
  if (struct_size >= offsetof(sluice_comm_config_t, timeout_ns)) out_config->world_size = 1;
}

sluice_status_t sluice_comm_config_read(const sluice_comm_config_t* config, sluice_comm_config_t* out_config) {
  sluice_comm_config_t read;
  sluice_comm_config_init(&read, sizeof read);
  SLUICE_TRY(sluice_struct_copy(&read, sizeof read, config, offsetof(sluice_comm_config_t, timeout_ns),
                                "sluice_comm_config_t"));
  if (read.next != NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_comm_config_t.next: no optional block is known here (got type %d); pass NULL",
                       read.next->type);
  }
  if (read.world_size < 1 || read.rank < 0 || read.rank >= read.world_size) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_comm_config_t: rank %d of world_size %d; world_size must be at least 1 and rank in "
                       "[0, world_size)",
                       read.rank, read.world_size);
  }
  *out_config = read;
  return SLUICE_OK;
}

void sluice_comm_init_base(sluice_comm_t* comm, const sluice_comm_vtable_t* vtable, const char* name,
                           const sluice_comm_config_t* config) {
  comm->vtable = vtable;
  atomic_init(&comm->references, 1);
  comm->name = name;
  comm->rank = config->rank;
  comm->world_size = config->world_size;
  comm->timeout_ns = config->timeout_ns != 0 ? config->timeout_ns : DEFAULT_TIMEOUT_NS;
  comm->warn_ns = config->warn_ns != 0 ? config->warn_ns : DEFAULT_WARN_NS;
  atomic_init(&comm->broken, SLUICE_OK);
  comm->call_number = 0;
  comm->num_started = 0;
  comm->pid = getpid();
}

/* In the child of a fork the other threads, their locks and the connections are not ours to touch. */
static int is_inherited(const sluice_comm_t* comm) { return comm->pid != getpid(); }

sluice_status_t sluice_comm_fail_third(const sluice_comm_t* comm) {
  return SLUICE_FAIL_PEER(SLUICE_E_INTERNAL, comm->rank, -1, "rank %d started a third exchange, two are in flight",
                          comm->rank);
}

void sluice_comm_retain(sluice_comm_t* comm) { atomic_fetch_add_explicit(&comm->references, 1, memory_order_relaxed); }

void sluice_comm_release(sluice_comm_t* comm) {
  if (comm == NULL || is_inherited(comm)) return;
  if (atomic_fetch_sub_explicit(&comm->references, 1, memory_order_acq_rel) == 1) comm->vtable->destroy(comm);
}

int32_t sluice_comm_rank(const sluice_comm_t* comm) { return comm != NULL ? comm->rank : -1; }
int32_t sluice_comm_world_size(const sluice_comm_t* comm) { return comm != NULL ? comm->world_size : 0; }
const char* sluice_comm_name(const sluice_comm_t* comm) { return comm != NULL ? comm->name : ""; }
void sluice_comm_destroy(sluice_comm_t* comm) { sluice_comm_release(comm); }

/* The first failure stays: it is the one to report. */
static void mark_broken(sluice_comm_t* comm, sluice_status_t status) {
  int32_t expected = SLUICE_OK;
  atomic_compare_exchange_strong(&comm->broken, &expected, status);
}

void sluice_comm_abort(sluice_comm_t* comm) {
  if (comm == NULL || is_inherited(comm)) return;
  mark_broken(comm, SLUICE_E_ABORTED);
  if (comm->vtable->abort != NULL) comm->vtable->abort(comm);
}

sluice_status_t sluice_comm_fail_and_tell(sluice_comm_t* comm, sluice_status_t status) {
  mark_broken(comm, status);
  if (comm->vtable->abort != NULL) comm->vtable->abort(comm);
  return status;
}

static sluice_status_t check_usable(sluice_comm_t* comm) {
  if (is_inherited(comm)) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "rank %d: this %s communicator was made before fork and cannot be used in the child; make a new "
                       "one there",
                       comm->rank, comm->name);
  }
  sluice_status_t broken = atomic_load(&comm->broken);
  if (broken == SLUICE_OK) return SLUICE_OK;
  return SLUICE_FAIL_PEER(
      broken, comm->rank, -1,
      "rank %d: this %s communicator is no longer usable since an earlier %s; destroy it and make a "
      "new one on all ranks",
      comm->rank, comm->name, broken == SLUICE_E_ABORTED ? "abort" : sluice_status_name(broken));
}

/* ---- exchange -------------------------------------------------------------------------------------------------- */

sluice_status_t sluice_comm_exchange_start(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                           sluice_comm_request_t** out_request) {
  *out_request = NULL;
  SLUICE_TRY(check_usable(comm));
  sluice_status_t status = comm->vtable->exchange_start(comm, exchange, out_request);
  if (status != SLUICE_OK) return sluice_comm_fail_and_tell(comm, status);
  ++comm->num_started;
  return SLUICE_OK;
}

sluice_status_t sluice_comm_exchange_enqueue(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                             sluice_stream_t stream) {
  SLUICE_TRY(check_usable(comm));
  sluice_status_t status = comm->vtable->exchange_enqueue(comm, exchange, stream);
  return status == SLUICE_OK ? SLUICE_OK : sluice_comm_fail_and_tell(comm, status);
}

static double seconds(uint64_t ns) { return (double)ns / 1e9; }

static void note_key(int32_t rank, char* out, size_t out_bytes) { snprintf(out, out_bytes, "sluice/%d", rank); }

static void publish_note(sluice_comm_t* comm, const char* phase) {
  char key[32];
  char value[160];
  note_key(comm->rank, key, sizeof key);
  snprintf(value, sizeof value, "call=%llu started=%llu phase=%s", (unsigned long long)comm->call_number,
           (unsigned long long)comm->num_started, phase);
  comm->vtable->publish(comm, key, value);
}

/* What a rank's note says: how far it has come. A rank that never waited long has none. */
typedef struct note_s {
  int known;
  unsigned long long call_number;
  unsigned long long num_started;
  char text[160];
} note_t;

/* Returns 0 when the store is gone. */
static int lookup_note(sluice_comm_t* comm, int32_t rank, note_t* out_note) {
  char key[32];
  memset(out_note, 0, sizeof *out_note);
  note_key(rank, key, sizeof key);
  int32_t bytes = comm->vtable->lookup(comm, key, out_note->text, (int32_t)sizeof out_note->text - 1);
  if (bytes < 0) return 0;
  out_note->text[sluice_min_u64((uint64_t)bytes, sizeof out_note->text - 1)] = '\0';
  out_note->known =
      sscanf(out_note->text, "call=%llu started=%llu", &out_note->call_number, &out_note->num_started) == 2;
  return 1;
}

/* Collects the ranks that hold the others up: those without a note of this call; when all have one, those that started
 * the fewest exchanges in it, if fewer than this rank. Appends a sentence to `text` and returns the rank to blame:
 * `missing` (whose message is missing) if it is among them or if nobody else is. */
static int32_t find_laggards(sluice_comm_t* comm, int32_t missing, char* text, size_t text_bytes) {
  text[0] = '\0';
  if (comm->vtable->lookup == NULL || comm->vtable->publish == NULL) return missing;
  note_t note;
  unsigned long long fewest = comm->num_started;
  int any_without = 0;
  for (int32_t r = 0; r < comm->world_size; ++r) {
    if (r == comm->rank) continue;
    if (!lookup_note(comm, r, &note)) {
      snprintf(text, text_bytes, " The group's store does not answer: the process that hosts it has probably died.");
      return missing;
    }
    if (!note.known || note.call_number < comm->call_number) {
      any_without = 1;
    } else if (note.call_number == comm->call_number && note.num_started < fewest) {
      fewest = note.num_started;
    }
  }
  int32_t blamed = -1;
  int32_t count = 0;
  size_t used = 0;
  for (int32_t r = 0; r < comm->world_size; ++r) {
    if (r == comm->rank || !lookup_note(comm, r, &note)) continue;
    int without = !note.known || note.call_number < comm->call_number;
    int behind = note.known && note.call_number == comm->call_number && note.num_started < comm->num_started &&
                 note.num_started == fewest;
    if (any_without ? !without : !behind) continue;
    if (blamed < 0 || r == missing) blamed = r;
    if (++count > MAX_LAGGARDS_LISTED || used >= text_bytes) continue;
    int n =
        snprintf(text + used, text_bytes - used, "%s %d%s%s%s", count == 1 ? " Not waiting in this step: rank" : ",", r,
                 note.known ? " (last seen at \"" : "", note.known ? note.text : "", note.known ? "\")" : "");
    if (n > 0) used += (size_t)n;
  }
  if (used < text_bytes && count > 0) {
    snprintf(text + used, text_bytes - used, count > MAX_LAGGARDS_LISTED ? " and %d more." : ".",
             count - MAX_LAGGARDS_LISTED);
  }
  return blamed >= 0 ? blamed : missing;
}

static sluice_status_t fail_timed_out(sluice_comm_t* comm, int32_t missing, uint64_t waited_ns, const char* phase) {
  char laggards[480];
  char from[48] = "";
  char who[48] = "the other ranks are";
  if (missing >= 0) snprintf(from, sizeof from, ", from rank %d", missing);
  int32_t blamed = find_laggards(comm, missing, laggards, sizeof laggards);
  if (blamed >= 0) snprintf(who, sizeof who, "rank %d is", blamed);
  return SLUICE_FAIL_PEER(SLUICE_E_TIMED_OUT, comm->rank, blamed,
                          "rank %d waited %.1f s for %s%s (call %llu).%s See what %s doing (log, stack); if it is only "
                          "slow, raise the communicator's timeout. This communicator is broken: destroy it and make a "
                          "new one on all ranks.",
                          comm->rank, seconds(waited_ns), phase, from, (unsigned long long)comm->call_number, laggards,
                          who);
}

static void abandon(sluice_comm_t* comm, sluice_comm_request_t* request) {
  if (comm->vtable->abandon != NULL) comm->vtable->abandon(comm, request);
}

sluice_status_t sluice_comm_exchange_wait(sluice_comm_t* comm, sluice_comm_request_t* request, const char* phase) {
  if (phase == NULL) phase = "an exchange";
  if (!is_inherited(comm) && atomic_load(&comm->broken) != SLUICE_OK) {
    /* The request of a broken communicator is only put away. */
    if (comm->vtable->exchange_wait(comm, request, 0, NULL) == SLUICE_E_TIMED_OUT) abandon(comm, request);
  }
  SLUICE_TRY(check_usable(comm));

  uint64_t start_ns = sluice_now_ns();
  uint64_t deadline_ns = sluice_add_saturating(start_ns, comm->timeout_ns);
  uint64_t next_warn_ns = sluice_add_saturating(start_ns, comm->warn_ns);
  /* Short deadlines leave the notes time to be seen before the first rank looks for them. */
  uint64_t note_ns = comm->vtable->publish != NULL
                         ? sluice_add_saturating(start_ns, sluice_min_u64(NOTE_AFTER_NS, comm->timeout_ns / 4))
                         : UINT64_MAX;
  for (;;) {
    uint64_t now_ns = sluice_now_ns();
    uint64_t slice_end_ns =
        sluice_min_u64(sluice_min_u64(deadline_ns, next_warn_ns), sluice_min_u64(note_ns, now_ns + SLICE_NS));
    int32_t missing = -1;
    sluice_status_t status = comm->vtable->exchange_wait(comm, request, slice_end_ns, &missing);
    if (status == SLUICE_OK) return SLUICE_OK;
    if (status != SLUICE_E_TIMED_OUT) {
      mark_broken(comm, status);
      /* What a transport says about its connections after our own abort is no news. */
      int is_aborted = atomic_load(&comm->broken) == SLUICE_E_ABORTED;
      return is_aborted && status != SLUICE_E_ABORTED ? check_usable(comm) : status;
    }
    if (atomic_load(&comm->broken) != SLUICE_OK) { /* aborted meanwhile, on a transport that did not notice */
      abandon(comm, request);
      return check_usable(comm);
    }
    if (comm->vtable->is_interrupted != NULL && comm->vtable->is_interrupted(comm)) {
      sluice_comm_abort(comm);
      abandon(comm, request);
      return SLUICE_FAIL_PEER(SLUICE_E_ABORTED, comm->rank, -1, "rank %d was interrupted in %s (call %llu)", comm->rank,
                              phase, (unsigned long long)comm->call_number);
    }
    now_ns = sluice_now_ns();
    if (now_ns >= deadline_ns) {
      status = fail_timed_out(comm, missing, now_ns - start_ns, phase);
      mark_broken(comm, status);
      sluice_error_info_t why;
      sluice_error_capture(&why);
      abandon(comm, request);
      return sluice_error_adopt(&why);
    }
    if (now_ns >= note_ns) {
      publish_note(comm, phase);
      note_ns = UINT64_MAX;
    }
    if (now_ns >= next_warn_ns) {
      sluice_log(SLUICE_LOG_WARN, "rank %d has waited %.1f s for rank %d: %s (call %llu); it gives up in %.0f s",
                 comm->rank, seconds(now_ns - start_ns), missing, phase, (unsigned long long)comm->call_number,
                 seconds(deadline_ns - now_ns));
      next_warn_ns = sluice_add_saturating(now_ns, comm->warn_ns);
    }
    if (now_ns < slice_end_ns) {
      /* A transport that returns early must not make this a busy loop. */
      struct timespec pause = {.tv_sec = 0, .tv_nsec = (long)sluice_min_u64(slice_end_ns - now_ns, 1000000)};
      nanosleep(&pause, NULL);
    }
  }
}

/* ---- all-reduce ------------------------------------------------------------------------------------------------ */

sluice_status_t sluice_comm_all_reduce_i64(sluice_comm_t* comm, int64_t* data, int64_t count, int32_t op,
                                           const char* phase) {
  if (phase == NULL) phase = "an all-reduce";
  SLUICE_TRY(check_usable(comm));
  if (comm->world_size == 1 || count == 0) return SLUICE_OK;
  if (comm->vtable->all_reduce_i64 == NULL) return sluice_comm_reduce_by_exchanges(comm, data, count, op, phase);
  uint64_t start_ns = sluice_now_ns();
  sluice_status_t status =
      comm->vtable->all_reduce_i64(comm, data, count, op, sluice_add_saturating(start_ns, comm->timeout_ns));
  if (status == SLUICE_E_TIMED_OUT) status = fail_timed_out(comm, -1, sluice_now_ns() - start_ns, phase);
  if (status != SLUICE_OK) mark_broken(comm, status);
  return status;
}
