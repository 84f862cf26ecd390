#include "backend/pipeline/run/handshake.h"

#include <stdio.h>
#include <string.h>

#include "backend/base/check.h"
#include "backend/base/hash.h"
#include "backend/pipeline/policy_table.h"

#define PROTOCOL 2 /* of wire.h and of what stages say to each other */
#define MAX_C    SLUICE_PIPELINE_MAX_VIRTUAL_STAGES

/* What has to be equal on all ranks, by name. */
enum {
  FIELD_PROTOCOL = 0,
  FIELD_MAJOR,
  FIELD_MINOR,
  FIELD_PATCH,
  FIELD_NUM_REPLICAS,
  FIELD_POLICY,
  FIELD_NUM_VIRTUAL,
  FIELD_PLACEMENT,
  FIELD_WEIGHT_APART,
  FIELD_RECEIVES_AHEAD,
  FIELD_REDUCES,
  FIELD_IN_FLIGHT,
  FIELD_HELD,
  NUM_FIELDS
};

static const char* const field_names[NUM_FIELDS] = {"the protocol of pipelines",
                                                    "the library's major version",
                                                    "the library's minor version",
                                                    "the library's patch version",
                                                    "num_replicas",
                                                    "policy",
                                                    "num_virtual",
                                                    "placement",
                                                    "weight_apart",
                                                    "receives_ahead",
                                                    "whether callback reduce is given",
                                                    "in_flight",
                                                    "held"};

/* What a rank says of itself. */
typedef struct record_s {
  int32_t status; /* what it has come with */
  int32_t stage, replica;
  int32_t has_partition;
  int32_t fields[NUM_FIELDS];
  uint64_t partition_hash;
  char partition[128]; /* its beginning */
  char refusal[256];
  uint64_t byte_limit;
  int32_t in_flight_of[MAX_C];
  /* Of this rank's virtual stages. */
  uint64_t activation_bytes[MAX_C];
  uint64_t held_bytes[MAX_C];
  uint8_t has_experts[MAX_C];
} record_t;

typedef struct handshake_s {
  record_t* records; /* [num_ranks] */
  uint64_t bytes;
  int32_t rank, num_ranks;
} handshake_t;

/* ---- what this rank says ---- */

static sluice_status_t check_places(const sluice_pipeline_terms_t* terms, int32_t rank, int32_t num_ranks) {
  SLUICE_TRY(SLUICE_REQUIRE(terms->num_replicas >= 1 && num_ranks % terms->num_replicas == 0,
                            "pipeline: num_replicas is %d, which does not divide the %d ranks of the communicator",
                            terms->num_replicas, num_ranks));
  const int32_t p = num_ranks / terms->num_replicas;
  SLUICE_TRY(SLUICE_REQUIRE(terms->stage >= -1 && terms->stage < p,
                            "pipeline: stage of rank %d is %d; there are %d stages, so give -1 to %d", rank,
                            terms->stage, p, p - 1));
  return SLUICE_REQUIRE(terms->replica >= -1 && terms->replica < terms->num_replicas,
                        "pipeline: replica of rank %d is %d; give -1 to %d", rank, terms->replica,
                        terms->num_replicas - 1);
}

static sluice_pipeline_spec_t spec_of(const sluice_pipeline_terms_t* terms, int32_t num_ranks) {
  sluice_pipeline_spec_t spec;
  memset(&spec, 0, sizeof spec); /* it is hashed as it lies */
  spec.num_stages = num_ranks / terms->num_replicas;
  spec.num_virtual = terms->num_virtual;
  spec.num_micro_batches = 1;
  spec.placement = terms->placement;
  spec.policy = terms->policy;
  spec.weight_apart = terms->weight_apart;
  spec.receives_ahead = terms->receives_ahead;
  spec.reduces = terms->reduces;
  return spec;
}

static sluice_status_t check_policy(const sluice_pipeline_spec_t* spec) {
  const sluice_policy_t* policy = sluice_policy(spec->policy);
  if (policy == NULL) return SLUICE_OK; /* open: one that takes the spec is chosen, and backward_first takes any */
  SLUICE_TRY(SLUICE_REQUIRE(policy->placement < 0 || policy->placement == spec->placement,
                            "pipeline: policy %s asks for placement %d; it is %d", policy->name, policy->placement,
                            spec->placement));
  return SLUICE_REQUIRE(policy->weight_apart < 0 || policy->weight_apart == (spec->weight_apart != 0),
                        "pipeline: policy %s asks for weight_apart = %d", policy->name, policy->weight_apart);
}

/* What can be said without the batch: ranges, and whether the policy takes it. */
static sluice_status_t check(const sluice_pipeline_terms_t* terms, int32_t rank, int32_t num_ranks) {
  SLUICE_TRY(check_places(terms, rank, num_ranks));
  const sluice_pipeline_spec_t spec = spec_of(terms, num_ranks);
  SLUICE_TRY(sluice_pipeline_spec_check(&spec));
  SLUICE_TRY(check_policy(&spec));
  SLUICE_TRY(SLUICE_REQUIRE(terms->in_flight >= 0 && terms->held >= 0,
                            "pipeline: in_flight is %d and held is %d; give at least 0", terms->in_flight,
                            terms->held));
  for (int32_t c = 0; terms->in_flight_of != NULL && c < sluice_pipeline_num_virtual_stages(&spec); ++c) {
    SLUICE_TRY(SLUICE_REQUIRE(terms->in_flight_of[c] >= 1,
                              "pipeline: in_flight_of is %d for virtual stage %d; give at least 1",
                              terms->in_flight_of[c], c));
  }
  return SLUICE_REQUIRE(
      terms->byte_limit == 0 || terms->activation_bytes != NULL,
      "pipeline: memory_budget needs activation_bytes: what a micro-batch takes in each virtual stage");
}

static void fill(record_t* record, const sluice_pipeline_terms_t* terms, int32_t rank, int32_t num_ranks) {
  const int32_t p = num_ranks / terms->num_replicas;
  const int32_t fields[NUM_FIELDS] = {
      PROTOCOL,       SLUICE_VERSION_MAJOR, SLUICE_VERSION_MINOR, SLUICE_VERSION_PATCH, terms->num_replicas,
      terms->policy,  terms->num_virtual,   terms->placement,     terms->weight_apart,  terms->receives_ahead,
      terms->reduces, terms->in_flight,     terms->held};
  memcpy(record->fields, fields, sizeof fields);
  record->stage = terms->stage < 0 ? rank % p : terms->stage;
  record->replica = terms->replica < 0 ? rank / p : terms->replica;
  record->byte_limit = terms->byte_limit;
  if (terms->partition != NULL) {
    record->has_partition = 1;
    record->partition_hash = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, terms->partition, strlen(terms->partition));
    (void)snprintf(record->partition, sizeof record->partition, "%s", terms->partition);
  }
  for (int32_t c = 0; terms->in_flight_of != NULL && c < p * terms->num_virtual; ++c) {
    record->in_flight_of[c] = terms->in_flight_of[c];
  }
  for (int32_t k = 0; k < terms->num_virtual; ++k) {
    if (terms->activation_bytes != NULL) record->activation_bytes[k] = terms->activation_bytes[k];
    if (terms->held_bytes != NULL) record->held_bytes[k] = terms->held_bytes[k];
    if (terms->has_experts != NULL) record->has_experts[k] = terms->has_experts[k] != 0;
  }
}

static void say(record_t* record, const sluice_pipeline_terms_t* terms, sluice_status_t mine, int32_t rank,
                int32_t num_ranks) {
  if (mine == SLUICE_OK) mine = check(terms, rank, num_ranks);
  record->status = mine;
  if (mine == SLUICE_OK) {
    fill(record, terms, rank, num_ranks);
    return;
  }
  sluice_error_info_t why;
  sluice_error_capture(&why);
  (void)snprintf(record->refusal, sizeof record->refusal, "%.*s", (int)sizeof record->refusal - 1, why.message);
}

/* ---- what follows from all ---- */

static sluice_status_t check_refusals(const handshake_t* a, const sluice_error_info_t* own) {
  if (a->records[a->rank].status != SLUICE_OK) return sluice_error_adopt(own);
  for (int32_t r = 0; r < a->num_ranks; ++r) {
    if (a->records[r].status == SLUICE_OK) continue;
    return SLUICE_FAIL_PEER(SLUICE_E_PEER_REFUSED, a->rank, r, "rank %d made no pipeline: %s: %s", r,
                            sluice_status_name(a->records[r].status), a->records[r].refusal);
  }
  return SLUICE_OK;
}

static void describe(const record_t* record, int32_t field, char* text, size_t room) {
  if (field == FIELD_POLICY) {
    (void)snprintf(text, room, "%s", sluice_policy_name(record->fields[field]));
  } else {
    (void)snprintf(text, room, "%d", record->fields[field]);
  }
}

static sluice_status_t check_fields(const handshake_t* a) {
  const record_t* first = &a->records[0];
  for (int32_t field = 0; field < NUM_FIELDS; ++field) {
    for (int32_t r = 1; r < a->num_ranks; ++r) {
      if (a->records[r].fields[field] == first->fields[field]) continue;
      char there[32], here[32];
      describe(&a->records[r], field, there, sizeof there);
      describe(first, field, here, sizeof here);
      return SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, a->rank, r,
                              "pipeline: %s is %s on rank %d and %s on rank 0; give all ranks the same",
                              field_names[field], there, r, here);
    }
  }
  return SLUICE_OK;
}

static sluice_status_t check_texts(const handshake_t* a) {
  const record_t* first = &a->records[0];
  for (int32_t r = 1; r < a->num_ranks; ++r) {
    const record_t* other = &a->records[r];
    if (other->has_partition != first->has_partition || other->partition_hash != first->partition_hash) {
      return SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, a->rank, r,
                              "pipeline: the partition is \"%s\" on rank %d and \"%s\" on rank 0; cut the model alike",
                              other->partition, r, first->partition);
    }
    if (memcmp(other->in_flight_of, first->in_flight_of, sizeof first->in_flight_of) != 0) {
      return SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, a->rank, r, "pipeline: in_flight_of differs on ranks %d and 0", r);
    }
  }
  return SLUICE_OK;
}

static sluice_status_t place(const handshake_t* a, sluice_stage_handshake_t* agreed) {
  const int32_t p = agreed->spec.num_stages;
  for (int32_t i = 0; i < a->num_ranks; ++i) agreed->rank_of[i] = -1;
  for (int32_t r = 0; r < a->num_ranks; ++r) {
    const record_t* record = &a->records[r];
    int32_t* at = &agreed->rank_of[record->stage * agreed->num_replicas + record->replica];
    if (*at >= 0) {
      return SLUICE_FAIL_PEER(
          SLUICE_E_MISMATCH, a->rank, r,
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

/* Replicas of a stage share its limits: the least bytes of them, the most of what a micro-batch takes. */
static void fill_spec(const handshake_t* a, sluice_pipeline_spec_t* spec) {
  const record_t* own = &a->records[a->rank];
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    spec->in_flight[c] = own->in_flight_of[c] > 0 ? own->in_flight_of[c] : own->fields[FIELD_IN_FLIGHT];
    spec->held[c] = own->fields[FIELD_HELD];
  }
  for (int32_t r = 0; r < a->num_ranks; ++r) {
    const record_t* record = &a->records[r];
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

static sluice_status_t conclude(const handshake_t* a, const sluice_pipeline_terms_t* terms,
                                const sluice_error_info_t* own, sluice_stage_handshake_t* agreed) {
  SLUICE_TRY(check_refusals(a, own));
  SLUICE_TRY(check_fields(a));
  SLUICE_TRY(check_texts(a));
  agreed->spec = spec_of(terms, a->num_ranks);
  agreed->num_replicas = terms->num_replicas;
  agreed->stage = a->records[a->rank].stage;
  agreed->replica = a->records[a->rank].replica;
  SLUICE_TRY(place(a, agreed));
  fill_spec(a, &agreed->spec);
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

static sluice_status_t shake_hands(handshake_t* a, const sluice_pipeline_terms_t* terms, sluice_status_t mine,
                                   sluice_comm_t* comm, sluice_stage_handshake_t* agreed) {
  if (mine == SLUICE_OK) mine = take_tables(agreed);
  say(&a->records[a->rank], terms, mine, a->rank, a->num_ranks);
  sluice_error_info_t own;
  sluice_error_capture(&own);
  if (comm != NULL) {
    SLUICE_TRY(sluice_comm_all_gather(comm, a->records, sizeof *a->records, "the configs of a pipeline"));
  }
  return conclude(a, terms, &own, agreed);
}

sluice_status_t sluice_stage_shake_hands(const sluice_pipeline_terms_t* terms, sluice_status_t mine,
                                         sluice_comm_t* comm, sluice_stage_handshake_t* out_agreed) {
  *out_agreed = (sluice_stage_handshake_t){.num_ranks = comm != NULL ? comm->world_size : 1,
                                           .rank = comm != NULL ? comm->rank : 0};
  handshake_t a = {.rank = out_agreed->rank, .num_ranks = out_agreed->num_ranks};
  sluice_error_info_t own;
  sluice_error_capture(&own);
  a.bytes = (uint64_t)a.num_ranks * sizeof *a.records;
  a.records = sluice_alloc_zeroed(sluice_process_allocator(), a.bytes, "pipeline: configs");
  if (a.records == NULL) { /* the others wait for this rank's word, and it has none to send */
    if (comm != NULL) sluice_comm_abort(comm);
    return sluice_alloc_status();
  }
  if (mine != SLUICE_OK) (void)sluice_error_adopt(&own);
  sluice_status_t status = shake_hands(&a, terms, mine, comm, out_agreed);
  if (status != SLUICE_OK) sluice_stage_handshake_free(out_agreed);
  sluice_free(sluice_process_allocator(), a.records, a.bytes);
  return status;
}

void sluice_stage_handshake_free(sluice_stage_handshake_t* agreed) {
  sluice_free(sluice_process_allocator(), agreed->rank_of, 3 * (uint64_t)agreed->num_ranks * sizeof(int32_t));
  *agreed = (sluice_stage_handshake_t){.num_ranks = 0};
}
