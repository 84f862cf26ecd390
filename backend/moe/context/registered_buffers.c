// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/context/registered_buffers.h"

#include "backend/base/log.h"

static sluice_status_t allocate_of_comm(void* comm, uint64_t bytes, void** out_data) {
  return ((sluice_comm_t*)comm)->vtable->allocate(comm, bytes, out_data);
}
static void release_of_comm(void* comm, void* data) { ((sluice_comm_t*)comm)->vtable->release(comm, data); }

/* The transport does not allocate memory that a budget counts to the byte or that the host's callbacks provide. */
void sluice_registered_buffers_open(sluice_context_t* context, int owns_memory) {
  const sluice_comm_t* comm = context->comm;
  context->registered_buffers = SLUICE_REGISTRATION_PLAIN;
  if (comm == NULL || comm->world_size == 1 || comm->vtable->allocate == NULL) return;
  context->registered_buffers = SLUICE_REGISTRATION_WILLING;
  if (context->memory_budget > 0)
    context->registration_refusal = "memory_budget is set, which counts buffers to the byte";
  if (!owns_memory) context->registration_refusal = "they come from the host's callbacks";
}

int32_t sluice_registered_buffers_word(sluice_context_t* context) {
  if (context->registered_buffers != SLUICE_REGISTRATION_WILLING) return context->registered_buffers;
  const char* refusal = context->comm->vtable->memory_refusal(context->comm);
  if (context->registration_refusal == NULL) context->registration_refusal = refusal;
  if (context->registration_refusal == NULL && context->pass_memory.slots.data != NULL) {
    context->registration_refusal = "they were allocated before the first call, for a plan";
  }
  return context->registration_refusal == NULL ? SLUICE_REGISTRATION_WILLING : SLUICE_REGISTRATION_PLAIN;
}

static int32_t first_of(const sluice_context_t* context, const int32_t* words, int32_t word) {
  int32_t r = 0;
  while (r < context->world_size && words[r] != word) ++r;
  return r < context->world_size ? r : -1;
}

sluice_status_t sluice_registered_buffers_agree(sluice_context_t* context, const int32_t* words, int32_t layer_id) {
  int32_t plain = first_of(context, words, SLUICE_REGISTRATION_PLAIN),
          own = first_of(context, words, SLUICE_REGISTRATION_OWN);
  if (plain >= 0 && own >= 0) {
    return SLUICE_FAIL_PEER(
        SLUICE_E_MISMATCH, context->rank, context->rank == own ? plain : own,
        "layer %d: slots of this context are the communicator's registered memory (%d) on rank %d and plain memory "
        "(%d) "
        "on rank %d: the ranks call layers of different contexts together; call those of the same context on all ranks",
        layer_id, SLUICE_REGISTRATION_OWN, own, SLUICE_REGISTRATION_PLAIN, plain);
  }
  if (context->registered_buffers != SLUICE_REGISTRATION_WILLING) return SLUICE_OK;
  if (plain < 0) {
    context->registered_buffers = SLUICE_REGISTRATION_OWN;
    context->pass_memory.slots.source = (sluice_arena_source_t){allocate_of_comm, release_of_comm, context->comm};
    return SLUICE_OK;
  }
  context->registered_buffers = SLUICE_REGISTRATION_PLAIN;
  const char* why = context->registration_refusal;
  sluice_log(SLUICE_LOG_INFO, "rank %d: %s: exchanges use no registered buffers, because rank %d has none%s%s",
             context->rank, context->comm->name, plain, why != NULL ? "; here: " : "", why != NULL ? why : "");
  return SLUICE_OK;
}
