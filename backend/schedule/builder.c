#include "backend/schedule/builder.h"

#include <stdlib.h>
#include <string.h>

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

sluice_op_t* sluice_builder_add(sluice_builder_t* builder, int32_t kind, int32_t lane, int32_t chunk) {
  sluice_op_t* op = &builder->ops[builder->num_ops++];
  memset(op, 0, sizeof *op);
  op->kind = (int16_t)kind;
  op->lane = (int16_t)(builder->single_rank && lane == SLUICE_LANE_COMM ? SLUICE_LANE_COMPUTE : lane);
  op->chunk = chunk;
  return op;
}

static int same_ref(sluice_slot_ref_t a, sluice_slot_ref_t b) { return a.tensor == b.tensor && a.slot == b.slot; }

static int32_t add_ref(sluice_slot_ref_t* refs, int32_t count, sluice_slot_ref_t ref) {
  for (int32_t i = 0; i < count; ++i) {
    if (same_ref(refs[i], ref)) return count;
  }
  refs[count] = ref;
  return count + 1;
}

static int32_t add_access(const sluice_builder_t* builder, const sluice_op_t* op, int32_t tensor,
                          sluice_slot_ref_t* refs, int32_t count) {
  if (op->chunk >= 0) return add_ref(refs, count, *home_of(builder, tensor, op->chunk));
  for (int32_t i = 0; i < builder->num_chunks; ++i) {
    count = add_ref(refs, count, (sluice_slot_ref_t){home_of(builder, tensor, i)->tensor, -1});
  }
  return count;
}

void sluice_op_read(sluice_builder_t* builder, sluice_op_t* op, int32_t tensor) {
  op->num_reads = add_access(builder, op, tensor, op->reads, op->num_reads);
}

void sluice_op_write(sluice_builder_t* builder, sluice_op_t* op, int32_t tensor) {
  op->num_writes = add_access(builder, op, tensor, op->writes, op->num_writes);
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

/* Whether `later` may not start before `earlier` has ended. */
static int conflict(const sluice_op_t* earlier, const sluice_op_t* later) {
  return any_overlap(earlier->writes, earlier->num_writes, later->reads, later->num_reads) ||
         any_overlap(earlier->reads, earlier->num_reads, later->writes, later->num_writes) ||
         any_overlap(earlier->writes, earlier->num_writes, later->writes, later->num_writes);
}

/* `before[i][lane]` is the last op of `lane` that is known to end before op i starts; -1 none. Walking backwards in
 * program order, a conflicting op that is not known yet becomes a dependency and brings everything before it along; a
 * later op of the same lane implies the earlier ones. */
int32_t sluice_builder_derive_deps(sluice_builder_t* builder, int32_t* deps, int32_t capacity) {
  int32_t(*before)[SLUICE_NUM_LANES] = malloc((size_t)(builder->num_ops + 1) * sizeof *before);
  if (before == NULL) return -1;
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
      if (j <= before[i][other->lane] || !conflict(other, op)) continue;
      if (deps != NULL && count < capacity) deps[count] = j;
      ++count;
      for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
        if (before[j][lane] > before[i][lane]) before[i][lane] = before[j][lane];
      }
      before[i][other->lane] = j;
    }
    op->num_deps = count - op->first_dep;
    last_of_lane[op->lane] = i;
  }
  free(before);
  return count;
}
