// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/template/builder.h"

#include <stdlib.h>
#include <string.h>

#include "backend/schedule/op_table.h"

static sluice_slot_ref_t* home_of(const sluice_builder_t* builder, int32_t tensor, int32_t chunk) {
  return &builder->homes[(int64_t)tensor * builder->num_chunks + chunk];
}

void sluice_builder_init_homes(sluice_builder_t* builder) {
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) {
    int32_t ring = builder->ring[t] > 0 ? builder->ring[t] : 1;
    for (int32_t i = 0; i < builder->num_chunks; ++i) {
      *home_of(builder, t, i) = (sluice_slot_ref_t){(int16_t)t, (int16_t)(i % ring)};
    }
  }
}

void sluice_builder_set_home(sluice_builder_t* builder, int32_t tensor, int32_t chunk, int32_t other, int32_t slot) {
  *home_of(builder, tensor, chunk) = (sluice_slot_ref_t){(int16_t)other, (int16_t)slot};
}

sluice_slot_ref_t sluice_builder_home(const sluice_builder_t* builder, int32_t tensor, int32_t chunk) {
  return *home_of(builder, tensor, chunk);
}

/* Returns whether the op is valid in the template and fits; if not, sets the status. */
static int takes_op(sluice_builder_t* builder, int32_t kind, int32_t chunk) {
  if (builder->status != SLUICE_OK) return 0;
  if (kind < 0 || kind >= SLUICE_OP_COUNT || chunk < -1 || chunk >= builder->num_chunks) {
    builder->status = SLUICE_FAIL(
        SLUICE_E_INTERNAL, "schedule: op %d is of kind %d and chunk %d; kinds are in [0, %d), chunks in [-1, %d)",
        builder->num_ops, kind, chunk, SLUICE_OP_COUNT, builder->num_chunks);
  } else if (sluice_op_lane(kind) < 0) {
    builder->status =
        SLUICE_FAIL(SLUICE_E_INTERNAL, "schedule: %s has no lane in backend/schedule/op_table.c", sluice_op_name(kind));
  } else if (builder->num_ops >= builder->capacity) {
    builder->status = SLUICE_FAIL(SLUICE_E_INTERNAL,
                                  "schedule: %s of chunk %d does not fit: %d chunks have room for %d ops; raise "
                                  "OPS_PER_CHUNK in backend/schedule/template/template.c",
                                  sluice_op_name(kind), chunk, builder->num_chunks, builder->capacity);
  }
  return builder->status == SLUICE_OK;
}

sluice_op_t* sluice_builder_add(sluice_builder_t* builder, int32_t kind, int32_t chunk) {
  if (!takes_op(builder, kind, chunk)) return &builder->refused;
  const int32_t lane = sluice_op_lane(kind);
  sluice_op_t* op = &builder->ops[builder->num_ops++];
  memset(op, 0, sizeof *op);
  op->kind = (int16_t)kind;
  op->lane = (uint8_t)(builder->single_rank && lane == SLUICE_LANE_COMM ? SLUICE_LANE_COMPUTE : lane);
  op->chunk = chunk;
  return op;
}

void sluice_builder_group(sluice_builder_t* builder) {
  if (builder->status != SLUICE_OK) return;
  builder->ops[builder->num_ops - 2].group = SLUICE_GROUP_OPENS;
  builder->ops[builder->num_ops - 1].group = SLUICE_GROUP_CLOSES;
}

static int same_ref(sluice_slot_ref_t a, sluice_slot_ref_t b) { return a.tensor == b.tensor && a.slot == b.slot; }

static void add_ref(sluice_builder_t* builder, const sluice_op_t* op, sluice_slot_ref_t* refs, int32_t* count,
                    sluice_slot_ref_t ref) {
  for (int32_t i = 0; i < *count; ++i) {
    if (same_ref(refs[i], ref)) return;
  }
  if (*count < SLUICE_OP_MAX_ACCESSES) {
    refs[(*count)++] = ref;
    return;
  }
  builder->status = SLUICE_FAIL(SLUICE_E_INTERNAL,
                                "schedule: %s of chunk %d %s %s besides %d other slots, which is all that fit; raise "
                                "SLUICE_OP_MAX_ACCESSES in backend/schedule/schedule.h",
                                sluice_op_name(op->kind), op->chunk, refs == op->reads ? "reads" : "writes",
                                sluice_tensor_kind_name(ref.tensor), SLUICE_OP_MAX_ACCESSES);
}

static void add_access(sluice_builder_t* builder, const sluice_op_t* op, int32_t tensor, sluice_slot_ref_t* refs,
                       int32_t* count) {
  if (op->chunk >= 0) {
    add_ref(builder, op, refs, count, *home_of(builder, tensor, op->chunk));
    return;
  }
  for (int32_t i = 0; i < builder->num_chunks && builder->status == SLUICE_OK; ++i) {
    add_ref(builder, op, refs, count, (sluice_slot_ref_t){home_of(builder, tensor, i)->tensor, -1});
  }
}

void sluice_op_read(sluice_builder_t* builder, sluice_op_t* op, int32_t tensor) {
  if (builder->status == SLUICE_OK) add_access(builder, op, tensor, op->reads, &op->num_reads);
}

void sluice_op_write(sluice_builder_t* builder, sluice_op_t* op, int32_t tensor) {
  if (builder->status == SLUICE_OK) add_access(builder, op, tensor, op->writes, &op->num_writes);
}

static int same_slot(sluice_slot_ref_t a, sluice_slot_ref_t b) {
  return a.tensor == b.tensor && (a.slot == b.slot || a.slot < 0 || b.slot < 0);
}

static int any_overlap(const sluice_slot_ref_t* a, int32_t num_a, const sluice_slot_ref_t* b, int32_t num_b) {
  for (int32_t i = 0; i < num_a; ++i) {
    for (int32_t j = 0; j < num_b; ++j) {
      if (same_slot(a[i], b[j])) return 1;
    }
  }
  return 0;
}

/* Returns whether `later` may not start before `earlier` has ended. */
static int conflict(const sluice_op_t* earlier, const sluice_op_t* later) {
  return any_overlap(earlier->writes, earlier->num_writes, later->reads, later->num_reads) ||
         any_overlap(earlier->reads, earlier->num_reads, later->writes, later->num_writes) ||
         any_overlap(earlier->writes, earlier->num_writes, later->writes, later->num_writes);
}

/* `before[i][lane]` is the last op of `lane` that is known to end before op i starts; -1: none. Going backwards in
 * program order, a conflicting op that is not yet covered becomes a dependency and adds everything that precedes it; a
 * later op of the same lane implies the earlier ones. An op that waits for a group waits for the group's end. Returns
 * the number of dependencies, including those that do not fit. */
static int32_t derive_deps(sluice_builder_t* builder, int32_t (*before)[SLUICE_NUM_LANES], int32_t* deps,
                           int32_t capacity) {
  int32_t last_of_lane[SLUICE_NUM_LANES];
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) last_of_lane[lane] = -1;
  int32_t count = 0;
  for (int32_t i = 0; i < builder->num_ops; ++i) {
    sluice_op_t* op = &builder->ops[i];
    int32_t previous = last_of_lane[op->lane];
    for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane)
      before[i][lane] = previous >= 0 ? before[previous][lane] : -1;
    if (previous >= 0) before[i][op->lane] = previous;
    op->first_dep = count;
    for (int32_t j = i - 1; j >= 0; --j) {
      const sluice_op_t* other = &builder->ops[j];
      const int32_t end = sluice_op_end(builder->ops, j);
      if (end <= before[i][other->lane] || end == i || !conflict(other, op)) continue;
      if (count < capacity) deps[count] = end;
      ++count;
      for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
        if (before[end][lane] > before[i][lane]) before[i][lane] = before[end][lane];
      }
      before[i][other->lane] = end;
    }
    op->num_deps = count - op->first_dep;
    last_of_lane[op->lane] = i;
  }
  return count;
}

sluice_status_t sluice_builder_finish(sluice_builder_t* builder, int32_t* deps, int32_t capacity,
                                      int32_t* out_num_deps) {
  *out_num_deps = 0;
  SLUICE_TRY(builder->status);
  int32_t(*before)[SLUICE_NUM_LANES] = malloc((size_t)(builder->num_ops + 1) * sizeof *before);
  if (before == NULL) return SLUICE_FAIL(SLUICE_E_NO_MEMORY, "schedule: dependencies of %d ops", builder->num_ops);
  int32_t count = derive_deps(builder, before, deps, capacity);
  free(before);
  if (count > capacity) {
    return SLUICE_FAIL(SLUICE_E_INTERNAL,
                       "schedule: %d ops have %d dependencies, and there is room for %d; raise "
                       "sluice_template_max_deps in backend/schedule/template/template.c",
                       builder->num_ops, count, capacity);
  }
  *out_num_deps = count;
  return SLUICE_OK;
}
