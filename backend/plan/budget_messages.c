// SPDX-License-Identifier: Apache-2.0
#include "backend/plan/budget_messages.h"

#include <stdio.h>

#include "backend/base/text.h"

/* Returns the whole budget at which the share becomes `needed`, whatever was lost when the share was rounded down. */
static uint64_t whole_for(uint64_t needed, uint64_t share, uint64_t whole) {
  return (uint64_t)((double)needed * ((double)whole / (double)share) * (1 + 1e-12)) + 1;
}

sluice_budget_messages_t sluice_budget_messages(const sluice_budget_shares_t* shares, int of_host, uint64_t budget,
                                                uint64_t needed) {
  const uint64_t own = of_host ? shares->host_memory : shares->memory;
  const uint64_t whole = of_host ? shares->whole_host_memory : shares->whole_memory;
  const char *name = of_host ? "host memory budget" : "memory budget",
             *key = of_host ? "host_memory_budget" : "memory_budget";
  char size[SLUICE_SIZE_TEXT_BYTES], of_whole[SLUICE_SIZE_TEXT_BYTES];
  sluice_budget_messages_t messages;
  if (whole == 0 || whole == own || budget != own) { /* a plan of the host has a budget of its own */
    snprintf(messages.what, sizeof messages.what, "the %s of %llu bytes (%s)", name, (unsigned long long)budget,
             sluice_size_text(budget, size));
    snprintf(messages.raise, sizeof messages.raise, "%s to that", key);
    return messages;
  }
  snprintf(messages.what, sizeof messages.what, "%llu bytes (%s), this context's share of the %s of %llu (%s)",
           (unsigned long long)own, sluice_size_text(own, size), name, (unsigned long long)whole,
           sluice_size_text(whole, of_whole));
  snprintf(messages.raise, sizeof messages.raise, "%s to %llu", key, (unsigned long long)whole_for(needed, own, whole));
  return messages;
}
