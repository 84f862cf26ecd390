// SPDX-License-Identifier: Apache-2.0
/* Moves layers between neighbouring stages while that improves the worst stage: vPipe's refinement, judged with the
 * local choice of options. A layer that leaves the worst stage may push others on, stage by stage, until one has
 * room. */
#include <string.h>

#include "backend/base/math.h"
#include "backend/planner/stages/partition.h"

/* The number of layers tried as the first to leave a stage, of layers that leave together, and of layers pushed on:
 * more distant moves take several rounds. */
enum { MOST_CANDIDATES = 12, MOST_TOGETHER = 3, MOST_PUSHES = 16 };

typedef struct refinement_s {
  sluice_partition_t* part;
  int32_t* count;                  /* [num_stages] layers */
  int32_t* stage_of;               /* [num_layers] of the best found so far */
  sluice_stage_judgement_t* trial; /* [num_stages] */
  sluice_partition_score_t best;
  int32_t is_better;
} refinement_t;

/* Stages may not decrease along an edge. */
static int may_move(const sluice_partition_t* part, int32_t layer, int32_t step) {
  const sluice_stages_tables_t* t = part->tables;
  const int32_t* first = step > 0 ? t->first_reader : t->first_source;
  const int32_t* list = step > 0 ? t->readers : t->sources;
  for (int32_t a = first[layer]; a < first[layer + 1]; ++a) {
    if (part->stage_of[list[a]] == part->stage_of[layer]) return 0;
  }
  return 1;
}

/* Returns the next layer of a stage that may leave, after `after` (-1: the first), from the end at which it leaves. -1:
 * none. */
static int32_t next_to_go(const sluice_partition_t* part, int32_t stage, int32_t step, int32_t after) {
  const int32_t n = part->tables->num_layers;
  int32_t layer = after < 0 ? (step > 0 ? n - 1 : 0) : after - step;
  for (; layer >= 0 && layer < n; layer -= step) {
    if (part->stage_of[layer] == stage && may_move(part, layer, step)) return layer;
  }
  return -1;
}

static void move(refinement_t* r, int32_t layer, int32_t step) {
  --r->count[r->part->stage_of[layer]];
  r->part->stage_of[layer] += step;
  ++r->count[r->part->stage_of[layer]];
}

static void keep_if_better(refinement_t* r) {
  const sluice_partition_t* part = r->part;
  const sluice_partition_score_t score = sluice_partition_score(r->trial, part->tables->num_stages);
  if (!sluice_partition_is_better(&score, &r->best)) return;
  r->best = score, r->is_better = 1;
  memcpy(r->stage_of, part->stage_of, (size_t)part->tables->num_layers * sizeof *r->stage_of);
}

static void judge(refinement_t* r, int32_t stage) { r->trial[stage] = sluice_partition_judge(r->part, stage, 0); }

/* A stage that no further move of this trial changes is already worse than the best found. */
static int is_hopeless(const refinement_t* r, int32_t stage) {
  const sluice_stage_judgement_t* judged = &r->trial[stage];
  return judged->short_bytes > r->best.short_bytes ||
         (r->best.short_bytes == 0 && judged->turn > r->best.slowest * (1 + 1e-9));
}

/* After `stage` has received a layer, each following stage passes one on. Returns the number of moved layers. */
static int32_t push(refinement_t* r, int32_t stage, int32_t step, int32_t* moved) {
  int32_t num_moved = 0;
  const int32_t num_stages = r->part->tables->num_stages;
  for (; num_moved < MOST_PUSHES && stage + step >= 0 && stage + step < num_stages; stage += step) {
    const int32_t next = next_to_go(r->part, stage, step, -1);
    if (next < 0 || r->count[stage] == 1) break;
    move(r, next, step);
    moved[num_moved++] = next;
    judge(r, stage);
    if (is_hopeless(r, stage)) break;
    judge(r, stage + step);
    keep_if_better(r);
  }
  return num_moved;
}

/* `layer` and up to `together` - 1 more leave the stage, and others make room for them. All moves are undone. */
static void try_from(refinement_t* r, int32_t layer, int32_t step, int32_t together) {
  sluice_partition_t* part = r->part;
  const int32_t from = part->stage_of[layer];
  int32_t moved[MOST_TOGETHER + MOST_PUSHES], num_moved = 0;
  for (int32_t next = layer; next >= 0 && num_moved < together && r->count[from] > 1;
       next = next_to_go(part, from, step, -1)) {
    move(r, next, step);
    moved[num_moved++] = next;
  }
  memcpy(r->trial, part->judged, (size_t)part->tables->num_stages * sizeof *r->trial);
  if (num_moved == together) {
    judge(r, from);
    if (!is_hopeless(r, from)) {
      judge(r, from + step);
      keep_if_better(r);
      num_moved += push(r, from + step, step, moved + num_moved);
    }
  }
  while (num_moved > 0) move(r, moved[--num_moved], -step);
}

static void try_all(refinement_t* r, int32_t stage, int32_t step) {
  const sluice_partition_t* part = r->part;
  if (stage + step < 0 || stage + step >= part->tables->num_stages) return;
  int32_t layer = next_to_go(part, stage, step, -1);
  for (int32_t i = 0; i < MOST_CANDIDATES && layer >= 0; ++i) {
    for (int32_t together = 1; together <= MOST_TOGETHER; ++together) try_from(r, layer, step, together);
    layer = next_to_go(part, stage, step, layer);
  }
}

static void take_best(refinement_t* r) {
  sluice_partition_t* part = r->part;
  const sluice_stages_tables_t* t = part->tables;
  int32_t lowest = t->num_stages, highest = -1;
  for (int32_t i = 0; i < t->num_layers; ++i) {
    if (part->stage_of[i] == r->stage_of[i]) continue;
    lowest = (int32_t)sluice_min(lowest, sluice_min(part->stage_of[i], r->stage_of[i]));
    highest = (int32_t)sluice_max(highest, sluice_max(part->stage_of[i], r->stage_of[i]));
    --r->count[part->stage_of[i]], ++r->count[r->stage_of[i]];
    part->stage_of[i] = r->stage_of[i];
  }
  for (int32_t s = lowest; s <= highest; ++s) sluice_partition_judge(part, s, 1);
}

static void refine(refinement_t* r) {
  sluice_partition_t* part = r->part;
  const int32_t num_stages = part->tables->num_stages;
  for (int32_t i = 0; i < part->tables->num_layers; ++i) ++r->count[part->stage_of[i]];
  do {
    const int32_t worst = sluice_partition_worst_stage(part);
    r->best = sluice_partition_score(part->judged, num_stages), r->is_better = 0;
    try_all(r, worst, 1);
    try_all(r, worst, -1);
    if (r->is_better) take_best(r);
  } while (r->is_better);
}

sluice_status_t sluice_partition_refine(sluice_partition_t* part) {
  const sluice_stages_tables_t* t = part->tables;
  const uint64_t n = (uint64_t)t->num_layers, p = (uint64_t)t->num_stages;
  const uint64_t bytes = p * sizeof(sluice_stage_judgement_t) + (n + p) * sizeof(int32_t);
  refinement_t refinement = {.part = part};
  refinement.trial = sluice_alloc_zeroed(t->allocator, bytes, "refinement of a partition");
  if (refinement.trial == NULL) return sluice_alloc_status();
  refinement.stage_of = (int32_t*)(refinement.trial + p), refinement.count = refinement.stage_of + n;
  refine(&refinement);
  sluice_free(t->allocator, refinement.trial, bytes);
  return SLUICE_OK;
}
