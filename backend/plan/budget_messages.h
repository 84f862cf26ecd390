// SPDX-License-Identifier: Apache-2.0
/* A budget for people: where a context has a share of one, both are named, and what to raise is the whole. */
#ifndef SLUICE_BACKEND_PLAN_BUDGET_MESSAGES_H_
#define SLUICE_BACKEND_PLAN_BUDGET_MESSAGES_H_

#include "backend/plan/problem.h"

typedef struct sluice_budget_messages_s {
  char what[160]; /* "the memory budget of 100 bytes (0.1 KiB)", or "60 bytes, this context's share of ..." */
  char raise[96]; /* "memory_budget to that", or "... to 170" where the share would then do */
} sluice_budget_messages_t;

/* of_host: the budget of offloaded rows. budget: in force, in bytes; needed: what it must become. */
sluice_budget_messages_t sluice_budget_messages(const sluice_budget_shares_t* shares, int of_host, uint64_t budget,
                                                uint64_t needed);

#endif /* SLUICE_BACKEND_PLAN_BUDGET_MESSAGES_H_ */
