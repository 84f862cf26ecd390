// SPDX-License-Identifier: Apache-2.0
/* The choice of a forward by its own size, if batch sizes alternate. Private to backend/tune. */
#pragma once

#include "backend/tune/tuner_state.h"

/* Records that a forward with this many tokens on the fullest rank brought this many rows. Loads vary from batch to
 * batch, while an answer is for one number of rows: batches of one size keep their number until their mean falls into
 * another bucket. Returns the skew that the batch counts with. */
double sluice_tuner_note_rows(sluice_tuner_table_t* table, int64_t num_tokens, int64_t rows);
/* The rows that a forward with this many tokens counts as: with the skew of its size, or else of the last batch. */
int64_t sluice_tuner_rows_of(const sluice_tuner_table_t* table, int64_t num_tokens);

/* A candidate of the table, in this form. */
sluice_pass_choice_t sluice_tuner_choice_of(const sluice_tuner_table_t* table, int32_t pick, int32_t form);

/* `of_size` of sluice_policy_hook_vtable_t. The decision state was made for the size of an earlier forward. If this
 * forward has another size, it takes what is known of its own: the answer, or a candidate on trial; otherwise that
 * state. */
void sluice_tuner_of_size(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, int64_t num_tokens,
                          sluice_pass_choice_t* out_choice);
