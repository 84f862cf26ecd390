// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/test/said.h"

#include <string.h>

static void destroy(sluice_comm_t* comm) { (void)comm; }
static void abort_comm(sluice_comm_t* comm) { (void)comm; }

static sluice_status_t start(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                             sluice_comm_request_t** out_request) {
  const said_t* said = (const said_t*)comm;
  for (int32_t r = 0; r < comm->world_size; ++r) {
    if (r == comm->rank || exchange->recv_bytes[r] == 0) continue;
    memcpy(exchange->recv[r], exchange->send[r], exchange->recv_bytes[r]);
    if (said->answer != NULL) said->answer(r, exchange->recv[r], exchange->recv_bytes[r]);
  }
  *out_request = (sluice_comm_request_t*)(void*)comm;
  return SLUICE_OK;
}
static sluice_status_t wait(sluice_comm_t* comm, sluice_comm_request_t* request, uint64_t deadline_ns,
                            int32_t* out_peer) {
  (void)comm, (void)request, (void)deadline_ns, (void)out_peer;
  return SLUICE_OK;
}

static said_t* of(sluice_wire_t* wire) { return (said_t*)(void*)((char*)wire - offsetof(said_t, wire)); }

static void wire_send(sluice_wire_t* wire, sluice_outgoing_t* out) {
  said_t* said = of(wire);
  sluice_outgoing_t copy = *out;
  sluice_messages_sent(said->messages, out);
  if (said->heard != NULL && copy.number != 0) said->heard(said, &copy);
}
static void wire_fail(sluice_wire_t* wire, int32_t culprit) { (void)wire, (void)culprit; }
static void wire_close(sluice_wire_t* wire, int32_t is_orderly) {
  (void)is_orderly;
  of(wire)->messages = NULL;
}

static sluice_status_t open_messages(sluice_comm_t* comm, sluice_messages_t* messages, sluice_wire_t** out_wire) {
  static const sluice_wire_vtable_t vtable = {.send = wire_send, .fail = wire_fail, .close = wire_close};
  said_t* said = (said_t*)comm;
  said->wire.vtable = &vtable;
  said->messages = messages;
  *out_wire = &said->wire;
  return SLUICE_OK;
}

void said_init(said_t* said, int32_t rank, int32_t world_size, uint64_t timeout_ns) {
  static const sluice_comm_vtable_t vtable = {.destroy = destroy,
                                              .exchange_start = start,
                                              .exchange_wait = wait,
                                              .abort = abort_comm,
                                              .messages_open = open_messages};
  sluice_comm_config_t config;
  memset(said, 0, sizeof *said);
  sluice_comm_config_init(&config, sizeof config);
  config.rank = rank;
  config.world_size = world_size;
  config.timeout_ns = timeout_ns;
  sluice_comm_init_base(&said->base, &vtable, "said", &config);
}

void said_message(said_t* said, int32_t peer, uint64_t tag, const void* head, uint64_t head_bytes, const void* payload,
                  uint64_t payload_bytes) {
  sluice_message_arrival_t* arrival;
  const sluice_frame_t frame = {
      .kind = SLUICE_FRAME_MESSAGE, .head_bytes = (uint32_t)head_bytes, .tag = tag, .payload_bytes = payload_bytes};
  if (said->messages == NULL || sluice_messages_has_failed(said->messages)) return;
  if (sluice_messages_arrive(said->messages, peer, &frame, &arrival) != SLUICE_OK) return;
  if (head_bytes > 0) memcpy(sluice_messages_head_of(arrival), head, head_bytes);
  if (payload_bytes > 0) memcpy(sluice_messages_payload_of(arrival), payload, payload_bytes);
  sluice_messages_arrived(said->messages, arrival);
}

void said_frame(said_t* said, int32_t peer, const sluice_frame_t* frame) {
  if (said->messages != NULL && !sluice_messages_has_failed(said->messages))
    sluice_messages_hear(said->messages, peer, frame);
}

void said_all_leave(said_t* said) {
  const sluice_frame_t leaves = {.kind = SLUICE_FRAME_LEAVES};
  for (int32_t r = 0; r < said->base.world_size; ++r) {
    if (r != said->base.rank) said_frame(said, r, &leaves);
  }
}
