// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/tcp/tcp_rendezvous.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/alloc.h"
#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/tcp/tcp_descriptors.h"

/* ---- bytes ------------------------------------------------------------------------------------------------------- */

/* Returns 0 on an event, else -ETIMEDOUT. */
static int await(int fd, short events, uint64_t deadline_ns) {
  for (;;) {
    const uint64_t now_ns = sluice_now_ns();
    if (now_ns >= deadline_ns) return -ETIMEDOUT;
    struct pollfd p = {.fd = fd, .events = events};
    const uint64_t left_ms = (deadline_ns - now_ns + 999999) / 1000000;
    if (poll(&p, 1, (int)sluice_min_u64(left_ms, 1000)) > 0) return 0;
  }
}

void sluice_meet_hurry(int fd) {
  const int on = 1;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

int sluice_meet_send(int fd, const void* data, uint64_t bytes, uint64_t deadline_ns) {
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t n = send(fd, (const char*)data + done, bytes - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      done += (uint64_t)n;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      const int late = await(fd, POLLOUT, deadline_ns);
      if (late != 0) return late;
    } else if (errno != EINTR) {
      return -errno;
    }
  }
  return 0;
}

int sluice_meet_receive(int fd, void* data, uint64_t bytes, uint64_t deadline_ns) {
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t n = recv(fd, (char*)data + done, bytes - done, MSG_DONTWAIT);
    if (n == 0) return -ECONNRESET;
    if (n > 0) {
      done += (uint64_t)n;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      const int late = await(fd, POLLIN, deadline_ns);
      if (late != 0) return late;
    } else if (errno != EINTR) {
      return -errno;
    }
  }
  return 0;
}

int sluice_meet_send_frame(int fd, uint32_t kind, const void* data, uint64_t bytes, uint64_t deadline_ns) {
  const sluice_meet_frame_t frame = {.kind = kind, .bytes = (uint32_t)bytes};
  const int error = sluice_meet_send(fd, &frame, sizeof frame, deadline_ns);
  return error != 0 ? error : sluice_meet_send(fd, data, bytes, deadline_ns);
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

void sluice_meet_refusal(sluice_meet_refused_t* out_refused) {
  sluice_error_info_t why;
  sluice_error_capture(&why);
  memset(out_refused, 0, sizeof *out_refused);
  out_refused->status = why.status;
  out_refused->peer = why.peer;
  out_refused->native_code = why.native_code;
  snprintf(out_refused->message, sizeof out_refused->message, "%.*s", (int)sizeof out_refused->message - 1,
           why.message);
}

sluice_status_t sluice_meet_adopt(const sluice_tcp_rendezvous_t* m, const sluice_meet_refused_t* refused) {
  const int is_known = refused->status < 0 && refused->status >= SLUICE_E_CAPACITY;
  return sluice_error_record(is_known ? refused->status : SLUICE_E_EXTERNAL, m->base.rank, refused->peer,
                             refused->native_code, "%.*s", (int)sizeof refused->message - 1, refused->message);
}

sluice_status_t sluice_meet_fail_late(const sluice_tcp_rendezvous_t* m, const sluice_meet_waits_t* waits,
                                      const char* more) {
  return SLUICE_FAIL_PEER(SLUICE_E_TIMED_OUT, m->base.rank, waits->missing,
                          "tcp communicator: rank %d did not connect to %s within %.1f s; %d of %d ranks did. Start it "
                          "with the same address and secret, or allow more time (connect_timeout_ns)%s",
                          waits->missing, m->root->text, sluice_seconds(m->timeout_ns), waits->present,
                          m->base.world_size, more);
}

/* ---- a parent for tcp_connect ------------------------------------------------------------------------------------ */

/* Tells the other ranks that rank 0 has lost `peer`, or has waited for it until the deadline. */
static sluice_status_t refuse_all(sluice_tcp_rendezvous_t* m, int32_t peer, int error, const char* phase) {
  sluice_meet_refused_t refused;
  const sluice_status_t status =
      sluice_error_record(error == -ETIMEDOUT ? SLUICE_E_TIMED_OUT : SLUICE_E_PEER_LOST, m->base.rank, peer, -error,
                          "tcp communicator: rank 0 lost rank %d during %s: %s", peer, phase, strerror(-error));
  sluice_meet_refusal(&refused);
  for (int32_t r = 1; r < m->base.world_size; ++r) {
    (void)sluice_meet_send_frame(m->sockets[r], SLUICE_MEET_REFUSED, &refused, sizeof refused, sluice_now_ns());
  }
  return status;
}

static sluice_status_t swap_at_root(sluice_tcp_rendezvous_t* m, void* records, uint64_t record_bytes,
                                    const char* phase) {
  /* A rank may be late by the time that it has to connect. */
  const uint64_t deadline_ns = sluice_now_ns() + 2 * m->timeout_ns;
  for (int32_t r = 1; r < m->base.world_size; ++r) {
    sluice_meet_frame_t frame = {.kind = 0};
    int error = sluice_meet_receive(m->sockets[r], &frame, sizeof frame, deadline_ns);
    if (error == 0 && (frame.kind != SLUICE_MEET_RECORDS || frame.bytes != record_bytes)) error = -EPROTO;
    char* record = (char*)records + (uint64_t)r * record_bytes;
    if (error == 0) error = sluice_meet_receive(m->sockets[r], record, record_bytes, deadline_ns);
    if (error != 0) return refuse_all(m, r, error, phase);
  }
  const uint64_t all = (uint64_t)m->base.world_size * record_bytes;
  for (int32_t r = 1; r < m->base.world_size; ++r) {
    const int error = sluice_meet_send_frame(m->sockets[r], SLUICE_MEET_RECORDS, records, all, deadline_ns);
    if (error != 0) return refuse_all(m, r, error, phase);
  }
  return SLUICE_OK;
}

static sluice_status_t swap_at_member(sluice_tcp_rendezvous_t* m, void* records, uint64_t record_bytes,
                                      const char* phase) {
  const uint64_t deadline_ns = sluice_now_ns() + 3 * m->timeout_ns; /* rank 0 names a late rank before that */
  const uint64_t all = (uint64_t)m->base.world_size * record_bytes;
  sluice_meet_frame_t frame = {.kind = 0};
  /* If rank 0 has given up, its reason can be read although nothing can be sent. */
  (void)sluice_meet_send_frame(m->sockets[0], SLUICE_MEET_RECORDS,
                               (const char*)records + (uint64_t)m->base.rank * record_bytes, record_bytes, deadline_ns);
  int error = sluice_meet_receive(m->sockets[0], &frame, sizeof frame, deadline_ns);
  if (error == 0 && frame.kind == SLUICE_MEET_REFUSED && frame.bytes == sizeof(sluice_meet_refused_t)) {
    sluice_meet_refused_t refused;
    error = sluice_meet_receive(m->sockets[0], &refused, sizeof refused, deadline_ns);
    if (error == 0) return sluice_meet_adopt(m, &refused);
  }
  if (error == 0 && (frame.kind != SLUICE_MEET_RECORDS || frame.bytes != all)) error = -EPROTO;
  if (error == 0) error = sluice_meet_receive(m->sockets[0], records, all, deadline_ns);
  if (error == 0) return SLUICE_OK;
  return sluice_error_record(error == -ETIMEDOUT ? SLUICE_E_TIMED_OUT : SLUICE_E_PEER_LOST, m->base.rank, 0, -error,
                             "tcp communicator: rank %d lost rank 0 during %s: %s", m->base.rank, phase,
                             strerror(-error));
}

static sluice_status_t meet_swap(sluice_tcp_parent_t* parent, void* records, uint64_t record_bytes, const char* phase) {
  sluice_tcp_rendezvous_t* m = (sluice_tcp_rendezvous_t*)parent;
  return (parent->rank == 0 ? swap_at_root : swap_at_member)(m, records, record_bytes, phase);
}

static sluice_status_t meet_max(sluice_tcp_parent_t* parent, int64_t* value, const char* phase) {
  int64_t* values = ((sluice_tcp_rendezvous_t*)parent)->values;
  values[parent->rank] = *value;
  SLUICE_TRY(meet_swap(parent, values, sizeof *values, phase));
  for (int32_t r = 0; r < parent->world_size; ++r) *value = values[r] > *value ? values[r] : *value;
  return SLUICE_OK;
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

sluice_status_t sluice_tcp_rendezvous_open(int32_t rank, int32_t world_size, const sluice_tcp_endpoint_t* root,
                                           const uint8_t* key, uint64_t timeout_ns,
                                           sluice_tcp_rendezvous_t** out_rendezvous) {
  const uint64_t w = (uint64_t)world_size;
  const uint64_t head = (sizeof(sluice_tcp_rendezvous_t) + w * sizeof(int) + 7) / 8 * 8;
  const uint64_t bytes = head + w * sizeof(int64_t);
  *out_rendezvous = NULL;
  sluice_tcp_rendezvous_t* m = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "a meeting of ranks");
  if (m == NULL) return sluice_alloc_status();
  m->base = (sluice_tcp_parent_t){.rank = rank, .world_size = world_size, .swap = meet_swap, .max = meet_max};
  m->root = root;
  m->key = key;
  m->timeout_ns = timeout_ns;
  m->deadline_ns = sluice_now_ns() + timeout_ns;
  m->bytes = bytes;
  m->values = (int64_t*)(void*)((char*)m + head);
  for (int32_t r = 0; r < world_size; ++r) m->sockets[r] = -1;
  const sluice_status_t status = rank == 0 ? sluice_tcp_rendezvous_gather(m) : sluice_tcp_rendezvous_join(m);
  if (status != SLUICE_OK) {
    sluice_tcp_rendezvous_close(m);
    return status;
  }
  *out_rendezvous = m;
  return SLUICE_OK;
}

sluice_tcp_parent_t* sluice_tcp_rendezvous_parent(sluice_tcp_rendezvous_t* rendezvous) { return &rendezvous->base; }

/* The last frame of rank 0 is read before its connections end. */
void sluice_tcp_rendezvous_close(sluice_tcp_rendezvous_t* m) {
  if (m == NULL) return;
  const uint64_t begin_ns = sluice_now_ns();
  for (int32_t r = 0; r < m->base.world_size; ++r) {
    if (m->sockets[r] < 0) continue;
    (void)shutdown(m->sockets[r], SHUT_WR);
    while (!sluice_tcp_is_shut_down(m->sockets[r], 1) && sluice_tcp_shutdown_goes_on(begin_ns)) {
    }
    sluice_tcp_close(m->sockets[r]);
  }
  sluice_free(sluice_process_allocator(), m, m->bytes);
}

void sluice_tcp_key(const void* secret, uint64_t bytes, uint8_t* out) {
  memcpy(out, secret, SLUICE_TCP_MAC_BYTES);
  for (uint64_t at = SLUICE_TCP_MAC_BYTES; at < bytes; at += SLUICE_TCP_MAC_BYTES) {
    uint8_t part[SLUICE_TCP_MAC_BYTES + 8] = {0};
    const uint64_t left = bytes - at;
    memcpy(part, (const char*)secret + at, left < SLUICE_TCP_MAC_BYTES ? left : SLUICE_TCP_MAC_BYTES);
    memcpy(part + SLUICE_TCP_MAC_BYTES, &left, sizeof left); /* secrets of different lengths give different keys */
    sluice_tcp_mac(out, part, sizeof part, out);
  }
}
