// SPDX-License-Identifier: Apache-2.0
/* What the files of the tuner share: the digest of its state, a layer as the work that a machine prices, and the
 * reports in a header about passes that all ranks ran with the same choice. */
#include "backend/tune/tuner_state.h"

#include <stdio.h>

#include "backend/base/dtype.h"
#include "backend/base/hash.h"
#include "backend/moe/layer/layer.h"

/* ---- the digest ---- */

static uint64_t hash_of_imports(const sluice_tuner_t* tuner, uint64_t hash) {
  return tuner->num_imports > 0
             ? sluice_hash_bytes(hash, tuner->imports, (size_t)tuner->num_imports * sizeof *tuner->imports)
             : hash;
}

static uint64_t state_of(const sluice_tuner_t* tuner) {
  uint64_t hash = hash_of_imports(tuner, sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, &tuner->mode, sizeof tuner->mode));
  return tuner->has_machine ? sluice_hash_bytes(hash, &tuner->machine, sizeof tuner->machine) : hash;
}

static void describe(const sluice_tuner_t* tuner, char* text, size_t room) {
  static const char* const modes[] = {"adaptive", "profile", "model"};
  char machine[64] = "no machine", imports[48] = "no imported decisions";
  if (tuner->has_machine) {
    snprintf(machine, sizeof machine, "machine %.32s (%08x)", tuner->machine.name,
             (unsigned)sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, &tuner->machine, sizeof tuner->machine));
  }
  if (tuner->num_imports > 0) {
    snprintf(imports, sizeof imports, "%d imported decisions (%08x)", tuner->num_imports,
             (unsigned)hash_of_imports(tuner, SLUICE_HASH_OF_NOTHING));
  }
  snprintf(text, room, "mode %s, %s, %s", modes[tuner->mode], machine, imports);
}

void sluice_tuner_update_state(sluice_tuner_t* tuner) {
  tuner->base.state = state_of(tuner);
  describe(tuner, tuner->base.words, sizeof tuner->base.words);
}

/* ---- work ---- */

sluice_workload_t sluice_tuner_work_of(const sluice_moe_t* moe) {
  const sluice_moe_config_t* c = &moe->shape.config;
  return (sluice_workload_t){
      .model_width = c->model_width,
      .hidden_width = c->callback_experts ? 4 * c->model_width : c->hidden_width,
      .num_experts = c->num_experts,
      .top_k = c->top_k,
      .gate_factor = moe->shape.gate_factor,
      .dtype = c->dtype,
      .world_size = moe->context->world_size,
      .callback = c->callback_experts,
      .chunking = c->chunking,
      .skew = 1,
      .deduplicate = sluice_shape_deduplication(&moe->shape),
      .ranks_per_node = moe->shape.ranks_per_node,
      .wire_dtype = sluice_layer_wire(moe),
      .lora_rank = c->lora_rank,
      .is_frozen = c->weight_format != SLUICE_WEIGHTS_PLAIN,
      .activation = c->callback_experts ? SLUICE_ACTIVATION_GELU : c->activation, /* the host's activation is unknown */
  };
}

int sluice_tuner_may_predict(const sluice_tuner_t* tuner, const sluice_moe_t* moe) {
  if (!tuner->has_machine || moe->shape.config.callback_experts) return 0; /* the time of a host's expert is unknown */
  return sluice_machine_check_for(&tuner->machine, moe->shape.config.dtype, moe->context->world_size) == SLUICE_OK;
}

int32_t sluice_tuner_deduplication_of(const sluice_workload_t* work, int32_t form) {
  if (form == SLUICE_FORM_TWO_LEVELS) return SLUICE_DEDUPLICATE_NODES;
  return form == SLUICE_FORM_COPIES ? SLUICE_DEDUPLICATE_RANKS : work->deduplicate;
}

int32_t sluice_tuner_form_of(const sluice_workload_t* work, int32_t deduplicate, int32_t is_grouped) {
  if (deduplicate == work->deduplicate) return is_grouped ? SLUICE_FORM_GROUPED : SLUICE_FORM_PLAIN;
  return deduplicate == SLUICE_DEDUPLICATE_NODES ? SLUICE_FORM_TWO_LEVELS : SLUICE_FORM_COPIES;
}

/* ---- reports ---- */

void sluice_tuner_note_switch(sluice_tuner_table_t* table, sluice_decision_state_t* decision) {
  ++table->num_switches;
  decision->switched = 1u << SLUICE_FORWARD | 1u << SLUICE_BACKWARD;
}

int sluice_tuner_is_first(sluice_decision_state_t* decision, int32_t direction) {
  int first = (int)(decision->switched >> direction & 1);
  decision->switched &= ~(1u << direction);
  return first;
}

uint64_t sluice_tuner_slowest(const sluice_step_report_t* const* reports, int32_t world_size, int32_t direction,
                              int64_t* out_rows, sluice_lanes_t* out_lanes) {
  const sluice_pass_report_t* first = &reports[0]->pass[direction];
  uint64_t ns = 0;
  *out_rows = 0;
  *out_lanes = (sluice_lanes_t){(double)first->compute_ns, (double)first->comm_ns, (double)first->comm_cpu_ns,
                                (double)first->header_ns};
  for (int32_t r = 0; r < world_size; ++r) {
    const sluice_pass_report_t* p = &reports[r]->pass[direction];
    if (p->pass_ns == 0 || p->plan != first->plan || !sluice_pass_choice_is(&p->choice, &first->choice)) return 0;
    if (p->pass_ns > ns) ns = p->pass_ns;
    if (p->rows > *out_rows) *out_rows = p->rows;
    if ((double)p->compute_ns > out_lanes->compute) out_lanes->compute = (double)p->compute_ns;
    if ((double)p->header_ns < out_lanes->startup) out_lanes->startup = (double)p->header_ns;
    if ((double)p->comm_ns < out_lanes->comm) {
      out_lanes->comm = (double)p->comm_ns, out_lanes->comm_cpu = (double)p->comm_cpu_ns;
    }
  }
  return ns;
}

static double slower_of(double least, uint16_t rate) {
  const double bytes = (double)sluice_bf16_to_f32(rate) * 1e9;
  return bytes > 0 && (least <= 0 || bytes < least) ? bytes : least;
}

void sluice_tuner_slowest_bytes(const sluice_step_report_t* const* reports, int32_t world_size, double* out_memory,
                                double* out_copies) {
  *out_memory = *out_copies = 0;
  for (int32_t r = 0; r < world_size; ++r) {
    *out_memory = slower_of(*out_memory, reports[r]->memory_rate);
    *out_copies = slower_of(*out_copies, reports[r]->copy_rate);
  }
}

int sluice_tuner_has_trained(const sluice_step_report_t* const* reports, int32_t world_size) {
  for (int32_t r = 0; r < world_size; ++r) {
    if (reports[r]->pass[SLUICE_FORWARD].pass_ns > 0 || reports[r]->pass[SLUICE_BACKWARD].pass_ns > 0) return 1;
  }
  return 0;
}
