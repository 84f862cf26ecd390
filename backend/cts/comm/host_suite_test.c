// SPDX-License-Identifier: Apache-2.0
/* The suite on the host transport, whose callbacks call the local transport. Messages use a mailbox; with the argument
 * "tcp" the host has no messages, and they use TCP. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/test/last_error.h"
#include "backend/comm/host/host_comm.h"
#include "backend/comm/sized_messages.h"
#include "backend/cts/comm/comm_suite.h"

/* ---- a mailbox --------------------------------------------------------------------------------------------------- */

/* Messages of known sizes between threads, as in MPI: a send completes when its receive has taken it, and reports that
 * slightly later than the receive. */

enum { MAX_RANKS = 8, LATE_TESTS = 3 };

typedef struct letter_s { /* a send or a receive */
  struct letter_s* next;
  const void* from;
  void* to;
  uint64_t bytes;
  int32_t is_done;
  int32_t is_bad;
  int32_t num_tests;      /* of a completed send, before it reports that */
  struct letter_s** list; /* its list until it completes */
} letter_t;

typedef struct mailbox_s {
  sluice_local_group_t* group; /* for exchanges */
  pthread_mutex_t mutex;
  uint64_t num_opened[MAX_RANKS]; /* endpoints that each rank has opened: those with the same number connect */
  letter_t* sends[MAX_RANKS][MAX_RANKS][64];
  letter_t* receives[MAX_RANKS][MAX_RANKS][64];
} mailbox_t;

typedef struct end_s { /* a rank */
  mailbox_t* mailbox;
  int32_t rank;
  sluice_comm_t* group;
} end_t;

typedef struct endpoint_s {
  mailbox_t* mailbox;
  int32_t rank;
  uint64_t number;
} endpoint_t;

static sluice_status_t open_endpoint(void* user, void** out_endpoint, sluice_host_failure_t* out_failure) {
  const end_t* me = user;
  endpoint_t* e = calloc(1, sizeof *e);
  (void)out_failure;
  e->mailbox = me->mailbox;
  e->rank = me->rank;
  pthread_mutex_lock(&me->mailbox->mutex);
  e->number = me->mailbox->num_opened[me->rank]++ % 64;
  pthread_mutex_unlock(&me->mailbox->mutex);
  *out_endpoint = e;
  return SLUICE_OK;
}

static void take_out(letter_t* letter) {
  letter_t** at = letter->list;
  while (*at != letter) at = &(*at)->next;
  *at = letter->next;
  letter->list = NULL;
}

/* Matches the oldest entries of both lists. */
static void match(letter_t** sends, letter_t** receives) {
  while (*sends != NULL && *receives != NULL) {
    letter_t* send = *sends;
    letter_t* receive = *receives;
    take_out(send);
    take_out(receive);
    receive->is_bad = send->bytes != receive->bytes;
    if (!receive->is_bad) memcpy(receive->to, send->from, send->bytes);
    send->is_done = receive->is_done = 1;
  }
}

static sluice_status_t post(endpoint_t* e, int32_t from, int32_t to, letter_t letter, void** out_request) {
  letter_t* l = malloc(sizeof *l);
  *l = letter;
  pthread_mutex_lock(&e->mailbox->mutex);
  letter_t** sends = &e->mailbox->sends[from][to][e->number];
  letter_t** receives = &e->mailbox->receives[from][to][e->number];
  l->list = letter.to != NULL ? receives : sends;
  letter_t** end = l->list;
  while (*end != NULL) end = &(*end)->next;
  *end = l;
  match(sends, receives);
  pthread_mutex_unlock(&e->mailbox->mutex);
  *out_request = l;
  return SLUICE_OK;
}

static sluice_status_t send_bytes(void* endpoint, int32_t peer, const void* data, uint64_t bytes, void** out_request,
                                  sluice_host_failure_t* out_failure) {
  endpoint_t* e = endpoint;
  (void)out_failure;
  return post(e, e->rank, peer, (letter_t){.from = data, .bytes = bytes}, out_request);
}

static sluice_status_t receive_bytes(void* endpoint, int32_t peer, void* data, uint64_t bytes, void** out_request,
                                     sluice_host_failure_t* out_failure) {
  endpoint_t* e = endpoint;
  (void)out_failure;
  return post(e, peer, e->rank, (letter_t){.to = data, .bytes = bytes}, out_request);
}

static sluice_status_t test(void* endpoint, void* request, int32_t* out_is_done, sluice_host_failure_t* out_failure) {
  endpoint_t* e = endpoint;
  letter_t* l = request;
  pthread_mutex_lock(&e->mailbox->mutex);
  const int is_late = l->from != NULL && l->is_done && l->num_tests++ < LATE_TESTS;
  const int is_done = l->is_done && !is_late, is_bad = l->is_bad;
  pthread_mutex_unlock(&e->mailbox->mutex);
  *out_is_done = is_done;
  if (is_done) free(l);
  if (!is_bad) return SLUICE_OK;
  snprintf(out_failure->message, sizeof out_failure->message, "sizes differ");
  return SLUICE_E_EXTERNAL;
}

static int32_t give_up(void* endpoint, void* request) {
  endpoint_t* e = endpoint;
  letter_t* l = request;
  pthread_mutex_lock(&e->mailbox->mutex);
  if (l->list != NULL) take_out(l);
  pthread_mutex_unlock(&e->mailbox->mutex);
  free(l);
  return 1;
}

static void close_endpoint(void* endpoint, int32_t is_clean) {
  (void)is_clean;
  free(endpoint);
}

static const sluice_sized_messages_t mailbox_messages = {
    .open = open_endpoint,
    .send = send_bytes,
    .receive = receive_bytes,
    .test = test,
    .give_up = give_up,
    .close = close_endpoint,
};

/* ---- the host ---------------------------------------------------------------------------------------------------- */

static int has_mailbox;

static sluice_status_t tell(sluice_status_t status, sluice_host_failure_t* out_failure) {
  if (status != SLUICE_OK && status != SLUICE_E_TIMED_OUT) {
    out_failure->peer = last_error()->peer;
    memcpy(out_failure->message, last_message(), sizeof out_failure->message - 1);
  }
  return status;
}

static sluice_status_t exchange_start(void* user, const sluice_exchange_t* exchange, void** out_request,
                                      sluice_host_failure_t* out_failure) {
  sluice_comm_t* group = ((end_t*)user)->group;
  sluice_comm_request_t* request = NULL;
  sluice_status_t status = group->vtable->exchange_start(group, exchange, &request);
  *out_request = request;
  return tell(status, out_failure);
}

static sluice_status_t exchange_wait(void* user, void* request, uint64_t timeout_ns,
                                     sluice_host_failure_t* out_failure) {
  sluice_comm_t* group = ((end_t*)user)->group;
  return tell(group->vtable->exchange_wait(group, request, sluice_now_ns() + timeout_ns, &out_failure->peer),
              out_failure);
}

static void abort_group(void* user) {
  sluice_comm_t* group = ((end_t*)user)->group;
  group->vtable->abort(group);
}
static void publish(void* user, const char* key, const char* value) {
  sluice_comm_t* group = ((end_t*)user)->group;
  group->vtable->publish(group, key, value);
}
static int32_t lookup(void* user, const char* key, char* out, int32_t out_bytes) {
  sluice_comm_t* group = ((end_t*)user)->group;
  return group->vtable->lookup(group, key, out, out_bytes);
}
static void destroy(void* user) {
  sluice_comm_destroy(((end_t*)user)->group);
  free(user);
}

static void close_group(void* opaque) {
  mailbox_t* mailbox = opaque;
  sluice_local_group_destroy(mailbox->group);
  pthread_mutex_destroy(&mailbox->mutex);
  free(mailbox);
}
static void* open_group(int32_t world_size) {
  mailbox_t* mailbox = world_size <= MAX_RANKS ? calloc(1, sizeof *mailbox) : NULL;
  if (mailbox == NULL) return NULL;
  pthread_mutex_init(&mailbox->mutex, NULL);
  if (sluice_local_group_create(world_size, &mailbox->group) == SLUICE_OK) return mailbox;
  close_group(mailbox);
  return NULL;
}
static sluice_status_t create(void* opaque, const sluice_comm_config_t* config, sluice_comm_t** out_comm) {
  static const sluice_host_comm_vtable_t vtable = {.struct_size = sizeof vtable,
                                                   .exchange_start = exchange_start,
                                                   .exchange_wait = exchange_wait,
                                                   .abort = abort_group,
                                                   .publish = publish,
                                                   .lookup = lookup,
                                                   .destroy = destroy};
  mailbox_t* mailbox = opaque;
  sluice_comm_t* group;
  SLUICE_TRY(sluice_comm_create_local(mailbox->group, config, &group));
  end_t* end = calloc(1, sizeof *end);
  *end = (end_t){.mailbox = mailbox, .rank = config->rank, .group = group};
  sluice_status_t status = sluice_comm_create_host(config, &vtable, end, out_comm);
  if (status == SLUICE_OK) {
    if (has_mailbox) sluice_host_comm_set_messages(*out_comm, &mailbox_messages);
  } else {
    destroy(end);
  }
  return status;
}

int main(int argc, char** argv) {
  const int is_tcp = argc > 1 && strcmp(argv[1], "tcp") == 0;
  has_mailbox = !is_tcp;
  static const cts_transport_t transport = {.name = "host", .open = open_group, .close = close_group, .create = create};
  return cts_comm_suite_main(&transport, argc - is_tcp, argv + is_tcp);
}
