// SPDX-License-Identifier: Apache-2.0
/* Describes a budget in messages. If a context has a share of a budget, both are named, and the user is told to raise
 * the whole. */
#pragma once

#include "backend/plan/problem.h"

typedef struct sluice_budget_messages_s {
  char what[160]; /* "the memory budget of 100 bytes (0.1 KiB)", or "60 bytes, this context's share of ..." */
  char raise[96]; /* "memory_budget to that", or "... to 170" if the share would then suffice */
} sluice_budget_messages_t;

/* Returns both texts. of_host: the budget of offloaded rows. budget: the current one, in bytes; needed: the required
 * one. */
sluice_budget_messages_t sluice_budget_messages(const sluice_budget_shares_t* shares, int of_host, uint64_t budget,
                                                uint64_t needed);
