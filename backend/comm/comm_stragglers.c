// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/comm_stragglers.h"

#include <stdio.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/comm_life.h"

#define MAX_STRAGGLERS_LISTED 8
#define LOOK_NS               (UINT64_C(2) * 1000000000)

static void note_key(int32_t rank, char* out, size_t out_bytes) { snprintf(out, out_bytes, "sluice/%d", rank); }

static void publish(sluice_comm_t* comm, const char* given_up, const char* phase) {
  char key[32];
  char value[160];
  note_key(comm->rank, key, sizeof key);
  snprintf(value, sizeof value, "call=%llu started=%llu%s phase=%s", (unsigned long long)comm->call_number,
           (unsigned long long)comm->num_started, given_up, phase);
  comm->vtable->publish(comm, key, value);
}

void sluice_comm_publish_note(sluice_comm_t* comm, const char* phase) { publish(comm, "", phase); }

/* Publishes a note for ranks that come to this call later. `phase` is what this rank waited for. */
static void publish_given_up(sluice_comm_t* comm, uint64_t waited_ns, const char* phase) {
  char given_up[48];
  snprintf(given_up, sizeof given_up, " given_up_ms=%llu", (unsigned long long)(waited_ns / 1000000));
  publish(comm, given_up, phase);
}

/* The note of a rank: its progress. A rank that never waited long has none. */
typedef struct note_s {
  int known;
  unsigned long long call_number;
  unsigned long long num_started;
  unsigned long long given_up_ms; /* the time it waited before it gave up; 0: it has not given up */
  char text[160];
} note_t;

/* Returns 0 if the store is gone. */
static int lookup_note(sluice_comm_t* comm, int32_t rank, note_t* out_note) {
  char key[32];
  memset(out_note, 0, sizeof *out_note);
  note_key(rank, key, sizeof key);
  int32_t bytes = comm->vtable->lookup(comm, key, out_note->text, (int32_t)sizeof out_note->text - 1);
  if (bytes < 0) return 0;
  out_note->text[sluice_min_u64((uint64_t)bytes, sizeof out_note->text - 1)] = '\0';
  out_note->known = sscanf(out_note->text, "call=%llu started=%llu given_up_ms=%llu", &out_note->call_number,
                           &out_note->num_started, &out_note->given_up_ms) >= 2;
  return 1;
}

/* ---- finding the straggler --------------------------------------------------------------------------------------- */

/* Candidates for the straggler: ranks without a note of this call; if all ranks have one, those that started the fewest
 * exchanges in it, if fewer than this rank. */
typedef struct stragglers_s {
  int any_without;
  unsigned long long fewest;
  int32_t count;
  int32_t blamed; /* the rank whose message is missing if it is a candidate, else the lowest candidate; -1: none */
  int32_t num_listed;
  struct {
    int32_t rank;
    char text[160];
  } listed[MAX_STRAGGLERS_LISTED]; /* the lowest */
} stragglers_t;

static const char* phase_in(const note_t* note) {
  const char* phase = strstr(note->text, "phase=");
  return phase != NULL ? phase + strlen("phase=") : note->text;
}

static void list(stragglers_t* found, int32_t rank, const note_t* note) {
  int32_t at = found->num_listed;
  while (at > 0 && found->listed[at - 1].rank > rank) --at;
  if (at == MAX_STRAGGLERS_LISTED) return;
  if (found->num_listed < MAX_STRAGGLERS_LISTED) ++found->num_listed;
  memmove(&found->listed[at + 1], &found->listed[at], (size_t)(found->num_listed - 1 - at) * sizeof found->listed[0]);
  found->listed[at].rank = rank;
  if (note->given_up_ms > 0) {
    snprintf(found->listed[at].text, sizeof found->listed[at].text, " (gave up after %.1f s in \"%.80s\")",
             1e-3 * (double)note->given_up_ms, phase_in(note));
  } else if (note->known) {
    snprintf(found->listed[at].text, sizeof found->listed[at].text, " (last seen at \"%.120s\")", note->text);
  } else {
    found->listed[at].text[0] = '\0';
  }
}

static void judge(stragglers_t* found, const sluice_comm_t* comm, int32_t rank, int32_t missing, const note_t* note) {
  const int without = !note->known || note->call_number < comm->call_number;
  const int behind = !without && note->call_number == comm->call_number && note->num_started < comm->num_started;
  if (!without && (!behind || found->any_without || note->num_started > found->fewest)) return;
  if (without ? !found->any_without : note->num_started < found->fewest) { /* worse than all previous ranks */
    found->count = found->num_listed = 0;
    found->blamed = -1;
  }
  found->any_without = without;
  if (behind) found->fewest = note->num_started;
  ++found->count;
  if (rank == missing || found->blamed < 0 || (found->blamed != missing && rank < found->blamed)) found->blamed = rank;
  list(found, rank, note);
}

/* Looks up every rank's note once, first that of the rank whose message is missing, for at most LOOK_NS, because a
 * store answers hundreds of look-ups one after the other. Returns the number of ranks looked up; -1: the store is
 * gone. */
static int32_t look(sluice_comm_t* comm, int32_t missing, stragglers_t* found) {
  note_t note;
  const uint64_t until_ns = sluice_now_ns() + LOOK_NS;
  int32_t num_asked = 0;
  for (int32_t i = missing >= 0 ? -1 : 0; i < comm->world_size; ++i) {
    const int32_t r = i < 0 ? missing : i;
    if (r == comm->rank || (i >= 0 && r == missing)) continue;
    if (num_asked > 0 && sluice_now_ns() >= until_ns) break;
    if (!lookup_note(comm, r, &note)) return -1;
    judge(found, comm, r, missing, &note);
    ++num_asked;
  }
  return num_asked;
}

/* Appends a sentence to `text` and returns the rank to blame: `missing` (the rank whose message is missing) if there is
 * no candidate. */
static int32_t find_stragglers(sluice_comm_t* comm, int32_t missing, uint64_t waited_ns, const char* phase, char* text,
                               size_t text_bytes) {
  text[0] = '\0';
  if (comm->vtable->lookup == NULL || comm->vtable->publish == NULL) return missing;
  stragglers_t found = {.fewest = comm->num_started, .blamed = -1};
  const int32_t num_asked = look(comm, missing, &found);
  if (num_asked < 0) {
    snprintf(text, text_bytes, " The group's store does not answer: the process that hosts it has probably died.");
    return missing;
  }
  publish_given_up(comm, waited_ns, phase);
  size_t used = 0;
  for (int32_t i = 0; i < found.num_listed && used < text_bytes; ++i) {
    used +=
        (size_t)snprintf(text + used, text_bytes - used, "%s %d%s", i == 0 ? " Not waiting in this step: rank" : ",",
                         found.listed[i].rank, found.listed[i].text);
  }
  if (used < text_bytes && found.count > 0) {
    used += (size_t)snprintf(text + used, text_bytes - used, found.count > found.num_listed ? " and %d more." : ".",
                             found.count - found.num_listed);
  }
  if (used < text_bytes && num_asked < comm->world_size - 1) {
    snprintf(text + used, text_bytes - used, " The group's store is slow: it was asked about %d of %d ranks.",
             num_asked, comm->world_size - 1);
  }
  return found.blamed >= 0 ? found.blamed : missing;
}

sluice_status_t sluice_comm_fail_timed_out(sluice_comm_t* comm, int32_t missing, uint64_t waited_ns,
                                           const char* phase) {
  char stragglers[480];
  char from[48] = "";
  char who[48] = "the other ranks are";
  if (missing >= 0) snprintf(from, sizeof from, ", from rank %d", missing);
  int32_t blamed = find_stragglers(comm, missing, waited_ns, phase, stragglers, sizeof stragglers);
  if (blamed >= 0) snprintf(who, sizeof who, "rank %d is", blamed);
  return SLUICE_FAIL_PEER(SLUICE_E_TIMED_OUT, comm->rank, blamed,
                          "rank %d waited %.1f s for %s%s (call %llu).%s See what %s doing (log, stack); if it is only "
                          "slow, raise the timeout. " SLUICE_COMM_BROKEN,
                          comm->rank, sluice_seconds(waited_ns), phase, from, (unsigned long long)comm->call_number,
                          stragglers, who);
}

sluice_status_t sluice_comm_check_given_up(sluice_comm_t* comm, int32_t peer, const char* more) {
  note_t note;
  if (peer < 0 || peer == comm->rank || comm->vtable->lookup == NULL || !lookup_note(comm, peer, &note)) {
    return SLUICE_OK;
  }
  if (note.given_up_ms == 0 || note.call_number != comm->call_number) return SLUICE_OK;
  sluice_comm_mark_broken(comm, SLUICE_E_PEER_LOST);
  return SLUICE_FAIL_PEER(
      SLUICE_E_PEER_LOST, comm->rank, peer,
      "rank %d entered this call after rank %d had given up: that rank waited %.1f s for %s (call %llu). Let all ranks "
      "make the same calls, or raise the timeout if this one was only slow.%s%s " SLUICE_COMM_BROKEN,
      comm->rank, peer, 1e-3 * (double)note.given_up_ms, phase_in(&note), note.call_number,
      more[0] != '\0' ? " The two calls differ: " : "", more);
}
