/* What a forward does by its own size, where sizes of batches take turns. Private to backend/tune. */
#ifndef SLUICE_BACKEND_TUNE_TUNER_SIZES_H_
#define SLUICE_BACKEND_TUNE_TUNER_SIZES_H_

#include "backend/tune/tuner_state.h"

/* A forward of so many tokens on the rank with most has brought so many rows to the fullest one. Loads vary from batch
 * to batch, and an answer is for one number of rows: batches of one size keep theirs until their mean is another
 * bucket's. Returns how skewed they count as. */
double sluice_tuner_note_rows(sluice_tuner_table_t* table, int64_t num_tokens, int64_t rows);
/* Rows as which a forward of so many tokens counts: as skewed as its size, else as the last one. */
int64_t sluice_tuner_rows_of(const sluice_tuner_table_t* table, int64_t num_tokens);

/* A candidate of the table, in the form besides the plain one or not. */
sluice_pass_choice_t sluice_tuner_choice_of(const sluice_tuner_table_t* table, int32_t pick, int32_t is_other);

/* `of_size` of sluice_policy_hook_vtable_t. The decision state was made for the size of an earlier forward. Where this
 * one is of another, it takes what is known of its own: the answer, or a candidate on trial; else that state. */
void sluice_tuner_of_size(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, int64_t num_tokens,
                          sluice_pass_choice_t* out_choice);

#endif /* SLUICE_BACKEND_TUNE_TUNER_SIZES_H_ */
