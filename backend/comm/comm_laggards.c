#include "backend/comm/comm_laggards.h"

#include <stdio.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"

#define MAX_LAGGARDS_LISTED 8

static void note_key(int32_t rank, char* out, size_t out_bytes) { snprintf(out, out_bytes, "sluice/%d", rank); }

void sluice_comm_publish_note(sluice_comm_t* comm, const char* phase) {
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

sluice_status_t sluice_comm_fail_timed_out(sluice_comm_t* comm, int32_t missing, uint64_t waited_ns,
                                           const char* phase) {
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
                          comm->rank, sluice_seconds(waited_ns), phase, from, (unsigned long long)comm->call_number,
                          laggards, who);
}
