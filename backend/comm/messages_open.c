// SPDX-License-Identifier: Apache-2.0
/* Opens endpoints, on all ranks together, and closes them, each by itself. */
#include <stdatomic.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/comm_life.h"
#include "backend/comm/messages_state.h"

#define DEFAULT_UNEXPECTED_BYTES (UINT64_C(1) << 30)
#define MIN_MACHINE_BYTES        (UINT64_C(1) << 31) /* used if the system does not report its memory */

enum { VERSION = 1 };

/* The records that ranks exchange before there is an endpoint. */
typedef struct open_card_s {
  sluice_refusal_t refusal;
  int32_t version; /* of frames and records */
  uint64_t fingerprint;
} open_card_t;

static const sluice_record_field_t card_fields[] = {
    {SLUICE_RECORD_FIELD(open_card_t, version), .name = "the version of the message protocol",
     .hint = ": install one build of Sluice on all ranks"},
    {SLUICE_RECORD_FIELD(open_card_t, fingerprint), .is_hash = 1, .name = "the configuration (as a checksum)",
     .hint = ": all ranks need the same stages, micro-batches and code"},
};

/* ---- one rank's part --------------------------------------------------------------------------------------------- */

static void init_word(sluice_outgoing_t* out, int32_t peer) {
  out->peer = peer;
  out->frame.kind = SLUICE_FRAME_WAITS;
}

/* Returns the default bound. An arriving message is the input of a computation whose result has about the same size. */
static uint64_t half_of_the_memory(void) {
  const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  const uint64_t bytes = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0;
  return sluice_max_u64(bytes, MIN_MACHINE_BYTES) / 2;
}

static sluice_status_t create(sluice_comm_t* comm, const sluice_messages_config_t* config,
                              sluice_messages_t** out_messages) {
  const uint64_t w = (uint64_t)comm->world_size;
  const uint64_t head = sizeof(sluice_messages_t) + w * sizeof(sluice_message_peer_t);
  const uint64_t bytes = head + 2 * w * sizeof(sluice_outgoing_t);
  *out_messages = NULL;
  if (comm->vtable->messages_open == NULL) {
    return SLUICE_FAIL(
        SLUICE_E_UNSUPPORTED,
        "rank %d: %s communicators do not support messages; create a tcp communicator from this one, which does",
        comm->rank, comm->name);
  }
  pthread_mutex_lock(&comm->messages_mutex);
  const int is_taken = comm->messages != NULL;
  pthread_mutex_unlock(&comm->messages_mutex);
  if (is_taken) {
    return SLUICE_FAIL(SLUICE_E_STATE, "rank %d: this %s communicator has messages already; close them first",
                       comm->rank, comm->name);
  }
  sluice_messages_t* m = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "messages");
  if (m == NULL) return sluice_alloc_status();
  m->comm = comm;
  m->bytes = bytes;
  m->memory = config->allocator != NULL ? config->allocator : sluice_process_allocator();
  const uint64_t half = half_of_the_memory();
  m->max_unexpected_bytes = config->max_unexpected_bytes != 0 ? config->max_unexpected_bytes : DEFAULT_UNEXPECTED_BYTES;
  m->max_unexpected_bytes = sluice_min_u64(m->max_unexpected_bytes, 2 * half);
  m->max_message_bytes = config->max_message_bytes != 0 ? config->max_message_bytes : half;
  pthread_mutex_init(&m->mutex, NULL);
  sluice_cond_init(&m->changed);
  sluice_link_t* const lists[] = {&m->free_arrivals, &m->all_arrivals, &m->sends, &m->completed, &m->free_operations};
  for (size_t i = 0; i < sizeof lists / sizeof lists[0]; ++i) sluice_list_init(lists[i]);
  sluice_outgoing_t* words = (sluice_outgoing_t*)(void*)((char*)m + head);
  for (int32_t r = 0; r < comm->world_size; ++r) {
    sluice_message_peer_t* p = &m->peers[r];
    sluice_list_init(&p->receives);
    sluice_list_init(&p->unexpected);
    p->waits_for = -1;
    p->waits = words + 2 * (int64_t)r;
    p->goes_on = p->waits + 1;
    init_word(p->waits, r);
    init_word(p->goes_on, r);
  }
  sluice_comm_retain(comm);
  *out_messages = m;
  return SLUICE_OK;
}

static void destroy(sluice_messages_t* m, int is_orderly) {
  sluice_comm_t* comm = m->comm;
  if (m->wire != NULL) m->wire->vtable->close(m->wire, is_orderly);
  sluice_messages_free_operations(m);
  sluice_messages_free_arrivals(m);
  pthread_cond_destroy(&m->changed);
  pthread_mutex_destroy(&m->mutex);
  sluice_free(sluice_process_allocator(), m, m->bytes);
  sluice_comm_release(comm);
}

/* ---- together ---------------------------------------------------------------------------------------------------- */

static sluice_status_t open_wire(sluice_messages_t* m) {
  sluice_comm_t* comm = m->comm;
  static const sluice_agreement_t opening = {"messages", "could not open them", "messages"};
  if (comm->world_size == 1) return SLUICE_OK;
  return sluice_comm_agree_on_status(comm, &opening, comm->vtable->messages_open(comm, m, &m->wire));
}

static sluice_status_t open_together(sluice_messages_t* m, sluice_comm_t* comm, sluice_status_t mine,
                                     uint64_t fingerprint) {
  static const sluice_agreement_t opening = {"messages", "cannot open them", "the opening of messages"};
  open_card_t card = {.version = VERSION, .fingerprint = fingerprint};
  sluice_records_t cards;
  SLUICE_TRY(sluice_comm_agree(comm, &opening, mine, &card, sizeof card, &cards));
  const sluice_status_t status = sluice_records_compare(&cards, card_fields, SLUICE_NUM_FIELDS(card_fields));
  sluice_records_free(&cards);
  return status == SLUICE_OK ? open_wire(m) : status;
}

sluice_status_t sluice_messages_open(sluice_comm_t* comm, const sluice_messages_config_t* config,
                                     sluice_messages_t** out_messages) {
  static const sluice_messages_config_t defaults = {.fingerprint = 0};
  if (config == NULL) config = &defaults;
  *out_messages = NULL;
  SLUICE_TRY(sluice_comm_check_usable(comm));
  sluice_messages_t* m;
  sluice_status_t status = create(comm, config, &m);
  status = open_together(m, comm, status, config->fingerprint);
  if (status != SLUICE_OK) {
    if (m != NULL) destroy(m, 0);
    return status;
  }
  pthread_mutex_lock(&comm->messages_mutex);
  comm->messages = m;
  pthread_mutex_unlock(&comm->messages_mutex);
  /* An abort before this point has not seen the endpoint. */
  if (atomic_load(&comm->broken) == SLUICE_E_ABORTED) sluice_messages_abort(m);
  *out_messages = m;
  return SLUICE_OK;
}

void sluice_messages_close(sluice_messages_t* m) {
  if (m == NULL || sluice_comm_is_inherited(m->comm)) return;
  pthread_mutex_lock(&m->comm->messages_mutex);
  m->comm->messages = NULL;
  pthread_mutex_unlock(&m->comm->messages_mutex);
  destroy(m, !sluice_messages_has_failed(m));
}

void sluice_comm_abort_messages(sluice_comm_t* comm) {
  pthread_mutex_lock(&comm->messages_mutex);
  sluice_messages_abort(comm->messages);
  pthread_mutex_unlock(&comm->messages_mutex);
}
