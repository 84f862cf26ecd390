// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/partition.h"

#include <math.h>
#include <string.h>

sluice_status_t sluice_partition_make(const sluice_stages_tables_t* t, uint64_t most_nodes, sluice_partition_t* part) {
  memset(part, 0, sizeof *part);
  part->tables = t;
  const uint64_t n = (uint64_t)t->num_layers, p = (uint64_t)t->num_stages;
  const uint64_t bytes = n * (sizeof(double) + 3 * sizeof(int32_t)) + p * sizeof *part->judged;
  SLUICE_TRY(sluice_stages_local_make(t, &part->local));
  part->local.most_nodes = most_nodes;
  part->block = sluice_alloc_zeroed(t->allocator, bytes, "partition of layers");
  if (part->block == NULL) {
    sluice_stages_local_deinit(&part->local);
    return sluice_alloc_status();
  }
  part->block_bytes = bytes;
  part->seconds_of = part->block;
  part->judged = (sluice_stage_judgement_t*)(part->seconds_of + n);
  part->stage_of = (int32_t*)(part->judged + p);
  part->option_of = part->stage_of + n, part->members = part->option_of + n;
  return SLUICE_OK;
}

void sluice_partition_deinit(sluice_partition_t* part) {
  if (part->tables == NULL) return;
  sluice_free(part->tables->allocator, part->block, part->block_bytes);
  sluice_stages_local_deinit(&part->local);
}

void sluice_partition_set_ends(sluice_partition_t* part, const int32_t* ends) {
  int32_t stage = 0;
  for (int32_t i = 0; i < part->tables->num_layers; ++i) {
    while (i >= ends[stage]) ++stage;
    part->stage_of[i] = stage;
  }
}

void sluice_partition_copy(sluice_partition_t* to, const sluice_partition_t* from) {
  memcpy(to->block, from->block, from->block_bytes);
}

/* ---- judging ---- */

static void settle_stage(sluice_partition_t* part, int32_t count) {
  const sluice_stages_local_t* local = &part->local;
  for (int32_t i = 0; i < count; ++i) {
    const sluice_stages_local_item_t* item = &local->items[local->pick[i]];
    part->option_of[part->members[i]] = item->option, part->seconds_of[part->members[i]] = item->seconds;
  }
}

sluice_stage_judgement_t sluice_partition_judge(sluice_partition_t* part, int32_t stage, int is_final) {
  sluice_stages_local_t* local = &part->local;
  const int32_t last = part->tables->num_stages - 1;
  int32_t count = 0;
  for (int32_t i = 0; i < part->tables->num_layers; ++i) {
    if (part->stage_of[i] == stage) part->members[count++] = i;
  }
  const uint64_t in = stage == 0 ? 0 : sluice_stages_boundary_bytes(part->tables, part->stage_of, stage - 1);
  const uint64_t out = stage == last ? 0 : sluice_stages_boundary_bytes(part->tables, part->stage_of, stage);
  sluice_stages_local_set(local, part->members, count, stage, in, out);
  const int fits = sluice_stages_local_exact(local, INFINITY);
  const sluice_stage_judgement_t judged = {
      .turn = local->sum.turn,
      .short_bytes = fits ? 0 : (double)(local->sum.bytes - local->budget),
      .is_proven = fits ? local->is_proven : 1,
  };
  if (is_final) {
    settle_stage(part, count);
    part->judged[stage] = judged;
  }
  return judged;
}

void sluice_partition_settle(sluice_partition_t* part) {
  for (int32_t s = 0; s < part->tables->num_stages; ++s) sluice_partition_judge(part, s, 1);
}

/* ---- comparing ---- */

sluice_partition_score_t sluice_partition_score(const sluice_stage_judgement_t* judged, int32_t num_stages) {
  sluice_partition_score_t score = {0, 0, 0};
  for (int32_t s = 0; s < num_stages; ++s) {
    score.short_bytes = fmax(score.short_bytes, judged[s].short_bytes);
    score.slowest = fmax(score.slowest, judged[s].turn);
    score.squares += judged[s].turn * judged[s].turn;
  }
  return score;
}

static int compare(double a, double b) {
  const double rounding = 1e-9 * (a + b); /* a smaller gain does not justify another partition */
  return a < b - rounding ? -1 : a > b + rounding;
}

int sluice_partition_is_better(const sluice_partition_score_t* a, const sluice_partition_score_t* b) {
  if (a->short_bytes != b->short_bytes) return a->short_bytes < b->short_bytes;
  const int order = compare(a->slowest, b->slowest);
  return order != 0 ? order < 0 : compare(a->squares, b->squares) < 0;
}

int32_t sluice_partition_worst_stage(const sluice_partition_t* part) {
  int32_t worst = 0;
  for (int32_t s = 1; s < part->tables->num_stages; ++s) {
    const sluice_stage_judgement_t *a = &part->judged[s], *b = &part->judged[worst];
    if (a->short_bytes > b->short_bytes || (a->short_bytes == b->short_bytes && a->turn > b->turn)) worst = s;
  }
  return worst;
}
