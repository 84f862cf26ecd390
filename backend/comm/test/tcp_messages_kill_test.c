// SPDX-License-Identifier: Apache-2.0
/* A rank, which is a process, is killed: all other ranks report it, whichever rank they wait for. */
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#include "backend/base/test/refused.h"
#include "backend/comm/messages.h"
#include "capi/test/migration/mesh.h"

enum { WORLD = 4, VICTIM = 3 };

/* With TSan, receiving 64 MiB takes longer than the other ranks wait. */
#if defined(__SANITIZE_THREAD__)
enum { LARGE = 4 << 20 };
#else
enum { LARGE = 64 << 20 };
#endif

/* ---- ranks ------------------------------------------------------------------------------------------------------- */

typedef sluice_status_t (*wait_fn_t)(sluice_messages_t* m, int32_t rank);

static sluice_status_t next_one(sluice_messages_t* m) {
  sluice_message_completion_t c;
  sluice_status_t status;
  do {
    status = sluice_messages_wait(m, "what does not come", &c);
  } while (status == SLUICE_OK);
  return status;
}

/* Rank 0 waits for 1, 1 for 2, 2 for 0: no rank waits for the victim. */
static sluice_status_t wait_for_another(sluice_messages_t* m, int32_t rank) {
  const sluice_status_t status = sluice_messages_receive(m, (rank + 1) % VICTIM, 1, 0, NULL);
  return status == SLUICE_OK ? next_one(m) : status;
}

/* Parts of messages are in flight between all ranks. */
static sluice_status_t send_meanwhile(sluice_messages_t* m, int32_t rank) {
  static char payload[LARGE];
  const sluice_message_span_t span = {.data = payload, .bytes = LARGE};
  for (uint64_t i = 0; i < 1000; ++i) {
    const sluice_message_t message = {.peer = (int32_t)(i % WORLD), .num_spans = 1, .tag = i, .spans = &span};
    sluice_message_completion_t c;
    if (message.peer == rank) continue;
    sluice_status_t status = sluice_messages_receive(m, message.peer, i, 0, NULL);
    if (status == SLUICE_OK) status = sluice_messages_send(m, &message, 0, NULL);
    if (status == SLUICE_OK) status = sluice_messages_wait(m, NULL, &c);
    if (status != SLUICE_OK) return status;
    sluice_messages_release(m, c.arrival);
  }
  return SLUICE_OK;
}

static wait_fn_t present;

static int be_rank(mesh_end_t* end, void* shared) {
  sluice_comm_t *parent, *comm;
  sluice_messages_t* m;
  (void)shared;
  if (mesh_comm(end, UINT64_C(50000000000), &parent) != SLUICE_OK) return __LINE__;
  if (sluice_comm_create_tcp(parent, NULL, &comm) != SLUICE_OK) return __LINE__;
  if (sluice_messages_open(comm, NULL, &m) != SLUICE_OK) return __LINE__;
  if (!mesh_meet(end)) return __LINE__;
  if (end->rank == VICTIM) {
    ualarm(200000, 0); /* SIGALRM kills the rank, mostly while others wait; they report the same in any case */
    (void)present(m, end->rank);
    pause();
  }
  if (present(m, end->rank) != SLUICE_E_PEER_LOST) return __LINE__;
  if (last_error()->peer != VICTIM) {
    fprintf(stderr, "%s\n", last_message());
    return __LINE__;
  }
  sluice_messages_close(m);
  sluice_comm_destroy(comm);
  sluice_comm_destroy(parent);
  return 0;
}

static void kill_one(wait_fn_t wait) {
  present = wait;
  assert_true(mesh_run(WORLD, VICTIM, be_rank, NULL));
}

TEST(Kill_WhileOthersWaitForEachOther_AllNameIt) { kill_one(wait_for_another); }

TEST(Kill_WithHalvesOfMessagesUnderWay_AllNameIt) { kill_one(send_meanwhile); }
