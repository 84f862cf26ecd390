// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/tuner_sizes.h"

#include <math.h>

#include "backend/moe/layer/layer.h"
#include "backend/tune/search/search.h"
#include "backend/tune/tuner_strategy.h"

#define MEAN_OVER 8     /* batches */
#define BUCKET    1.19f /* of the search, 2^(1/4) */

static int32_t size_of(const sluice_tuner_table_t* table, int64_t num_tokens) {
  return sluice_search_bucket(num_tokens < 1 ? 1 : num_tokens * table->work.top_k);
}

double sluice_tuner_note_rows(sluice_tuner_table_t* table, int64_t num_tokens, int64_t rows) {
  const double balanced = (double)num_tokens * table->work.top_k;
  const float skew = balanced > 0 && (double)rows > balanced ? (float)((double)rows / balanced) : 1;
  sluice_tuner_skew_t* s = &table->skews[size_of(table, num_tokens)];
  if (s->held <= 0) s->held = s->mean = skew;
  s->mean += (skew - s->mean) / MEAN_OVER;
  if (s->mean > BUCKET * s->held || s->mean * BUCKET < s->held) s->held = s->mean;
  return (double)s->held;
}

int64_t sluice_tuner_rows_of(const sluice_tuner_table_t* table, int64_t num_tokens) {
  const double skew = (double)table->skews[size_of(table, num_tokens)].held;
  return llround((double)num_tokens * table->work.top_k * (skew > 0 ? skew : table->work.skew));
}

sluice_pass_choice_t sluice_tuner_choice_of(const sluice_tuner_table_t* table, int32_t pick, int32_t form) {
  return (sluice_pass_choice_t){
      .num_chunks = (int16_t)sluice_search_chunks(&table->search, pick),
      .wgrad_mode = (uint8_t)sluice_pick_wgrad(pick),
      .restore_set = (uint8_t)table->restore_set,
      .grouped = form == SLUICE_FORM_GROUPED,
      .deduplicate = (uint8_t)sluice_tuner_deduplication_of(&table->work, form),
  };
}

void sluice_tuner_of_size(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, int64_t num_tokens,
                          sluice_pass_choice_t* out_choice) {
  (void)policy_hook;
  const sluice_decision_state_t* d = &moe->decision;
  const sluice_tuner_table_t *first = d->table, *table = first;
  *out_choice = d->choice;
  const int64_t rows = sluice_tuner_rows_of(first, num_tokens);
  if (rows < 1 || sluice_search_bucket(rows) == d->bucket) return;
  int32_t pick = -1, form = SLUICE_FORM_PLAIN;
  if (first->joint != NULL) {
    table = sluice_tuner_strategy_peek(first->joint, rows, &pick);
  } else {
    pick = sluice_search_peek(&first->search, rows);
  }
  if (table == NULL || pick < 0) return;
  pick = sluice_grouping_peek(&table->grouping, rows, pick, &form);
  *out_choice = sluice_tuner_choice_of(table, pick, form);
}
