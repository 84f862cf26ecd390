// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/serial/serial.h"

#include <string.h>

#include "backend/base/hash.h"
#include "backend/schedule/check/check.h"
#include "backend/schedule/template/template.h"

#define MAGIC 0x44534c53 /* "SLSD" */
/* Earlier forms: 1: without dedup and T_COPY_WEIGHTS; 2: without chunks_by_experts; 3: without releases; 4: without
 * shares_act; 5: without ops of two levels and T_NODE; 6: without groups; 7: without low_rank and T_LOW; 8: without
 * experts_first */
#define FORM 9

/* The spec's numbers in the order of the file. */
#define NUM_SPEC 18
static void spec_numbers(const sluice_template_spec_t* s, int32_t* out) {
  const int32_t numbers[NUM_SPEC] = {
      s->direction,  s->num_chunks, s->single_rank, s->keep,         s->callback, s->gated, s->dgrad,
      s->wgrad,      s->wgrad_mode, s->only,        s->reuse_saved,  s->bounded,  s->dedup, s->chunks_by_experts,
      s->shares_act, s->grouped,    s->low_rank,    s->experts_first};
  memcpy(out, numbers, sizeof numbers);
}

static const struct {
  const char* name;
  int32_t least, most;
} spec_fields[NUM_SPEC] = {{"direction", 0, 1},   {"num_chunks", 1, SLUICE_MAX_CHUNKS},
                           {"single_rank", 0, 1}, {"keep", 0, 1},
                           {"callback", 0, 1},    {"gated", 0, 1},
                           {"dgrad", 0, 1},       {"wgrad", 0, SLUICE_WGRAD_CALL_LATER},
                           {"wgrad_mode", 0, 1},  {"only", 0, 7},
                           {"reuse_saved", 0, 1}, {"bounded", 0, 1},
                           {"dedup", 0, 2},       {"chunks_by_experts", 0, 1},
                           {"shares_act", 0, 1},  {"grouped", 0, 1},
                           {"low_rank", 0, 1},    {"experts_first", 0, 1}};

/* ---- writing ---- */

typedef struct sink_s {
  unsigned char* data;
  uint64_t room, used;
  uint64_t checksum;
} sink_t;

static void put(sink_t* sink, int32_t value) {
  uint32_t bits = (uint32_t)value;
  for (int i = 0; i < 4; ++i, ++sink->used) {
    unsigned char byte = (unsigned char)(bits >> (8 * i));
    sink->checksum = sluice_hash_bytes(sink->checksum, &byte, 1);
    if (sink->used < sink->room) sink->data[sink->used] = byte;
  }
}

static void put_refs(sink_t* sink, const sluice_slot_ref_t* refs, int32_t count) {
  put(sink, count);
  for (int32_t i = 0; i < count; ++i) put(sink, refs[i].tensor), put(sink, refs[i].slot);
}

uint64_t sluice_schedule_write(const sluice_template_t* t, void* data, uint64_t room) {
  sink_t sink = {.data = data, .room = data == NULL ? 0 : room, .checksum = SLUICE_HASH_OF_NOTHING};
  int32_t n = t->spec.num_chunks, numbers[NUM_SPEC];
  spec_numbers(&t->spec, numbers);
  put(&sink, MAGIC), put(&sink, FORM);
  for (int i = 0; i < NUM_SPEC; ++i) put(&sink, numbers[i]);
  for (int32_t i = 0; i < n; ++i) put(&sink, t->spec.restore_input[i]);
  for (int32_t i = 0; i < n; ++i) put(&sink, t->spec.restore_pre_activation[i]);
  for (int32_t i = 0; i < SLUICE_T_COUNT; ++i) put(&sink, t->ring[i]);
  put(&sink, t->num_ops), put(&sink, t->num_deps);
  for (int32_t i = 0; i < t->num_ops; ++i) {
    const sluice_op_t* op = &t->ops[i];
    put(&sink, op->kind), put(&sink, op->lane), put(&sink, op->chunk), put(&sink, op->group);
    put_refs(&sink, op->reads, op->num_reads);
    put_refs(&sink, op->writes, op->num_writes);
    put(&sink, op->releases);
    put(&sink, op->num_deps);
    for (int32_t d = 0; d < op->num_deps; ++d) put(&sink, t->deps[op->first_dep + d]);
  }
  for (int32_t i = 0; i < SLUICE_T_COUNT * n; ++i) put(&sink, t->homes[i].tensor), put(&sink, t->homes[i].slot);
  uint64_t checksum = sink.checksum;
  put(&sink, (int32_t)(uint32_t)checksum), put(&sink, (int32_t)(uint32_t)(checksum >> 32));
  return sink.used;
}

/* ---- reading ---- */

typedef struct source_s {
  const unsigned char* data;
  uint64_t bytes, used;
} source_t;

static sluice_status_t take(source_t* source, const char* field, int32_t least, int32_t most, int32_t* out) {
  if (source->bytes - source->used < 4) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "schedule: the bytes end before %s (at byte %llu)", field,
                       (unsigned long long)source->used);
  }
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= (uint32_t)source->data[source->used++] << (8 * i);
  int32_t value = (int32_t)bits;
  if (value < least || value > most) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "schedule: %s is %d; it must be in [%d, %d]", field, value, least,
                       most);
  }
  *out = value;
  return SLUICE_OK;
}

static sluice_status_t take_i16(source_t* source, const char* field, int32_t least, int32_t most, int16_t* out) {
  int32_t value = 0;
  SLUICE_TRY(take(source, field, least, most, &value));
  *out = (int16_t)value;
  return SLUICE_OK;
}

static sluice_status_t take_u8(source_t* source, const char* field, int32_t least, int32_t most, uint8_t* out) {
  int32_t value = 0;
  SLUICE_TRY(take(source, field, least, most, &value));
  *out = (uint8_t)value;
  return SLUICE_OK;
}

static sluice_status_t read_spec(source_t* source, sluice_template_spec_t* spec) {
  int32_t v[NUM_SPEC], restore = 0;
  for (int i = 0; i < NUM_SPEC; ++i) {
    SLUICE_TRY(take(source, spec_fields[i].name, spec_fields[i].least, spec_fields[i].most, &v[i]));
  }
  *spec = (sluice_template_spec_t){.direction = v[0],
                                   .num_chunks = v[1],
                                   .single_rank = v[2],
                                   .keep = v[3],
                                   .callback = v[4],
                                   .gated = v[5],
                                   .dgrad = v[6],
                                   .wgrad = v[7],
                                   .wgrad_mode = v[8],
                                   .only = v[9],
                                   .reuse_saved = v[10],
                                   .bounded = v[11],
                                   .dedup = v[12],
                                   .chunks_by_experts = (int16_t)v[13],
                                   .shares_act = v[14],
                                   .grouped = (int16_t)v[15],
                                   .low_rank = v[16],
                                   .experts_first = v[17]};
  for (int32_t i = 0; i < spec->num_chunks; ++i) {
    SLUICE_TRY(take(source, "restore_input", 0, SLUICE_NUM_RESTORES - 1, &restore));
    spec->restore_input[i] = (uint8_t)restore;
  }
  for (int32_t i = 0; i < spec->num_chunks; ++i) {
    SLUICE_TRY(take(source, "restore_pre_activation", 0, SLUICE_NUM_RESTORES - 1, &restore));
    spec->restore_pre_activation[i] = (uint8_t)restore;
  }
  return SLUICE_OK;
}

static sluice_status_t read_refs(source_t* source, const char* field, sluice_slot_ref_t* refs, int32_t* out_count) {
  SLUICE_TRY(take(source, field, 0, SLUICE_OP_MAX_ACCESSES, out_count));
  for (int32_t i = 0; i < *out_count; ++i) {
    SLUICE_TRY(take_i16(source, field, 0, SLUICE_T_COUNT - 1, &refs[i].tensor));
    SLUICE_TRY(take_i16(source, field, -1, SLUICE_MAX_CHUNKS - 1, &refs[i].slot));
  }
  return SLUICE_OK;
}

static sluice_status_t read_op(source_t* source, sluice_template_t* t, sluice_op_t* op, int32_t* next_dep) {
  SLUICE_TRY(take_i16(source, "an op's kind", 0, SLUICE_OP_COUNT - 1, &op->kind));
  SLUICE_TRY(take_u8(source, "an op's lane", 0, SLUICE_NUM_LANES - 1, &op->lane));
  SLUICE_TRY(take(source, "an op's chunk", -1, t->spec.num_chunks - 1, &op->chunk));
  SLUICE_TRY(take_u8(source, "an op's group", SLUICE_GROUP_NONE, SLUICE_GROUP_CLOSES, &op->group));
  SLUICE_TRY(read_refs(source, "an op's reads", op->reads, &op->num_reads));
  SLUICE_TRY(read_refs(source, "an op's writes", op->writes, &op->num_writes));
  SLUICE_TRY(take(source, "an op's releases", 0, SLUICE_RELEASES_WRITE(SLUICE_OP_MAX_ACCESSES) - 1, &op->releases));
  SLUICE_TRY(take(source, "an op's number of dependencies", 0, t->num_deps - *next_dep, &op->num_deps));
  op->first_dep = *next_dep;
  for (int32_t d = 0; d < op->num_deps; ++d) {
    SLUICE_TRY(take(source, "a dependency", 0, t->num_ops - 1, &t->deps[(*next_dep)++]));
  }
  return SLUICE_OK;
}

static sluice_status_t read_body(source_t* source, sluice_template_t* t) {
  int32_t n = t->spec.num_chunks, two = sluice_has_two_levels(&t->spec), next_dep = 0;
  for (int32_t i = 0; i < SLUICE_T_COUNT; ++i) SLUICE_TRY(take(source, "a ring", 0, SLUICE_MAX_CHUNKS, &t->ring[i]));
  SLUICE_TRY(take(source, "num_ops", 0, sluice_template_max_ops(n, two), &t->num_ops));
  SLUICE_TRY(take(source, "num_deps", 0, sluice_template_max_deps(n, two), &t->num_deps));
  for (int32_t i = 0; i < t->num_ops; ++i) SLUICE_TRY(read_op(source, t, &t->ops[i], &next_dep));
  if (next_dep != t->num_deps) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "schedule: num_deps is %d, but the ops have %d", t->num_deps,
                       next_dep);
  }
  for (int32_t i = 0; i < SLUICE_T_COUNT * n; ++i) {
    SLUICE_TRY(take_i16(source, "a home's tensor", 0, SLUICE_T_COUNT - 1, &t->homes[i].tensor));
    SLUICE_TRY(take_i16(source, "a home's slot", 0, SLUICE_MAX_CHUNKS - 1, &t->homes[i].slot));
  }
  return SLUICE_OK;
}

static sluice_status_t read_end(source_t* source) {
  uint64_t sum = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, source->data, source->used);
  int32_t low = 0, high = 0;
  SLUICE_TRY(take(source, "the checksum", INT32_MIN, INT32_MAX, &low));
  SLUICE_TRY(take(source, "the checksum", INT32_MIN, INT32_MAX, &high));
  if ((uint32_t)low != (uint32_t)sum || (uint32_t)high != (uint32_t)(sum >> 32)) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "schedule: the checksum does not match: the bytes were changed");
  }
  if (source->used == source->bytes) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "schedule: %llu bytes follow the end",
                     (unsigned long long)(source->bytes - source->used));
}

sluice_status_t sluice_schedule_read(const void* data, uint64_t bytes, sluice_allocator_t* allocator,
                                     sluice_template_t** out_template) {
  *out_template = NULL;
  source_t source = {.data = data, .bytes = data == NULL ? 0 : bytes};
  int32_t head = 0;
  SLUICE_TRY(take(&source, "magic", MAGIC, MAGIC, &head));
  SLUICE_TRY(take(&source, "form", FORM, FORM, &head));
  sluice_template_spec_t spec;
  SLUICE_TRY(read_spec(&source, &spec));
  sluice_template_t* t = NULL;
  SLUICE_TRY(sluice_template_new(&spec, allocator, &t));
  sluice_status_t status = read_body(&source, t);
  if (status == SLUICE_OK) status = read_end(&source);
  if (status == SLUICE_OK) status = sluice_schedule_check_or_fail(t, allocator);
  if (status != SLUICE_OK) {
    sluice_template_destroy(t, allocator);
    return status;
  }
  sluice_template_seal(t);
  *out_template = t;
  return SLUICE_OK;
}
