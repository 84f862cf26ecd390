// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/handshake/handshake.h"

#include <assert.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/group/records.h"
#include "backend/model/pass_sizes.h"
#include "backend/model/tensors.h"
#include "backend/model/words.h"
#include "backend/moe/context/registered_buffers.h"
#include "backend/moe/handshake/header_buffers.h"
#include "backend/moe/routing/copies.h"

#define HEADER_MAGIC 0x51ce4845u
#define HEADER_BYTES SLUICE_HEADER_BYTES

/* n and the SLUICE_DEDUPLICATE_* of a pass in one number. A rank that had bound other values binds again. */
enum { BOUND_CHUNKS = 4096 };
static_assert(SLUICE_MAX_CHUNKS < BOUND_CHUNKS && SLUICE_DEDUPLICATE_NODES * BOUND_CHUNKS < INT16_MAX, "two in a word");
static int32_t bound_of(int32_t num_chunks, int32_t deduplicate) { return num_chunks + BOUND_CHUNKS * deduplicate; }

/* What the ranks compare before a call: X(type, member, this rank's value, other members of sluice_record_field_t). The
 * order matters: a difference in an early field explains later ones. A new option of a layer is one row. */
#define COMPARED(X)                                                                                               \
  X(uint32_t, magic, HEADER_MAGIC, .describe = describe_magic)                                                    \
  X(int32_t, layer_id, c->layer_id, .describe = describe_call)                                                    \
  X(uint64_t, call_number, context->comm->call_number, .describe = describe_call)                                 \
  X(int32_t, direction, proposal->direction, .describe = describe_call)                                           \
  X(int32_t, wishes, proposal->wishes, .describe = describe_wishes)                                               \
  X(int64_t, model_width, c->model_width, .name = "model_width")                                                  \
  X(int64_t, hidden_width, c->hidden_width, .name = "hidden_width")                                               \
  X(int32_t, num_experts, c->num_experts, .name = "num_experts")                                                  \
  X(int32_t, top_k, c->top_k, .name = "top_k")                                                                    \
  X(int32_t, config_chunks, c->num_chunks, .name = "num_chunks of the config (0: chosen by Sluice)")              \
  X(int32_t, capacity_rows, sluice_shape_capacity(&moe->shape), .name = "capacity_rows (0: exchange_mode exact)") \
  X(uint8_t, dtype, c->dtype, .name = "dtype", .word = dtype_word, .hint = DTYPE_HINT)                            \
  X(uint8_t, activation, c->activation, .name = "activation", .word = sluice_activation_word)                     \
  X(uint8_t, gated, c->gated, .name = "gated", .word = sluice_gated_word)                                         \
  X(uint8_t, bias, c->bias, .name = "bias")                                                                       \
  X(uint8_t, reuse, c->reuse, .name = "reuse")                                                                    \
  X(uint8_t, leanness, leanness_of(moe), .describe = describe_leanness)                                           \
  X(int8_t, wgrad_mode, c->wgrad_mode, .name = "wgrad_mode", .word = sluice_wgrad_word)                           \
  X(uint8_t, callback_experts, c->callback_experts, .name = "callback_experts")                                   \
  X(uint8_t, deduplicate, deduplication_of(c), .name = "deduplicate", .word = sluice_deduplicate_word)            \
  X(uint8_t, wire_dtype, sluice_layer_wire(moe), .name = "wire_dtype of the context", .word = sluice_wire_word)   \
  X(int16_t, ranks_per_node, c->deduplicate >= SLUICE_DEDUPLICATE_NODES ? moe->shape.ranks_per_node : 0,          \
    .name = "ranks_per_node of the context (0: one level)")                                                       \
  X(uint16_t, lora_rank, c->lora_rank, .name = "lora_rank")                                                       \
  X(uint8_t, chunking, c->chunking, .name = "chunking", .word = sluice_chunking_word)                             \
  X(uint8_t, grouping, c->grouping, .name = "grouping", .word = sluice_grouping_word)                             \
  X(uint64_t, memory_budget, context->memory_budget, .name = "memory_budget")                                     \
  X(uint64_t, host_memory_budget, context->host_memory_budget, .name = "host_memory_budget")                      \
  X(uint64_t, plan_hash, moe->plan_is_given ? sluice_plan_hash(moe->plan) : 0, .describe = describe_plans)        \
  X(int32_t, max_outstanding, context->max_outstanding, .name = "max_outstanding")                                \
  X(uint8_t, repeats, proposal->repeats != 0, .name = "repeats (activation checkpointing runs a forward again)")  \
  X(uint8_t, is_sized, proposal->is_sized, .name = "whether num_chunks is chosen by the number of tokens")        \
  X(int16_t, bound, bound_of(proposal->num_chunks, proposal->deduplicate), .describe = describe_bound)            \
  X(uint64_t, policy_hook, hook != NULL ? hook->state : 0, .describe = describe_hooks)                            \
  X(uint64_t, kind, moe->kind, .describe = describe_kind)                                                         \
  X(uint64_t, fingerprint, moe->fingerprint, .describe = describe_owners)                                         \
  X(uint64_t, comm_hash, proposal->comm_hash, .describe = describe_rows)

typedef struct header_s {
  COMPARED(SLUICE_RECORD_MEMBER)
  /* Sent, but not compared. */
  int16_t local_status;
  int16_t registered_buffers;
  uint32_t like;
  int32_t num_tokens;
  int32_t num_local; /* experts that this rank owns by its own tables */
  uint64_t base_bytes;
  uint64_t held_bytes;
  uint64_t held_pool_bytes;
  sluice_step_report_t report;
  union {
    char message[240]; /* of a refusal; without one the text for policy_hook and plan_hash */
    struct {
      char policy_hook_words[SLUICE_POLICY_HOOK_WORDS];
      char plan_message[104];
    };
  };
} header_t;

#define COUNTS_IN_HEADER ((int64_t)((HEADER_BYTES - sizeof(header_t)) / sizeof(int32_t)))
static_assert(sizeof(header_t) + 16 * 8 * sizeof(int32_t) <= HEADER_BYTES,
              "16 chunks of 8 local experts each need no second exchange");

/* The config names no mode of weight gradients, and this rank takes the mode that holds the fewest bytes. For 16-bit
 * layers that depends on whether T_M is restored. */
enum { IS_LEAN = 1, IS_LEAN_WITH_T_M = 2 };

/* ANY compares equal to NONE, which a rank that cannot choose has instead (settle_copies): the fields policy_hook and
 * kind then differ, and say why. */
static int32_t deduplication_of(const sluice_moe_config_t* c) {
  return c->deduplicate == SLUICE_DEDUPLICATE_ANY ? SLUICE_DEDUPLICATE_NONE : c->deduplicate;
}

static int32_t leanness_of(const sluice_moe_t* moe) {
  const sluice_shape_t* shape = &moe->shape;
  if (sluice_is_planned(moe) || !sluice_shape_is_lean(shape)) return 0;
  const int looks = shape->config.dtype == SLUICE_DTYPE_BF16 || shape->config.dtype == SLUICE_DTYPE_F16;
  return looks && sluice_shape_restores_pre_activation(shape) ? IS_LEAN_WITH_T_M : IS_LEAN;
}

static const char* direction_name(int32_t direction) {
  static const char* const names[] = {"forward", "backward", "replacement of experts"};
  return direction >= SLUICE_FORWARD && direction <= SLUICE_REPLACE_EXPERTS ? names[direction] : "unknown call";
}

static void fill_header(header_t* h, const sluice_moe_t* moe, const sluice_proposal_t* proposal) {
  const sluice_moe_config_t* c = &moe->shape.config;
  sluice_context_t* context = moe->context;
  const sluice_policy_hook_t* hook = context->policy_hook;
  memset(h, 0, sizeof *h);
#define FILL(type, member, value, ...) h->member = (type)(value);
  COMPARED(FILL)
#undef FILL
  h->local_status = (int16_t)proposal->local_status;
  h->like = proposal->like;
  h->num_tokens = (int32_t)proposal->num_tokens; /* a larger number has more than 2^31 routes and is refused */
  h->base_bytes = proposal->base_bytes;
  h->held_bytes = proposal->held_bytes;
  h->held_pool_bytes = proposal->held_pool_bytes;
  h->num_local = moe->shape.num_local;
  h->registered_buffers = (int16_t)sluice_registered_buffers_word(context);
  h->report = moe->decision.own;
  if (proposal->local_status != SLUICE_OK) {
    snprintf(h->message, sizeof h->message, "%s", proposal->local_message != NULL ? proposal->local_message : "");
    return;
  }
  if (hook != NULL) memcpy(h->policy_hook_words, hook->words, sizeof h->policy_hook_words);
  if (moe->plan_is_given) sluice_plan_message(moe->plan, h->plan_message, sizeof h->plan_message);
}

/* ---- differences that need more than two values to explain ---- */

#define COLLECTIVE "A MoE layer is a collective call of all its ranks, in evaluation too"
#define DTYPE_HINT \
  ": give all ranks parameters of one dtype, and enable autocast (which decides the dtype) on all ranks or on none"

/* For the describe_ functions: the two headers of `pair`, and their ranks. */
#define HEADERS(pair)                                      \
  const header_t *own = (pair)->own, *peer = (pair)->peer; \
  const int32_t rank = (pair)->rank, peer_rank = (pair)->peer_rank

static int describe_magic(const sluice_record_pair_t* pair, char* text, size_t room) {
  return snprintf(text, room, "rank %d sent no Sluice header (another version of Sluice, or another protocol)",
                  pair->peer_rank);
}

static int describe_call(const sluice_record_pair_t* pair, char* text, size_t room) {
  HEADERS(pair);
  return snprintf(text, room,
                  "rank %d is in call %llu (layer %d, %s) while rank %d is in call %llu (layer %d, %s): the ranks do "
                  "not call the same layers in the same order",
                  peer_rank, (unsigned long long)peer->call_number, peer->layer_id, direction_name(peer->direction),
                  rank, (unsigned long long)own->call_number, own->layer_id, direction_name(own->direction));
}

static int32_t wgrad_of(const header_t* h) { return h->wishes >> SLUICE_WISH_WGRAD; }

/* Ranks of one call that ask for different parts. A rank may ask for no weight gradients, but all ranks must compute
 * them at the same time. */
static int describe_wishes(const sluice_record_pair_t* pair, char* text, size_t room) {
  HEADERS(pair);
  if (own->direction == SLUICE_FORWARD) {
    const int32_t without = own->wishes == 0 ? rank : peer_rank;
    return snprintf(text, room,
                    "rank %d runs a forward without a backward (needs_backward 0: evaluation, no_grad, activation "
                    "checkpointing, or no trainable parameter) and rank %d one with a backward. " COLLECTIVE
                    ": run the same forwards on all ranks",
                    without, without == rank ? peer_rank : rank);
  }
  if (own->direction == SLUICE_BACKWARD && (peer->wishes & 1) == (own->wishes & 1) &&
      (wgrad_of(peer) == SLUICE_WGRAD_CALL_LATER) == (wgrad_of(own) == SLUICE_WGRAD_CALL_LATER))
    return 0;
  static const char* const weights[] = {"none", "now", "later"};
  return snprintf(text, room,
                  "the wanted gradients differ: rank %d: input gradients %s, weight gradients %s; rank %d: input "
                  "gradients %s, weight gradients %s: request the same gradients on all ranks",
                  peer_rank, peer->wishes & 1 ? "yes" : "no", weights[wgrad_of(peer) % 3], rank,
                  own->wishes & 1 ? "yes" : "no", weights[wgrad_of(own) % 3]);
}

static int describe_leanness(const sluice_record_pair_t* pair, char* text, size_t room) {
  return snprintf(
      text, room,
      "rank %d and rank %d keep different rows for the backward, or only one of them sets wgrad_mode, so their weight "
      "gradients would be computed at different times: give both the same wgrad_mode, deferred (0) or per chunk (1)",
      pair->peer_rank, pair->rank);
}

static const char* dtype_word(int64_t dtype) { return sluice_dtype_name((int32_t)dtype); }

static const char* or_none(const char* words) { return words[0] != '\0' ? words : "none"; }

static int describe_plans(const sluice_record_pair_t* pair, char* text, size_t room) {
  HEADERS(pair);
  return snprintf(text, room, "ranks were given different plans: rank %d: %.*s; rank %d: %s", peer_rank,
                  (int)sizeof peer->plan_message, or_none(peer->plan_message), rank, or_none(own->plan_message));
}

/* The n of a repeated or sized forward is not known yet; under a plan n is 0. The deduplication is chosen from the same
 * numbers on all ranks. */
static int describe_bound(const sluice_record_pair_t* pair, char* text, size_t room) {
  HEADERS(pair);
  if (own->repeats || own->is_sized) return 0;
  return snprintf(text, room, "num_chunks is %d on rank %d and %d on rank %d; give all ranks the same",
                  peer->bound % BOUND_CHUNKS, peer_rank, own->bound % BOUND_CHUNKS, rank);
}

/* The members of the config that only the checksum `kind` covers. */
static int describe_kind(const sluice_record_pair_t* pair, char* text, size_t room) {
  return snprintf(text, room,
                  "the layer's config differs between rank %d and rank %d, in restore_input, deduplicate, a list of "
                  "policies by chunk, exchange_mode, swiglu_alpha, swiglu_limit, swiglu_offset, weight_format or "
                  "weight_block; give all ranks the same",
                  pair->peer_rank, pair->rank);
}

static int describe_owners(const sluice_record_pair_t* pair, char* text, size_t room) {
  HEADERS(pair);
  return snprintf(text, room,
                  "rank %d and rank %d have different tables expert_rank or expert_slot (the owner of each expert; by "
                  "its own tables rank %d owns %d, rank %d owns %d): give all ranks the same",
                  peer_rank, rank, peer_rank, peer->num_local, rank, own->num_local);
}

static int describe_hooks(const sluice_record_pair_t* pair, char* text, size_t room) {
  HEADERS(pair);
  return snprintf(text, room,
                  "the tuners of the ranks differ: rank %d: %.*s; rank %d: %s: give all ranks the same mode, machine "
                  "and file of decisions",
                  peer_rank, (int)sizeof peer->policy_hook_words, or_none(peer->policy_hook_words), rank,
                  or_none(own->policy_hook_words));
}

/* Ranks whose placements differ see that in is_alike. */
static int describe_rows(const sluice_record_pair_t* pair, char* text, size_t room) {
  const header_t* own = pair->own;
  if (own->direction == SLUICE_REPLACE_EXPERTS) return 0;
  return snprintf(text, room,
                  "rank %d and rank %d exchange different rows in the %s (restore policy of T_DI, grouping, or part of "
                  "a split call): give all ranks the same options, and call the same parts on all ranks",
                  pair->peer_rank, pair->rank, direction_name(own->direction));
}

#define ROW(type, member, value, ...) {SLUICE_RECORD_FIELD(header_t, member), __VA_ARGS__},

static const sluice_record_field_t compared_fields[] = {COMPARED(ROW)};

static const header_t* header_of(const char* headers, int32_t rank) {
  return (const header_t*)(const void*)(headers + (size_t)rank * HEADER_BYTES);
}

/* Local refusal first, then refusals of others, then differences: every rank reports the same cause if it can. */
static sluice_status_t judge(const sluice_moe_t* moe, const header_t* own, const char* received,
                             const sluice_proposal_t* proposal) {
  const sluice_context_t* context = moe->context;
  if (proposal->local_status != SLUICE_OK) return proposal->local_status;
  for (int32_t r = 0; r < context->world_size; ++r) {
    if (r == context->rank) continue;
    const header_t* peer = header_of(received, r);
    if (peer->magic == HEADER_MAGIC && peer->local_status != SLUICE_OK) {
      return SLUICE_FAIL_PEER(SLUICE_E_PEER_REFUSED, context->rank, r, "layer %d: rank %d refused its %s: %s: %.*s",
                              own->layer_id, r, direction_name(peer->direction), sluice_status_name(peer->local_status),
                              (int)sizeof peer->message, peer->message);
    }
  }
  char text[512];
  for (int32_t r = 0; r < context->world_size; ++r) {
    const sluice_record_pair_t pair = {own, header_of(received, r), context->rank, r};
    if (memcmp(pair.own, pair.peer, offsetof(header_t, local_status)) == 0) continue; /* no difference, as usual */
    if (sluice_record_describe(compared_fields, SLUICE_NUM_FIELDS(compared_fields), &pair, text, sizeof text) == 0)
      continue;
    SLUICE_TRY(sluice_comm_check_given_up(context->comm, r, text));
    return SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, context->rank, r, "layer %d: %s", own->layer_id, text);
  }
  return SLUICE_OK;
}

/* Number of words for rank r in counts_out, and where they begin; numbers of copies in the header come first. */
static int64_t words_of(const sluice_binding_t* b, int32_t r) {
  return (int64_t)b->num_chunks * (sluice_layer_experts_of(b->moe, r) + b->copies->header_words);
}
static int32_t* words_for(const sluice_binding_t* b, int32_t r) {
  return b->counts_out + (int64_t)b->num_chunks * (b->moe->first_position[r] + r * b->copies->header_words);
}
static int32_t* words_from(const sluice_binding_t* b, int32_t r) {
  return b->counts_in + words_of(b, b->moe->context->rank) * r;
}

/* The counts for rank r start where its expert positions start; send_counts is [n, E]. */
static void pack_counts(const sluice_binding_t* b, int32_t r) {
  const sluice_moe_t* moe = b->moe;
  int32_t experts = sluice_layer_experts_of(moe, r);
  int32_t* out = sluice_copies_pack(b, r, words_for(b, r));
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    memcpy(out + (int64_t)i * experts,
           b->send_counts + (int64_t)i * moe->shape.config.num_experts + moe->first_position[r],
           (size_t)experts * sizeof(int32_t));
  }
}

/* Adds the rows of a forward to the layer's counters. */
static void count_rows(const sluice_binding_t* b) {
  const sluice_moe_t* moe = b->moe;
  const int32_t num_experts = moe->shape.config.num_experts;
  int64_t* rows = sluice_layer_expert_rows(moe);
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    const int32_t* counts = b->send_counts + (int64_t)i * num_experts;
    for (int32_t e = 0; e < num_experts; ++e) rows[e] += counts[moe->expert_position[e]];
  }
}

/* Exchanges the counts after the first `before` of each rank. Most layers have none, and exchange nothing. */
static sluice_status_t exchange_rest(const sluice_binding_t* b, const sluice_header_buffers_t* buffers, int64_t before,
                                     const char* phase) {
  sluice_context_t* context = b->moe->context;
  const sluice_exchange_arrays_t* a = &buffers->arrays;
  int64_t mine = words_of(b, context->rank);
  int any = 0;
  for (int32_t r = 0; r < context->world_size; ++r) {
    int64_t theirs = words_of(b, r), sent = sluice_min(theirs, before), received = sluice_min(mine, before);
    a->send[r] = words_for(b, r) + sent;
    a->send_bytes[r] = (uint64_t)(theirs - sent) * sizeof(int32_t);
    a->recv[r] = words_from(b, r) + received;
    a->recv_bytes[r] = (uint64_t)(mine - received) * sizeof(int32_t);
    /* Every rank decides the same: whether some rank has more counts than have been sent. */
    any |= theirs > before;
  }
  return any ? sluice_header_exchange(context->comm, a, phase) : SLUICE_OK;
}

/* A bad count of a peer would become a bad address. */
static sluice_status_t check_counts(const sluice_binding_t* b) {
  int64_t mine = (int64_t)b->num_chunks * b->num_local;
  for (int64_t i = 0; i < mine * b->world_size; ++i) {
    if (b->recv_counts[i] < 0) {
      return SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, b->moe->context->rank, (int32_t)(i / mine),
                              "layer %d: rank %d announced a negative number of rows", b->moe->shape.config.layer_id,
                              (int32_t)(i / mine));
    }
  }
  return SLUICE_OK;
}

sluice_status_t sluice_exchange_counts(sluice_binding_t* b) {
  const sluice_moe_t* moe = b->moe;
  sluice_context_t* context = moe->context;
  if (context->world_size == 1) return SLUICE_OK;
  sluice_header_buffers_t buffers;
  SLUICE_TRY(sluice_header_buffers_take(context, &buffers));
  for (int32_t r = 0; r < context->world_size; ++r) pack_counts(b, r);
  char phase[96];
  snprintf(phase, sizeof phase, "counts of layer %d", moe->shape.config.layer_id);
  SLUICE_TRY(exchange_rest(b, &buffers, 0, phase));
  sluice_copies_unpack(b);
  count_rows(b);
  return check_counts(b);
}

static void learn(const char* received, int32_t world_size, int32_t rank, sluice_handshake_t* out) {
  for (int32_t r = 0; r < world_size; ++r) {
    const header_t* peer = header_of(received, r);
    if (r == rank) continue;
    if (peer->num_tokens > out->max_tokens) out->max_tokens = peer->num_tokens;
    if (peer->base_bytes > out->base_bytes) out->base_bytes = peer->base_bytes;
    if (peer->held_bytes > out->held_bytes) out->held_bytes = peer->held_bytes;
    if (peer->held_pool_bytes > out->held_pool_bytes) out->held_pool_bytes = peer->held_pool_bytes;
    out->like &= peer->like;
    out->wants_wgrad |= wgrad_of(peer) != SLUICE_WGRAD_CALL_NONE;
    out->is_alike &= peer->comm_hash == header_of(received, rank)->comm_hash;
  }
}

static void take_chunks(const sluice_moe_t* moe, const char* received, const sluice_pass_choice_t* choice,
                        sluice_handshake_t* out) {
  out->num_chunks = choice->num_chunks;
  for (int32_t r = 0; r < moe->context->world_size; ++r) {
    out->is_uncounted |= header_of(received, r)->bound != bound_of(choice->num_chunks, choice->deduplicate);
  }
}

/* Finds the forward that this one repeats on every rank; each rank had bound chunks before it knew. Must run before
 * hear_reports, which puts the n of the next forward into the decision state. */
static void learn_repeated(sluice_moe_t* moe, const char* received, sluice_handshake_t* out) {
  const sluice_replay_forward_t* repeated = sluice_replay_choose(&moe->replay, out->like);
  take_chunks(moe, received, repeated != NULL ? &repeated->choice : &moe->decision.choice, out);
}

/* Finds the choice of all ranks for the largest T; each rank had bound chunks for its own T. Must run before
 * hear_reports, so that ranks of equal T have bound the right chunks. */
static void learn_size(sluice_moe_t* moe, const char* received, sluice_handshake_t* out) {
  moe->context->policy_hook->vtable->of_size(moe->context->policy_hook, moe, out->max_tokens, &out->sized);
  out->is_sized = 1;
  take_chunks(moe, received, &out->sized, out);
}

/* Passes the reports of all ranks to the policy hook; without buffers this rank's alone. Overwrites arrays.send. */
static void hear_reports(sluice_moe_t* moe, const sluice_header_buffers_t* buffers) {
  sluice_context_t* context = moe->context;
  const sluice_step_report_t* own = &moe->decision.own;
  const sluice_step_report_t** reports =
      buffers == NULL ? &own : (const sluice_step_report_t**)(void*)buffers->arrays.send;
  for (int32_t r = 0; r < context->world_size && buffers != NULL; ++r) {
    reports[r] = &header_of(buffers->recv, r)->report;
  }
  int64_t* rank_rows = sluice_layer_rank_rows(moe);
  for (int32_t r = 0; r < context->world_size && buffers != NULL; ++r) rank_rows[r] += reports[r]->rows;
  rank_rows[context->world_size] += buffers != NULL && own->rows > 0;
  if (moe->decision.table != NULL) {
    context->policy_hook->vtable->agree(context->policy_hook, moe, &moe->decision, reports, context->world_size);
  }
  memset(moe->decision.own.pass, 0, sizeof moe->decision.own.pass); /* no pass is reported twice */
  moe->decision.own.memory_rate = moe->decision.own.copy_rate = 0;
}

/* Uses arrays.send_bytes as scratch, which is free until the next exchange. */
static sluice_status_t agree_on_memory(const sluice_moe_t* moe, const sluice_header_buffers_t* buffers) {
  int32_t* words = (int32_t*)(void*)buffers->arrays.send_bytes;
  for (int32_t r = 0; r < moe->context->world_size; ++r) words[r] = header_of(buffers->recv, r)->registered_buffers;
  return sluice_registered_buffers_agree(moe->context, words, moe->shape.config.layer_id);
}

sluice_handshake_t sluice_handshake_alone(const sluice_proposal_t* proposal) {
  return (sluice_handshake_t){
      .agreed_ns = sluice_now_ns(),
      .max_tokens = proposal->num_tokens,
      .base_bytes = proposal->base_bytes,
      .held_bytes = proposal->held_bytes,
      .held_pool_bytes = proposal->held_pool_bytes,
      .like = proposal->like,
      .num_chunks = proposal->num_chunks,
      .wants_wgrad = proposal->wishes >> SLUICE_WISH_WGRAD != SLUICE_WGRAD_CALL_NONE,
      .is_alike = 1,
  };
}

static int is_without_backward(const sluice_proposal_t* proposal) {
  return proposal->direction == SLUICE_FORWARD && proposal->local_status == SLUICE_OK && proposal->wishes == 0;
}

/* A rank that times out here has usually made a call that the other ranks do not make. */
static sluice_status_t explain_wait(sluice_status_t status) {
  if (status != SLUICE_E_TIMED_OUT) return status;
  sluice_error_info_t info;
  sluice_error_capture(&info);
  if (strstr(info.message, COLLECTIVE) != NULL || strstr(info.message, " waited ") == NULL) return status;
  const size_t used = strlen(info.message);
  snprintf(info.message + used, sizeof info.message - used,
           " " COLLECTIVE
           ": run the same forwards on all ranks; a rank that has no data left can use other data or 0 tokens (in "
           "transformers generate(synced_gpus=True)).");
  return sluice_error_adopt(&info);
}

sluice_status_t sluice_handshake(sluice_moe_t* moe, const sluice_proposal_t* proposal, sluice_binding_t* binding,
                                 sluice_handshake_t* out_handshake) {
  sluice_context_t* context = moe->context;
  *out_handshake = sluice_handshake_alone(proposal);
  if (context->world_size == 1) {
    if (proposal->local_status == SLUICE_OK && proposal->direction == SLUICE_FORWARD) hear_reports(moe, NULL);
    return proposal->local_status;
  }
  sluice_error_info_t refusal; /* keeps the record of a local refusal over the exchange */
  sluice_error_capture(&refusal);
  sluice_header_buffers_t buffers;
  SLUICE_TRY(sluice_header_buffers_take(context, &buffers));
  ++context->comm->call_number;
  header_t own;
  fill_header(&own, moe, proposal);
  for (int32_t r = 0; r < context->world_size; ++r) {
    char* header = buffers.send + (size_t)r * HEADER_BYTES;
    memset(header, 0, HEADER_BYTES);
    memcpy(header, &own, sizeof own);
    if (binding != NULL && proposal->local_status == SLUICE_OK) {
      pack_counts(binding, r);
      memcpy(header + sizeof own, words_for(binding, r),
             (size_t)sluice_min(words_of(binding, r), COUNTS_IN_HEADER) * sizeof(int32_t));
    }
  }
  memcpy(buffers.recv + (size_t)context->rank * HEADER_BYTES, &own, sizeof own);
  char phase[96];
  snprintf(phase, sizeof phase, "header of layer %d, %s%s", moe->shape.config.layer_id,
           direction_name(proposal->direction), is_without_backward(proposal) ? " without a backward" : "");
  uint64_t begin_ns = sluice_now_ns();
  const sluice_status_t exchanged = sluice_header_exchange(context->comm, &buffers.arrays, phase);
  if (exchanged != SLUICE_OK) return explain_wait(exchanged);
  out_handshake->agreed_ns = sluice_now_ns();
  out_handshake->header_ns = out_handshake->agreed_ns - begin_ns;
  sluice_status_t verdict = judge(moe, &own, buffers.recv, proposal);
  if (verdict != SLUICE_OK) return proposal->local_status != SLUICE_OK ? sluice_error_adopt(&refusal) : verdict;
  SLUICE_TRY(agree_on_memory(moe, &buffers));
  learn(buffers.recv, context->world_size, context->rank, out_handshake);
  if (proposal->repeats && binding != NULL) learn_repeated(moe, buffers.recv, out_handshake);
  if (proposal->is_sized) learn_size(moe, buffers.recv, out_handshake);
  if (proposal->direction == SLUICE_FORWARD) hear_reports(moe, &buffers);
  if (binding == NULL) return SLUICE_OK;
  if (out_handshake->is_uncounted) return SLUICE_OK;
  for (int32_t r = 0; r < context->world_size; ++r) {
    if (r == context->rank) continue;
    memcpy(words_from(binding, r), buffers.recv + (size_t)r * HEADER_BYTES + sizeof(header_t),
           (size_t)sluice_min(words_of(binding, context->rank), COUNTS_IN_HEADER) * sizeof(int32_t));
  }
  SLUICE_TRY(exchange_rest(binding, &buffers, COUNTS_IN_HEADER, phase));
  sluice_copies_unpack(binding);
  count_rows(binding);
  return check_counts(binding);
}

/* ---- refusals and failures ---- */

static int is_final(sluice_status_t status) {
  return status == SLUICE_E_PEER_LOST || status == SLUICE_E_TIMED_OUT || status == SLUICE_E_ABORTED;
}

sluice_status_t sluice_fail_pass(sluice_context_t* context, sluice_status_t status, int in_step) {
  if (context->world_size == 1 || is_final(status)) return status;
  sluice_error_info_t info;
  sluice_error_capture(&info);
  if (!in_step) {
    sluice_comm_abort(context->comm);
    return sluice_error_adopt(&info);
  }
  context->pending_failure = status;
  snprintf(context->failure_text, sizeof context->failure_text, "an earlier pass failed there: %.200s", info.message);
  return status;
}

sluice_status_t sluice_take_refusal(sluice_context_t* context, sluice_status_t refusal, char* text,
                                    uint64_t text_bytes) {
  if (refusal != SLUICE_OK) {
    sluice_error_info_t info;
    sluice_error_capture(&info);
    snprintf(text, text_bytes, "%s", info.message);
    return refusal;
  }
  if (context->pending_failure == SLUICE_OK) return SLUICE_OK;
  sluice_status_t status = context->pending_failure;
  context->pending_failure = SLUICE_OK;
  snprintf(text, text_bytes, "%s", context->failure_text);
  return SLUICE_FAIL(
      status,
      "an earlier pass failed on this rank, and the other ranks have now been notified; the next call can proceed (%s)",
      context->failure_text);
}
