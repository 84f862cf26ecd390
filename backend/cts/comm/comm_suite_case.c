#include "backend/cts/comm/comm_suite_case.h"

#include <stdio.h>
#include <string.h>

void cts_fail_check(cts_rank_t* me, const char* file, int line, const char* text) {
  if (me->failure[0] != '\0') return;
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  snprintf(me->failure, sizeof me->failure, "rank %d, %s:%d: %s; last error: %s, peer %d, \"%.300s\"", me->rank, file,
           line, text, sluice_status_name(why.status), why.peer, why.message);
}

int32_t cts_last_peer(void) {
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  return why.peer;
}

const cts_exception_t* cts_exception_of(const cts_transport_t* transport, const cts_case_t* c) {
  const cts_exception_t* e = transport->cannot;
  while (e != NULL && e->case_name != NULL && strcmp(e->case_name, c->name) != 0) ++e;
  return e != NULL && e->case_name != NULL ? e : NULL;
}
