// SPDX-License-Identifier: Apache-2.0
#include "backend/cts/comm/comm_suite_case.h"

#include <stdio.h>
#include <string.h>

void cts_fail_check(cts_rank_t* me, const char* file, int line, const char* text) {
  if (me->failure[0] != '\0') return;
  snprintf(me->failure, sizeof me->failure, "rank %d, %s:%d: %s; last error: %s, peer %d, \"%.300s\"", me->rank, file,
           line, text, sluice_status_name(last_error()->status), last_error()->peer, last_message());
}

int32_t cts_last_peer(void) { return last_error()->peer; }

const cts_exception_t* cts_exception_of(const cts_transport_t* transport, const cts_case_t* c) {
  const cts_exception_t* e = transport->cannot;
  while (e != NULL && e->case_name != NULL && strcmp(e->case_name, c->name) != 0) ++e;
  return e != NULL && e->case_name != NULL ? e : NULL;
}
