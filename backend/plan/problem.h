// SPDX-License-Identifier: Apache-2.0
/* The problem that a plan solves: a layer's shape, and everything else that its bytes and seconds depend on. Plain
 * data: a problem for any number of ranks can be written down without running any of them. */
#pragma once

#include "backend/model/routing_sizes.h"
#include "backend/model/shape.h"
#include "backend/plan/plan_rings.h"

struct sluice_plan_data_s; /* plan.h */
struct sluice_plan_room_s;
struct sluice_plan_bytes_s;
struct sluice_device_s;

/* A context's budgets, for messages: a share is named together with the whole, which is what users can raise. */
typedef struct sluice_budget_shares_s {
  uint64_t memory, host_memory;             /* of this context; 0: none */
  uint64_t whole_memory, whole_host_memory; /* of which these are shares; 0: they are the whole */
} sluice_budget_shares_t;

typedef struct sluice_budget_messages_s {
  char what[160]; /* "the memory budget of 100 bytes (0.1 KiB)", or "60 bytes, this context's share of ..." */
  char raise[96]; /* "memory_budget to that", or "... to 170" if the share would then suffice */
} sluice_budget_messages_t;

/* Describes a budget in messages. If a context has a share of a budget, both are named, and the user is told to raise
 * the whole (plan_advice.c). of_host: the budget of offloaded rows. budget: the current one, in bytes; needed: the
 * required one. */
sluice_budget_messages_t sluice_budget_messages(const sluice_budget_shares_t* shares, int of_host, uint64_t budget,
                                                uint64_t needed);

typedef struct sluice_plan_problem_s {
  sluice_shape_t shape;
  uint64_t header_bytes; /* of the headers that begin each call */
  uint64_t gemm_bytes;   /* memory that the GEMMs may borrow */
  /* The device: bytes that passes with this many ops allocate once (NULL: none), and its scratch if it has memory of
   * its own. */
  uint64_t (*events_bytes)(const struct sluice_device_s* device, int32_t num_ops);
  const struct sluice_device_s* device;
  sluice_device_scratch_t device_scratch;
  sluice_ring_memo_t* rings; /* the known ones; borrowed, for one problem at a time */
  sluice_budget_shares_t shares;
  const struct sluice_plan_room_s* room; /* what plans for larger batches have reserved; borrowed. NULL: nothing */
  const struct sluice_plan_bytes_s*
      beside; /* what layers of other shapes use (neighbours.h); borrowed. NULL: nothing */
  /* price: seconds of forward and backward, the same on all ranks, negative if no machine is known. is_pinned: whether
   * a plan is fixed already. NULL: not available. */
  double (*price)(void* user, const struct sluice_plan_data_s* plan);
  int32_t (*is_pinned)(void* user, const struct sluice_plan_data_s* plan);
  void* user;
} sluice_plan_problem_t;
