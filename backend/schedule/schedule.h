// SPDX-License-Identifier: Apache-2.0
/* The schedule as data.
 *
 * A *template* does not depend on counts: for (direction, n, restore policy per tensor and chunk, weight-gradient mode,
 * ...) it lists the ops of one pass in program order. Each op has a lane, a chunk, and the slots it reads and writes;
 * its waits for other lanes are derived from those accesses, never written by hand. A template is built once and
 * cached; backend/moe binds everything that depends on counts (addresses, rows, boundaries) in each call.
 *
 * Program order is one legal sequential order of the pass. Lane order is program order restricted to the lane, and is
 * the same on all ranks, so that all ranks issue communication in the same order; empty chunks keep their ops. */
#pragma once

#include "backend/base/alloc.h"
#include "backend/base/lanes.h"
#include "backend/model/restore.h"
#include "backend/model/tensors.h"
#include "sluice/schedule.h"

/* The kinds of ops. S, C and R of the papers are: dispatch; gemm1 .. gemm2; combine. */
typedef enum sluice_op_kind_e {
  SLUICE_OP_DISPATCH = 0,    /* S: gather rows by destination, exchange */
  SLUICE_OP_UNPACK,          /* received and own rows -> T_DI, by local expert */
  SLUICE_OP_GEMM1,           /* T_DI -> T_M */
  SLUICE_OP_ACTIVATION,      /* T_M (+ bias) -> activated rows */
  SLUICE_OP_GEMM2,           /* activated rows -> T_DO (+ bias) */
  SLUICE_OP_EXPERT,          /* the host's own expert: T_DI -> T_DO */
  SLUICE_OP_COMBINE,         /* R: gather T_DO by source rank, exchange */
  SLUICE_OP_REDUCE,          /* weighted sum of the returned rows -> output tokens; chunk -1: for all chunks */
  SLUICE_OP_DISPATCH_GRAD,   /* S': gather output gradients and route weights, exchange */
  SLUICE_OP_UNPACK_GRAD,     /* -> dT_DO and row weights, by local expert */
  SLUICE_OP_GEMM2_GRAD,      /* dT_DO W2 -> gradient of the activated rows */
  SLUICE_OP_ACTIVATION_GRAD, /* -> dT_M, weighted activations, the gate's scalar per row */
  SLUICE_OP_GEMM1_GRAD,      /* dT_M W1 -> dT_DI */
  SLUICE_OP_EXPERT_GRAD,     /* the host's own expert backward */
  SLUICE_OP_COMBINE_GRAD,    /* R': gather dT_DI and the gate's scalars by source rank, exchange */
  SLUICE_OP_REDUCE_GRAD, /* sum of the returned rows -> input gradients; scalars -> route-weight gradients; chunk -1 */
  SLUICE_OP_WEIGHT_GRAD, /* dW2 = dT_DO^T act, dW1 = dT_M^T T_DI; chunk -1: over all chunks */
  SLUICE_OP_COPY_OUT,    /* T_DI or T_M -> its host buffer */
  SLUICE_OP_COPY_IN,     /* backward: a host buffer -> T_DI or T_M */
  SLUICE_OP_REDISPATCH,  /* backward: gather the forward's rows again, exchange; then UNPACK */
  SLUICE_OP_RECOMPUTE,   /* backward: T_DI -> T_M again, biases included */
  /* With two levels, the ops above work between nodes and these within a node (template/directions.h). */
  SLUICE_OP_NODE_DISPATCH,      /* rows from other nodes, and own ones, to the ranks of this node */
  SLUICE_OP_NODE_COMBINE,       /* sum T_DO by token, exchange with the ranks of this node */
  SLUICE_OP_NODE_DISPATCH_GRAD, /* as NODE_DISPATCH, for output gradients */
  SLUICE_OP_NODE_COMBINE_GRAD,  /* as NODE_COMBINE, for dT_DI */
  SLUICE_OP_COUNT
} sluice_op_kind_t;

/* A slot access: tensor kind and ring index. */
typedef struct sluice_slot_ref_s {
  int16_t tensor;
  int16_t slot;
} sluice_slot_ref_t;

/* Returns whether one of `refs` is this slot, or all slots of the tensor. */
static inline int sluice_slot_is_among(const sluice_slot_ref_t* refs, int32_t count, int32_t tensor, int32_t slot) {
  for (int32_t i = 0; i < count; ++i) {
    if (refs[i].tensor == tensor && (refs[i].slot == slot || refs[i].slot < 0)) return 1;
  }
  return 0;
}

#define SLUICE_OP_MAX_ACCESSES 8

/* A group is two adjacent exchanges. The first only packs and posts its rows, so that both are in flight and use both
 * directions of a link. Both have ended when the second has. */
enum { SLUICE_GROUP_NONE = 0, SLUICE_GROUP_OPENS = 1, SLUICE_GROUP_CLOSES = 2 };

typedef struct sluice_op_s {
  /* Fields that the executor reads are adjacent, because a GEMM evicts them from the caches. */
  int16_t kind;      /* sluice_op_kind_t */
  uint8_t lane;      /* SLUICE_LANE_* */
  uint8_t group;     /* SLUICE_GROUP_*, of an exchange */
  int32_t chunk;     /* -1: all chunks */
  int32_t first_dep; /* into template->deps */
  int32_t num_deps;
  int32_t first_of_run; /* the first op of its run, see sluice_ends_run */
  /* Fields that only proofs read. */
  int32_t num_reads;
  int32_t num_writes;
  sluice_slot_ref_t reads[SLUICE_OP_MAX_ACCESSES]; /* slot -1: every slot of the tensor */
  sluice_slot_ref_t writes[SLUICE_OP_MAX_ACCESSES];
  int32_t releases; /* bits of the accesses whose slots this op frees, see sluice_op_releases */
} sluice_op_t;

/* Bit of an access in sluice_op_t.releases. */
#define SLUICE_RELEASES_READ(i)  (1 << (i))
#define SLUICE_RELEASES_WRITE(i) (1 << (SLUICE_OP_MAX_ACCESSES + (i)))

/* The parts of a pass that hosts may call separately. Backward: DISPATCH sends output gradients to the experts, COMBINE
 * input gradients back to the tokens. */
enum { SLUICE_PART_DISPATCH = 1, SLUICE_PART_EXPERTS = 2, SLUICE_PART_COMBINE = 4 };

/* The input of a template. Equal specs give equal templates. */
typedef struct sluice_template_spec_s {
  int32_t direction;   /* SLUICE_FORWARD, SLUICE_BACKWARD */
  int32_t num_chunks;  /* n in [1, SLUICE_MAX_CHUNKS] */
  int32_t single_rank; /* W = 1: no exchanges, everything on the compute lane */
  int32_t keep;        /* forward: a backward follows; kept rows of a chunk outlive the pass */
  int32_t callback;    /* the host's own experts */
  int32_t gated;       /* T_M holds two halves, so that activated rows cannot replace it */
  int32_t dgrad;       /* backward: input gradients (and the gate's) are computed */
  int32_t wgrad;       /* backward: weight gradients: SLUICE_WGRAD_CALL_NONE, _NOW or _LATER */
  int32_t wgrad_mode;  /* SLUICE_WGRAD_* */
  int32_t only;        /* 0: the whole pass; else SLUICE_PART_* bits */
  int32_t reuse_saved; /* backward: dT_M may overwrite a kept T_M, which is then lost */
  int32_t bounded; /* under a plan, or if rows are restored to save memory: rings of two even if T_DI is kept, so that
                      slots do not grow with n */
  int32_t shares_act; /* with T_M of some chunk offloaded: T_ACT and dT_ACT alternate in T_M's two slots, for fewer
                         bytes and less overlap of copies */
  int32_t dedup; /* SLUICE_DEDUPLICATE_*: a token's row is sent once to each rank, or once to each node and from there
                    to its ranks; one sum returns. Not with single_rank or only */
  int16_t
      chunks_by_experts; /* chunks are cut by experts: a token's rows may be in several chunks, and one op sums all */
  int16_t grouped;       /* the rows of a chunk return while those of a later chunk are sent, as one group; not with
                            single_rank, only, two levels. With SLUICE_GROUPED_CHUNKS or fewer there is no such pair */
  int32_t low_rank;      /* GEMMs of experts have low-rank terms, which need T_LOW; not with callback */
  int32_t experts_first; /* what experts wait for is sent first: a chunk before an earlier one returns (forward), and a
                            chunk's gradients before its rows are dispatched again (backward) */
  uint8_t restore_input[SLUICE_MAX_CHUNKS]; /* SLUICE_RESTORE_* by chunk, the same on all ranks; 0 from index n on */
  uint8_t restore_pre_activation[SLUICE_MAX_CHUNKS]; /* may differ between ranks */
} sluice_template_spec_t;

/* Returns whether rows are sent once to each node, and within it once to each rank. */
static inline int sluice_has_two_levels(const sluice_template_spec_t* spec) {
  return spec->dedup == SLUICE_DEDUPLICATE_NODES;
}

/* Returns whether T_M of some chunk is offloaded. Otherwise shares_act has no effect, and is 0 in the templates of
 * layers. */
static inline int sluice_spec_offloads_m(const sluice_template_spec_t* spec) {
  const int has_policies = spec->keep || spec->direction == SLUICE_BACKWARD;
  for (int32_t i = 0; i < spec->num_chunks && has_policies && !spec->callback; ++i) {
    if (sluice_restore_is_offloaded(spec->restore_pre_activation[i])) return 1;
  }
  return 0;
}

/* Returns the tensor that the policies of T_M apply to. */
static inline int32_t sluice_pre_activation_of(const sluice_template_spec_t* spec) {
  return spec->callback ? SLUICE_T_DO : SLUICE_T_M;
}

typedef struct sluice_template_s {
  sluice_template_spec_t spec;
  uint64_t hash;      /* of the whole template */
  uint64_t comm_hash; /* of the communication lane: the part that must be equal on all ranks */
  int32_t num_ops;
  int32_t num_deps;
  int32_t ring[SLUICE_T_COUNT]; /* slots per tensor; 0: the tensor is not used */
  sluice_op_t* ops;
  int32_t* deps;            /* op indices on other lanes; those implied by others are omitted */
  sluice_slot_ref_t* homes; /* [T_COUNT][n], see sluice_template_home */
  uint64_t bytes;           /* of this allocation */
} sluice_template_t;

/* Returns whether the op is the last of its run. A run is a sequence of adjacent ops of one lane that a lane may
 * receive as one job: only its first op waits for other lanes, and other lanes wait only for its last. An exchange is a
 * run. */
static inline int sluice_ends_run(const sluice_template_t* t, int32_t index) {
  return index + 1 == t->num_ops || t->ops[index + 1].first_of_run == index + 1;
}

/* Returns the op whose end is the end of op `index`: itself, or the op that closes its group. */
static inline int32_t sluice_op_end(const sluice_op_t* ops, int32_t index) {
  return index + (ops[index].group == SLUICE_GROUP_OPENS);
}

/* Returns the slot of the chunk's rows of `tensor`. */
static inline sluice_slot_ref_t sluice_template_home(const sluice_template_t* t, int32_t tensor, int32_t chunk) {
  return t->homes[(int64_t)tensor * t->spec.num_chunks + chunk];
}

const char* sluice_op_name(int32_t kind);
const char* sluice_tensor_kind_name(int32_t tensor);
/* Returns whether the op exchanges with other ranks (it runs even after computation has failed, so that ranks stay in
 * step). */
int sluice_op_is_exchange(int32_t kind);

/* ---- json.c ---- */

/* Writes a template as JSON, with names instead of numbers: at most `room` bytes, terminated by a zero. Returns the
 * length without it, as snprintf. */
uint64_t sluice_schedule_write_json(const sluice_template_t* schedule, char* text, uint64_t room);
