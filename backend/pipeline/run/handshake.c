// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/run/state.h"

#include <stdio.h>
#include <string.h>

#include "backend/base/hash.h"
#include "backend/pipeline/policy.h"

#define PROTOCOL 2 /* of wire.h and of the control messages */
#define MAX_C    SLUICE_PIPELINE_MAX_VIRTUAL_STAGES

/* The values that must be equal on all ranks: X(type, member, value, the rest of a sluice_record_field_t). */
#define COMPARED(X)                                                                               \
  X(int32_t, protocol, PROTOCOL, .name = "the protocol of pipelines")                             \
  X(int32_t, major, SLUICE_VERSION_MAJOR, .name = "the library's major version")                  \
  X(int32_t, minor, SLUICE_VERSION_MINOR, .name = "the library's minor version")                  \
  X(int32_t, patch, SLUICE_VERSION_PATCH, .name = "the library's patch version")                  \
  X(int32_t, num_replicas, c->num_replicas, .name = "num_replicas")                               \
  X(int32_t, policy, terms->policy, .name = "policy", .word = policy_word)                        \
  X(int32_t, num_virtual, c->num_virtual, .name = "num_virtual")                                  \
  X(int32_t, placement, c->placement, .name = "placement")                                        \
  X(int32_t, separate_wgrad, c->separate_wgrad, .name = "separate_wgrad")                         \
  X(int32_t, receives_ahead, c->receives_ahead, .name = "receives_ahead")                         \
  X(int32_t, reduces, terms->reduces, .name = "whether callback reduce is given")                 \
  X(int32_t, in_flight, c->in_flight, .name = "in_flight")                                        \
  X(int32_t, held, c->held, .name = "held")                                                       \
  X(int32_t, has_partition, partition != NULL, .describe = describe_partition)                    \
  X(uint64_t, partition_hash, hash_text(partition), .describe = describe_partition)               \
  X(uint64_t, in_flight_of_hash,                                                                  \
    sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, record->in_flight_of, sizeof record->in_flight_of), \
    .describe = describe_in_flight_of)

/* The record of one rank. */
typedef struct record_s {
  sluice_refusal_t refusal;
  int32_t stage, replica;
  COMPARED(SLUICE_RECORD_MEMBER)
  char partition[128]; /* truncated */
  uint64_t byte_limit;
  int32_t in_flight_of[MAX_C];
  /* Values of this rank's virtual stages. */
  uint64_t activation_bytes[MAX_C];
  uint64_t held_bytes[MAX_C];
  uint8_t has_experts[MAX_C];
} record_t;

static const char* policy_word(int64_t policy) { return sluice_policy_name((int32_t)policy); }

static int describe_partition(const sluice_record_pair_t* pair, char* text, size_t room) {
  const record_t *own = pair->own, *peer = pair->peer;
  return snprintf(
      text, room,
      "the partition is \"%s\" on rank %d and \"%s\" on rank %d; partition the model in the same way on all ranks",
      peer->partition, pair->peer_rank, own->partition, pair->rank);
}

static int describe_in_flight_of(const sluice_record_pair_t* pair, char* text, size_t room) {
  return snprintf(text, room, "in_flight_of differs on ranks %d and %d", pair->peer_rank, pair->rank);
}

#define ROW(type, member, value, ...) {SLUICE_RECORD_FIELD(record_t, member), __VA_ARGS__},
static const sluice_record_field_t fields[] = {COMPARED(ROW)};

/* ---- this rank's record ---- */

static sluice_status_t check_places(const sluice_pipeline_config_t* c, int32_t rank, int32_t num_ranks) {
  SLUICE_TRY(SLUICE_REQUIRE(c->num_replicas >= 1 && num_ranks % c->num_replicas == 0,
                            "pipeline: num_replicas is %d, which does not divide the %d ranks of the communicator",
                            c->num_replicas, num_ranks));
  const int32_t p = num_ranks / c->num_replicas;
  SLUICE_TRY(SLUICE_REQUIRE(c->stage >= -1 && c->stage < p,
                            "pipeline: stage of rank %d is %d; there are %d stages, so give -1 to %d", rank, c->stage,
                            p, p - 1));
  return SLUICE_REQUIRE(c->replica >= -1 && c->replica < c->num_replicas,
                        "pipeline: replica of rank %d is %d; give -1 to %d", rank, c->replica, c->num_replicas - 1);
}

static sluice_pipeline_spec_t spec_of(const sluice_pipeline_terms_t* terms, int32_t num_ranks) {
  const sluice_pipeline_config_t* c = &terms->config;
  sluice_pipeline_spec_t spec;
  memset(&spec, 0, sizeof spec); /* it is hashed as bytes */
  spec.num_stages = num_ranks / c->num_replicas;
  spec.num_virtual = c->num_virtual;
  spec.num_micro_batches = 1;
  spec.placement = c->placement;
  spec.policy = terms->policy;
  spec.separate_wgrad = c->separate_wgrad;
  spec.receives_ahead = c->receives_ahead;
  spec.reduces = terms->reduces;
  return spec;
}

static sluice_status_t check_policy(const sluice_pipeline_spec_t* spec) {
  const sluice_policy_t* policy = sluice_policy(spec->policy);
  if (policy == NULL)
    return SLUICE_OK; /* open: a policy that supports the spec is chosen later, and backward_first supports any */
  SLUICE_TRY(SLUICE_REQUIRE(policy->placement < 0 || policy->placement == spec->placement,
                            "pipeline: policy %s needs placement %d; it is %d", policy->name, policy->placement,
                            spec->placement));
  return SLUICE_REQUIRE(policy->separate_wgrad < 0 || policy->separate_wgrad == (spec->separate_wgrad != 0),
                        "pipeline: policy %s needs separate_wgrad = %d", policy->name, policy->separate_wgrad);
}

/* Checks what does not depend on the batch: ranges, and whether the policy supports the spec. */
static sluice_status_t check(const sluice_pipeline_terms_t* terms, int32_t rank, int32_t num_ranks) {
  const sluice_pipeline_config_t* c = &terms->config;
  SLUICE_TRY(check_places(c, rank, num_ranks));
  const sluice_pipeline_spec_t spec = spec_of(terms, num_ranks);
  SLUICE_TRY(sluice_pipeline_spec_check(&spec));
  SLUICE_TRY(check_policy(&spec));
  SLUICE_TRY(SLUICE_REQUIRE(c->in_flight >= 0 && c->held >= 0,
                            "pipeline: in_flight is %d and held is %d; give at least 0", c->in_flight, c->held));
  for (int32_t i = 0; c->in_flight_of != NULL && i < sluice_pipeline_num_virtual_stages(&spec); ++i) {
    SLUICE_TRY(SLUICE_REQUIRE(c->in_flight_of[i] >= 1,
                              "pipeline: in_flight_of is %d for virtual stage %d; give at least 1", c->in_flight_of[i],
                              i));
  }
  return SLUICE_REQUIRE(
      c->memory_budget == 0 || c->activation_bytes != NULL,
      "pipeline: memory_budget needs activation_bytes: give the bytes of a micro-batch in each virtual stage");
}

static uint64_t hash_text(const char* text) {
  return text != NULL ? sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, text, strlen(text)) : 0;
}

static void fill(record_t* record, const sluice_pipeline_terms_t* terms, int32_t rank, int32_t num_ranks) {
  const sluice_pipeline_config_t* c = &terms->config;
  const int32_t p = num_ranks / c->num_replicas;
  const char* partition = c->partition;
  record->stage = c->stage < 0 ? rank % p : c->stage;
  record->replica = c->replica < 0 ? rank / p : c->replica;
  record->byte_limit = c->memory_budget;
  if (partition != NULL) (void)snprintf(record->partition, sizeof record->partition, "%s", partition);
  for (int32_t i = 0; c->in_flight_of != NULL && i < p * c->num_virtual; ++i) {
    record->in_flight_of[i] = c->in_flight_of[i];
  }
#define FILL(type, member, value, ...) record->member = (type)(value);
  COMPARED(FILL)
  for (int32_t k = 0; k < c->num_virtual; ++k) {
    if (c->activation_bytes != NULL) record->activation_bytes[k] = c->activation_bytes[k];
    if (c->held_bytes != NULL) record->held_bytes[k] = c->held_bytes[k];
    if (c->has_experts != NULL) record->has_experts[k] = c->has_experts[k] != 0;
  }
}

/* ---- results of the handshake ---- */

static const record_t* record_of(const sluice_records_t* records, int32_t rank) {
  return sluice_record_of(records, rank);
}

static sluice_status_t place(const sluice_records_t* records, sluice_stage_handshake_t* agreed) {
  const int32_t p = agreed->spec.num_stages;
  for (int32_t i = 0; i < records->world_size; ++i) agreed->rank_of[i] = -1;
  for (int32_t r = 0; r < records->world_size; ++r) {
    const record_t* record = record_of(records, r);
    int32_t* at = &agreed->rank_of[record->stage * agreed->num_replicas + record->replica];
    if (*at >= 0) {
      return SLUICE_FAIL_PEER(
          SLUICE_E_MISMATCH, records->rank, r,
          "pipeline: ranks %d and %d are both stage %d of replica %d; each of the %d stages has one "
          "rank in each of the %d replicas",
          *at, r, record->stage, record->replica, p, agreed->num_replicas);
    }
    *at = r;
    agreed->stage_of[r] = record->stage;
    agreed->replica_of[r] = record->replica;
  }
  return SLUICE_OK;
}

/* Replicas of a stage share its limits: the minimum of their byte limits, the maximum of their bytes per
 * micro-batch. */
static void fill_spec(const sluice_records_t* records, sluice_pipeline_spec_t* spec) {
  const record_t* own = record_of(records, records->rank);
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    spec->in_flight[c] = own->in_flight_of[c] > 0 ? own->in_flight_of[c] : own->in_flight;
    spec->held[c] = own->held;
  }
  for (int32_t r = 0; r < records->world_size; ++r) {
    const record_t* record = record_of(records, r);
    uint64_t* limit = &spec->byte_limit[record->stage];
    if (record->byte_limit > 0 && (*limit == 0 || record->byte_limit < *limit)) *limit = record->byte_limit;
    for (int32_t k = 0; k < spec->num_virtual; ++k) {
      const int32_t c = sluice_pipeline_virtual_stage(spec, record->stage, k);
      if (record->activation_bytes[k] > spec->activation_bytes[c]) {
        spec->activation_bytes[c] = record->activation_bytes[k];
      }
      if (record->held_bytes[k] > spec->held_bytes[c]) spec->held_bytes[c] = record->held_bytes[k];
      spec->expert_parallel[c] |= record->has_experts[k];
    }
  }
}

static sluice_status_t conclude(const sluice_records_t* records, const sluice_pipeline_terms_t* terms,
                                sluice_stage_handshake_t* agreed) {
  SLUICE_TRY(sluice_records_compare(records, fields, SLUICE_NUM_FIELDS(fields)));
  agreed->spec = spec_of(terms, records->world_size);
  agreed->num_replicas = terms->config.num_replicas;
  agreed->stage = record_of(records, records->rank)->stage;
  agreed->replica = record_of(records, records->rank)->replica;
  SLUICE_TRY(place(records, agreed));
  fill_spec(records, &agreed->spec);
  return SLUICE_OK;
}

static sluice_status_t take_tables(sluice_stage_handshake_t* agreed) {
  const uint64_t w = (uint64_t)agreed->num_ranks;
  agreed->rank_of = sluice_alloc(sluice_process_allocator(), 3 * w * sizeof(int32_t), "pipeline: ranks");
  if (agreed->rank_of == NULL) return sluice_alloc_status();
  agreed->stage_of = agreed->rank_of + w;
  agreed->replica_of = agreed->stage_of + w;
  return SLUICE_OK;
}

sluice_status_t sluice_stage_shake_hands(const sluice_pipeline_terms_t* terms, sluice_status_t mine,
                                         sluice_comm_t* comm, sluice_stage_handshake_t* out_agreed) {
  static const sluice_agreement_t opening = {"pipeline", "made no pipeline", "the configs of a pipeline"};
  *out_agreed = (sluice_stage_handshake_t){.num_ranks = comm != NULL ? comm->world_size : 1,
                                           .rank = comm != NULL ? comm->rank : 0};
  record_t record;
  memset(&record, 0, sizeof record);
  if (mine == SLUICE_OK) mine = take_tables(out_agreed);
  if (mine == SLUICE_OK) mine = check(terms, out_agreed->rank, out_agreed->num_ranks);
  if (mine == SLUICE_OK) fill(&record, terms, out_agreed->rank, out_agreed->num_ranks);
  sluice_records_t records;
  sluice_status_t status = sluice_comm_agree(comm, &opening, mine, &record, sizeof record, &records);
  if (status == SLUICE_OK) status = conclude(&records, terms, out_agreed);
  if (status != SLUICE_OK) sluice_stage_handshake_free(out_agreed);
  if (records.data != NULL) sluice_records_free(&records);
  return status;
}

void sluice_stage_handshake_free(sluice_stage_handshake_t* agreed) {
  sluice_free(sluice_process_allocator(), agreed->rank_of, 3 * (uint64_t)agreed->num_ranks * sizeof(int32_t));
  *agreed = (sluice_stage_handshake_t){.num_ranks = 0};
}
