// SPDX-License-Identifier: Apache-2.0
/* The tuner's record of its decisions. */
#include <stdio.h>

#include "backend/base/log.h"
#include "backend/model/restore.h"
#include "backend/model/words.h"
#include "backend/plan/plan.h"
#include "backend/tune/tuner_state.h"

/* The form of exchanges, if it was chosen. */
static const char* words_of_form(const sluice_decision_t* d, int32_t form) {
  static const char* const words[] = {[SLUICE_DEDUPLICATE_NONE] = ", rows sent",
                                      [SLUICE_DEDUPLICATE_RANKS] = ", deduplicated by rank",
                                      [SLUICE_DEDUPLICATE_NODES] = ", deduplicated by node"};
  if (form == SLUICE_FORM_GROUPED) return ", exchanges grouped";
  return d->chose_deduplication ? words[sluice_tuner_deduplication_of(&d->work, form)] : "";
}

static void print_decision(const sluice_tuner_t* tuner, const sluice_decision_t* d) {
  const sluice_search_decision_t* w = &d->what;
  char text[640], next[192] = "", policy[128] = "", other[64] = "", part[32] = "", bound[48] = "";
  if (d->budget > 0) snprintf(bound, sizeof bound, " under %llu bytes", (unsigned long long)d->budget);
  if (d->kept_chunks < d->chosen.num_chunks) snprintf(part, sizeof part, " in the first %d", d->kept_chunks);
  if (d->chosen.restore_input >= 0) {
    snprintf(policy, sizeof policy, ", T_DI %s, T_M %s%s%s", sluice_restore_name(d->chosen.restore_input),
             sluice_restore_name(d->chosen.restore_pre_activation), part, bound);
  }
  if (d->second.num_chunks > 0) {
    if (d->second.restore_input >= 0) {
      snprintf(other, sizeof other, ", T_DI %s, T_M %s", sluice_restore_name(d->second.restore_input),
               sluice_restore_name(d->second.restore_pre_activation));
    }
    char predicted[48] = "";
    if (d->second_predicted > 0)
      snprintf(predicted, sizeof predicted, ", predicted %.3f ms", 1e3 * (double)d->second_predicted);
    snprintf(next, sizeof next, "; next n %d%s%s, %s: %.3f ms%s", d->second.num_chunks, other,
             words_of_form(d, d->second_form), sluice_wgrad_word(d->second.wgrad_mode), 1e3 * w->runner_up_seconds,
             predicted);
  }
  snprintf(text, sizeof text,
           "sluice: decision: M %lld, H %lld, E %d, K %d, on %d ranks, %lld rows: n %d%s%s, weight gradients %s (%s; "
           "%d "
           "candidates in %lld passes; measured %.3f ms, predicted %.3f ms%s)",
           (long long)d->work.model_width, (long long)d->work.hidden_width, d->work.num_experts, d->work.top_k,
           d->work.world_size, (long long)w->rows, d->chosen.num_chunks, policy, words_of_form(d, d->form),
           sluice_wgrad_word(d->chosen.wgrad_mode), sluice_tuner_why_name(w->why), w->num_raced,
           (long long)w->race_passes, 1e3 * w->seconds, 1e3 * w->predicted_seconds, next);
  sluice_log(SLUICE_LOG_INFO, "%s", text);
  if (tuner->is_loud && tuner->rank == 0) fprintf(stderr, "%s\n", text);
}

void sluice_tuner_record(sluice_tuner_t* tuner, const sluice_decision_t* decision) {
  sluice_decision_t* d = &tuner->decisions[tuner->num_decisions++ % SLUICE_TUNER_DECISIONS];
  *d = *decision;
  print_decision(tuner, d);
}
