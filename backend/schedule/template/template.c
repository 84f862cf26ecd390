// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/template/template.h"

#include <stdint.h>
#include <string.h>

#include "backend/base/hash.h"
#include "backend/schedule/check/check.h"
#include "backend/schedule/check/releases.h"
#include "backend/schedule/template/directions.h"
#include "sluice/moe.h"

/* ---- rings of mixed policies ---- */

/* If policies differ between chunks, two chunks that share a ring may be far from each other, or be ordered by the ops
 * between them; then one slot suffices for both without an additional wait. The hazard checker decides. */

static void move_refs(sluice_slot_ref_t* refs, int32_t count, int32_t tensor) {
  for (int32_t i = 0; i < count; ++i) {
    if (refs[i].tensor == tensor && refs[i].slot == 1) refs[i].slot = 0;
  }
}

static void make_one(sluice_template_t* t, int32_t tensor) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    move_refs(t->ops[i].reads, t->ops[i].num_reads, tensor);
    move_refs(t->ops[i].writes, t->ops[i].num_writes, tensor);
  }
  move_refs(t->homes, SLUICE_T_COUNT * t->spec.num_chunks, tensor);
  t->ring[tensor] = 1;
}

/* Copies the template: all its pointers point into it. */
static sluice_template_t* copy_into(const sluice_template_t* t, void* memory) {
  sluice_template_t* copy = memory;
  memcpy(copy, t, t->bytes);
  copy->ops = (sluice_op_t*)(copy + 1);
  copy->deps = (int32_t*)(void*)((char*)copy + ((const char*)t->deps - (const char*)t));
  copy->homes = (sluice_slot_ref_t*)(void*)((char*)copy + ((const char*)t->homes - (const char*)t));
  return copy;
}

/* Gives `tensor` a ring of one slot instead of two if the template has no hazard then with its present dependencies;
 * otherwise leaves it alone. Errors: NO_MEMORY. */
static sluice_status_t tighten(sluice_template_t* schedule, int32_t tensor) {
  if (schedule->ring[tensor] != 2) return SLUICE_OK;
  sluice_allocator_t* memory = sluice_process_allocator();
  void* scratch = sluice_alloc(memory, schedule->bytes, "schedule template");
  if (scratch == NULL) return sluice_alloc_status();
  sluice_template_t* trial = copy_into(schedule, scratch);
  make_one(trial, tensor);
  sluice_finding_t finding = {.hazard = SLUICE_HAZARD_NONE};
  sluice_status_t status = sluice_template_mark_releases(trial);
  if (status == SLUICE_OK) status = sluice_schedule_check(trial, memory, &finding);
  sluice_free(memory, scratch, schedule->bytes);
  if (status == SLUICE_OK && finding.hazard == SLUICE_HAZARD_NONE) make_one(schedule, tensor);
  return status;
}

/* ---- templates ---- */

/* The maximum, in a backward that restores both tensors. The builder rejects more. */
#define OPS_PER_CHUNK      12
#define NODE_OPS_PER_CHUNK 3 /* in addition, with two levels */

static sluice_status_t check_policy(const sluice_template_spec_t* spec, int32_t tensor, const uint8_t* restore,
                                    int32_t chunk) {
  if (chunk < spec->num_chunks ? sluice_restore_is_for(restore[chunk], tensor) : restore[chunk] == 0) return SLUICE_OK;
  char known[SLUICE_RESTORE_TEXT_BYTES];
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "schedule: the restore policy of %s in chunk %d of %d is %d; known are %s, and 0 after the last "
                     "chunk",
                     sluice_tensor_kind_name(tensor), chunk, spec->num_chunks, restore[chunk],
                     sluice_restore_choices(tensor, known));
}

static sluice_status_t check_policies(const sluice_template_spec_t* spec) {
  for (int32_t i = 0; i < SLUICE_MAX_CHUNKS; ++i) {
    SLUICE_TRY(check_policy(spec, SLUICE_T_DI, spec->restore_input, i));
    SLUICE_TRY(check_policy(spec, SLUICE_T_M, spec->restore_pre_activation, i));
    if (i < spec->num_chunks && spec->callback &&
        !sluice_restore_fits_callback(spec->restore_input[i], spec->restore_pre_activation[i])) {
      return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                         "schedule: callback experts keep the output of chunk %d or recompute it; its input may be "
                         "released only if the output is recomputed",
                         i);
    }
  }
  return SLUICE_OK;
}

/* The rows of a token are complete only after all chunks have returned, so nothing may be bounded or called by
 * parts. */
static sluice_status_t check_cut(const sluice_template_spec_t* spec) {
  int kept = 1;
  for (int32_t i = 0; i < spec->num_chunks; ++i) kept &= sluice_restore_is_kept(spec->restore_input[i]);
  int whole = !spec->single_rank && !spec->bounded && !spec->dedup && spec->only == 0;
  if (!spec->chunks_by_experts || (kept && whole)) return SLUICE_OK;
  return SLUICE_FAIL(
      SLUICE_E_UNSUPPORTED,
      "schedule: chunks_by_experts is for whole passes of several ranks that restore no T_DI, without a plan or dedup");
}

static sluice_status_t check_spec(const sluice_template_spec_t* spec) {
  if (spec->num_chunks < 1 || spec->num_chunks > SLUICE_MAX_CHUNKS) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "schedule: number of chunks is %d; it must be in [1, %d]",
                       spec->num_chunks, SLUICE_MAX_CHUNKS);
  }
  if (spec->direction == SLUICE_BACKWARD && !spec->dgrad && !spec->wgrad) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "schedule: a backward computes dgrad, wgrad or both");
  }
  if (spec->callback && spec->direction == SLUICE_BACKWARD &&
      (!spec->dgrad || spec->wgrad == SLUICE_WGRAD_CALL_LATER)) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED, "schedule: callback experts compute dgrad and wgrad in one call");
  }
  if (spec->low_rank && spec->callback) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED, "schedule: low_rank is 1, but callback experts have no GEMMs of Sluice's");
  }
  if (spec->dedup && (spec->single_rank || spec->only != 0)) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "schedule: dedup is %d; only whole passes of several ranks are deduplicated", spec->dedup);
  }
  if (spec->grouped && (spec->single_rank || spec->only != 0 || spec->dedup == SLUICE_DEDUPLICATE_NODES)) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "schedule: grouped is 1; only whole passes of several ranks and one level have exchanges to "
                       "group");
  }
  SLUICE_TRY(check_policies(spec));
  return check_cut(spec);
}

static uint64_t hash_of_comm(const sluice_template_t* t) {
  const int32_t call[] = {t->spec.direction, t->spec.num_chunks,       t->spec.only, t->spec.keep, t->spec.dgrad,
                          t->spec.wgrad,     t->spec.chunks_by_experts};
  uint64_t hash = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, call, sizeof call);
  for (int32_t i = 0; i < t->num_ops; ++i) {
    const int32_t what[] = {t->ops[i].kind, t->ops[i].chunk | t->ops[i].group << 16};
    if (sluice_op_is_exchange(t->ops[i].kind)) hash = sluice_hash_bytes(hash, what, sizeof what);
  }
  return hash;
}

/* Drops rings of tensors that no op of this template touches. */
static void drop_unused_rings(sluice_builder_t* b) {
  int used[SLUICE_T_COUNT] = {0};
  for (int32_t i = 0; i < b->num_ops; ++i) {
    for (int32_t r = 0; r < b->ops[i].num_reads; ++r) used[b->ops[i].reads[r].tensor] = 1;
    for (int32_t w = 0; w < b->ops[i].num_writes; ++w) used[b->ops[i].writes[w].tensor] = 1;
  }
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) {
    if (!used[t]) b->ring[t] = 0;
  }
}

int32_t sluice_template_max_ops(int32_t num_chunks, int32_t has_two_levels) {
  return (OPS_PER_CHUNK + (has_two_levels ? NODE_OPS_PER_CHUNK : 0)) * num_chunks + 1;
}

int32_t sluice_template_max_deps(int32_t num_chunks, int32_t has_two_levels) {
  return 4 * sluice_template_max_ops(num_chunks, has_two_levels);
}

uint64_t sluice_template_bytes(int32_t num_chunks, int32_t has_two_levels) {
  uint64_t max_ops = (uint64_t)sluice_template_max_ops(num_chunks, has_two_levels);
  return sizeof(sluice_template_t) + max_ops * sizeof(sluice_op_t) +
         (uint64_t)sluice_template_max_deps(num_chunks, has_two_levels) * sizeof(int32_t) +
         (uint64_t)SLUICE_T_COUNT * (uint64_t)num_chunks * sizeof(sluice_slot_ref_t);
}

static uint64_t bytes_of(const sluice_template_spec_t* spec) {
  return sluice_template_bytes(spec->num_chunks, sluice_has_two_levels(spec));
}

sluice_status_t sluice_template_build(const sluice_template_spec_t* spec, sluice_allocator_t* allocator,
                                      sluice_template_t** out_template) {
  *out_template = NULL;
  SLUICE_TRY(check_spec(spec));
  void* memory = sluice_alloc(allocator, bytes_of(spec), "schedule template");
  if (memory == NULL) return sluice_alloc_status();
  sluice_status_t status = sluice_template_build_into(spec, memory, out_template);
  if (status != SLUICE_OK) sluice_free(allocator, memory, bytes_of(spec));
  return status;
}

static int is_mixed(const sluice_template_spec_t* spec) {
  for (int32_t i = 1; i < spec->num_chunks; ++i) {
    if (spec->restore_input[i] != spec->restore_input[0] ||
        spec->restore_pre_activation[i] != spec->restore_pre_activation[0])
      return 1;
  }
  return 0;
}

/* Returns an empty template of the spec, in memory of bytes_of(spec). */
static sluice_template_t* lay_out(const sluice_template_spec_t* spec, void* memory) {
  const int32_t n = spec->num_chunks, two = sluice_has_two_levels(spec);
  sluice_template_t* schedule = memory;
  memset(schedule, 0, bytes_of(spec));
  schedule->bytes = bytes_of(spec);
  schedule->spec = *spec;
  schedule->ops = (sluice_op_t*)(schedule + 1);
  schedule->deps = (int32_t*)(schedule->ops + sluice_template_max_ops(n, two));
  schedule->homes = (sluice_slot_ref_t*)(schedule->deps + sluice_template_max_deps(n, two));
  return schedule;
}

static void find_runs(sluice_template_t* t) {
  uint8_t is_awaited[(OPS_PER_CHUNK + NODE_OPS_PER_CHUNK) * SLUICE_MAX_CHUNKS + 1] = {0};
  for (int32_t d = 0; d < t->num_deps; ++d) is_awaited[t->deps[d]] = 1;
  for (int32_t i = 0; i < t->num_ops; ++i) {
    sluice_op_t* op = &t->ops[i];
    op->first_of_run = i;
    if (i == 0 || op->num_deps > 0 || is_awaited[i - 1] || op->lane != op[-1].lane) continue;
    if (sluice_op_is_exchange(op->kind) || sluice_op_is_exchange(op[-1].kind)) continue;
    op->first_of_run = op[-1].first_of_run;
  }
}

/* Computes runs and hashes of a filled template. */
static void seal(sluice_template_t* schedule) {
  find_runs(schedule);
  uint64_t hash = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, &schedule->spec, sizeof schedule->spec);
  hash = sluice_hash_bytes(hash, schedule->ops, (size_t)schedule->num_ops * sizeof(sluice_op_t));
  schedule->hash = sluice_hash_bytes(hash, schedule->deps, (size_t)schedule->num_deps * sizeof(int32_t));
  schedule->comm_hash = hash_of_comm(schedule);
}

sluice_status_t sluice_template_build_into(const sluice_template_spec_t* spec, void* memory,
                                           sluice_template_t** out_template) {
  *out_template = NULL;
  SLUICE_TRY(check_spec(spec));
  int32_t n = spec->num_chunks;
  sluice_template_t* schedule = lay_out(spec, memory);
  sluice_builder_t builder = {.ops = schedule->ops,
                              .capacity = sluice_template_max_ops(n, sluice_has_two_levels(spec)),
                              .single_rank = spec->single_rank,
                              .num_chunks = n,
                              .homes = schedule->homes};
  if (spec->direction == SLUICE_FORWARD) {
    sluice_place_forward(&builder, spec);
    sluice_build_forward(&builder, spec);
  } else {
    sluice_place_backward(&builder, spec);
    sluice_build_backward(&builder, spec);
  }
  int32_t num_deps = 0;
  SLUICE_TRY(sluice_builder_finish(&builder, schedule->deps, sluice_template_max_deps(n, sluice_has_two_levels(spec)),
                                   &num_deps));
  drop_unused_rings(&builder);
  schedule->num_ops = builder.num_ops;
  schedule->num_deps = num_deps;
  memcpy(schedule->ring, builder.ring, sizeof schedule->ring);
  /* With uniform policies the rings are exact, except that a shared T_M may delay the copies of T_DI. */
  if (is_mixed(spec) || (sluice_shares_act(spec) && spec->single_rank)) {
    SLUICE_TRY(tighten(schedule, SLUICE_T_DI));
    /* If T_M is shared, its second slot contains activated rows, so both are needed. */
    if (!sluice_shares_act(spec)) SLUICE_TRY(tighten(schedule, sluice_pre_activation_of(spec)));
  }
  SLUICE_TRY(sluice_template_mark_releases(schedule));
  seal(schedule);
  *out_template = schedule;
  return SLUICE_OK;
}

void sluice_template_destroy(sluice_template_t* schedule, sluice_allocator_t* allocator) {
  if (schedule != NULL) sluice_free(allocator, schedule, schedule->bytes);
}
