// SPDX-License-Identifier: Apache-2.0
#include "backend/cts/comm/sized_mailbox.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

struct sized_mailbox_s {
  pthread_mutex_t mutex;
  uint64_t num_opened[MAX_RANKS]; /* endpoints that each rank has opened: those with the same number connect */
  letter_t* sends[MAX_RANKS][MAX_RANKS][64];
  letter_t* receives[MAX_RANKS][MAX_RANKS][64];
};

typedef struct endpoint_s {
  sized_mailbox_t* mailbox;
  int32_t rank;
  uint64_t number;
} endpoint_t;

sized_mailbox_t* sized_mailbox_create(int32_t world_size) {
  sized_mailbox_t* mailbox = world_size <= MAX_RANKS ? calloc(1, sizeof *mailbox) : NULL;
  if (mailbox != NULL) pthread_mutex_init(&mailbox->mutex, NULL);
  return mailbox;
}

void sized_mailbox_destroy(sized_mailbox_t* mailbox) {
  pthread_mutex_destroy(&mailbox->mutex);
  free(mailbox);
}

static sluice_status_t open_endpoint(void* user, void** out_endpoint, sluice_host_failure_t* out_failure) {
  const sized_rank_t* me = user;
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

const sluice_sized_messages_t sized_mailbox_messages = {
    .open = open_endpoint,
    .send = send_bytes,
    .receive = receive_bytes,
    .test = test,
    .give_up = give_up,
    .close = close_endpoint,
};
