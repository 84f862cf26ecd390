// SPDX-License-Identifier: Apache-2.0
#include "capi/src/stage_layers.h"

#include <math.h>
#include <string.h>

#include "backend/base/alloc.h"
#include "backend/base/structs.h"
#include "backend/planner/stages/plan_stages.h"
#include "capi/src/planner.h"

/* Keeps sums of options exact; the solver checks the sum over layers. */
#define MOST_BYTES ((uint64_t)1 << 53)

/* ---- checks ---- */

static sluice_status_t check_seconds(double seconds, const char* field) {
  return SLUICE_REQUIRE(isfinite(seconds) && seconds >= 0, "%s is %g; it must be finite and at least 0", field,
                        seconds);
}

static sluice_status_t check_flags(const sluice_planner_layer_t* l) {
  SLUICE_TRY(SLUICE_REQUIRE(l->reserved == 0, "reserved is %d; set it to 0", l->reserved));
  return SLUICE_REQUIRE(
      (l->may_recompute == 0 || l->may_recompute == 1) && (l->may_offload == 0 || l->may_offload == 1),
      "may_recompute is %d and may_offload %d: both are 0 or 1", l->may_recompute, l->may_offload);
}

static sluice_status_t check_numbers(const sluice_planner_layer_t* l) {
  SLUICE_TRY(check_seconds(l->forward_seconds, "forward_seconds"));
  SLUICE_TRY(check_seconds(l->backward_seconds, "backward_seconds"));
  SLUICE_TRY(check_seconds(l->recompute_seconds, "recompute_seconds"));
  SLUICE_TRY(SLUICE_REQUIRE(l->activation_bytes < MOST_BYTES && l->workspace_bytes < MOST_BYTES,
                            "activation_bytes is %llu and workspace_bytes %llu; both must be below 2^53",
                            (unsigned long long)l->activation_bytes, (unsigned long long)l->workspace_bytes));
  return SLUICE_REQUIRE(l->checkpoint_bytes <= l->activation_bytes,
                        "checkpoint_bytes is %llu and activation_bytes %llu, which includes them",
                        (unsigned long long)l->checkpoint_bytes, (unsigned long long)l->activation_bytes);
}

static sluice_status_t check_kind(const sluice_planner_layer_t* l) {
  SLUICE_TRY(
      SLUICE_REQUIRE(l->moe == NULL || l->options == NULL, "moe and options are both set; set only one of them"));
  SLUICE_TRY(SLUICE_REQUIRE((l->moe == NULL) == (l->planner == NULL), "%s is set without %s",
                            l->moe == NULL ? "planner" : "moe", l->moe == NULL ? "moe" : "planner"));
  SLUICE_TRY(SLUICE_REQUIRE(l->wanted == NULL || l->moe != NULL, "wanted is set without moe"));
  SLUICE_TRY(SLUICE_REQUIRE((l->num_options > 0) == (l->options != NULL), "num_options is %d with options %s",
                            l->num_options, l->options == NULL ? "NULL" : "set"));
  const int is_plain = l->moe == NULL && l->options == NULL;
  SLUICE_TRY(SLUICE_REQUIRE(is_plain || (l->recompute_seconds == 0 && l->checkpoint_bytes == 0),
                            "recompute_seconds is %g and checkpoint_bytes %llu; with %s they are 0",
                            l->recompute_seconds, (unsigned long long)l->checkpoint_bytes,
                            l->moe != NULL ? "moe" : "options"));
  return SLUICE_REQUIRE(
      l->options == NULL ||
          (l->forward_seconds == 0 && l->backward_seconds == 0 && l->activation_bytes == 0 && l->workspace_bytes == 0),
      "forward_seconds, backward_seconds, activation_bytes and workspace_bytes are 0 with options, which have their "
      "own");
}

/* ---- the three kinds of layer ---- */

static sluice_status_t read_plain(sluice_stage_layer_t* layer, sluice_stages_layer_t* out) {
  const sluice_planner_layer_t* l = &layer->given;
  const sluice_stages_profile_t profile = {
      .forward_seconds = l->forward_seconds,
      .backward_seconds = l->backward_seconds,
      .recompute_seconds = l->recompute_seconds,
      .activation_bytes = l->activation_bytes,
      .checkpoint_bytes = l->checkpoint_bytes,
      .workspace_bytes = l->workspace_bytes,
  };
  sluice_stages_option_t all[SLUICE_STAGES_PROFILE_OPTIONS];
  sluice_stages_options_of_profile(&profile, all);
  const int32_t may[SLUICE_STAGES_PROFILE_OPTIONS] = {1, l->may_recompute, l->may_offload};
  for (int32_t kind = 0; kind < SLUICE_STAGES_PROFILE_OPTIONS; ++kind) {
    if (may[kind]) layer->profile[out->num_options++] = all[kind];
  }
  out->options = layer->profile;
  return SLUICE_OK;
}

static sluice_status_t read_own(sluice_stage_layer_t* layer, sluice_stages_layer_t* out) {
  const sluice_planner_layer_t* l = &layer->given;
  for (int32_t o = 0; o < l->num_options; ++o) {
    const int32_t kind = l->options[o].kind;
    SLUICE_TRY(SLUICE_REQUIRE(kind >= SLUICE_STAGES_KEEP && kind <= SLUICE_STAGES_MIXED,
                              "kind of option %d is %d: use SLUICE_STAGES_KEEP, _RECOMPUTE, _OFFLOAD or _MIXED", o,
                              kind));
  }
  out->options = l->options, out->num_options = l->num_options;
  return SLUICE_OK;
}

static sluice_status_t check_workload(const sluice_planner_workload_t* w) {
  return SLUICE_REQUIRE(w->memory_budget == 0 && w->host_memory_budget == 0 && w->kept_chunks == 0 &&
                            w->may_keep_part == 0 && w->max_outstanding == 1 && w->restore_input_of == NULL &&
                            w->restore_pre_activation_of == NULL,
                        "workload: memory_budget, host_memory_budget, kept_chunks and may_keep_part are 0, "
                        "max_outstanding is 1 and lists by chunk are NULL here: budgets and outstanding micro-batches "
                        "are those of the stages");
}

static sluice_status_t price(sluice_stage_layer_t* layer) {
  const sluice_planner_layer_t* l = &layer->given;
  sluice_planner_workload_t workload;
  sluice_planner_asked_t asked;
  SLUICE_TRY(sluice_planner_read_workload(l->moe, &workload));
  SLUICE_TRY(check_workload(&workload));
  SLUICE_TRY(sluice_planner_read_choice(&workload, l->wanted, 1, &asked));
  layer->owned = sluice_alloc(sluice_process_allocator(), sizeof *layer->owned, "options of a MoE layer");
  if (layer->owned == NULL) return sluice_alloc_status();
  layer->moe = layer->owned;
  const sluice_moe_allowed_t allowed = {l->may_recompute, l->may_offload};
  return sluice_moe_options_make(sluice_planner_machine(l->planner), &workload, &asked, &allowed, layer->owned);
}

/* Layers with pointers to the same structs are priced only once. */
static const sluice_moe_options_t* priced_before(const sluice_stage_layers_t* layers, int32_t count) {
  const sluice_planner_layer_t* l = &layers->of[count].given;
  for (int32_t i = 0; i < count; ++i) {
    const sluice_planner_layer_t* other = &layers->of[i].given;
    if (other->moe == l->moe && other->planner == l->planner && other->wanted == l->wanted &&
        other->may_recompute == l->may_recompute && other->may_offload == l->may_offload)
      return layers->of[i].moe;
  }
  return NULL;
}

static sluice_status_t read_moe(const sluice_stage_layers_t* layers, int32_t index, sluice_stages_layer_t* out) {
  sluice_stage_layer_t* layer = &layers->of[index];
  const sluice_planner_layer_t* l = &layer->given;
  layer->moe = priced_before(layers, index);
  if (layer->moe == NULL) SLUICE_TRY(price(layer));
  const uint64_t bytes = (uint64_t)layer->moe->count * sizeof *layer->with_host;
  layer->with_host = sluice_alloc(sluice_process_allocator(), bytes, "options of a MoE layer");
  if (layer->with_host == NULL) return sluice_alloc_status();
  memcpy(layer->with_host, layer->moe->list, bytes);
  for (int32_t o = 0; o < layer->moe->count; ++o) {
    sluice_stages_option_t* option = &layer->with_host[o];
    option->forward_seconds += l->forward_seconds, option->backward_seconds += l->backward_seconds;
    option->held_bytes += l->activation_bytes, option->working_bytes += l->workspace_bytes;
  }
  out->options = layer->with_host, out->num_options = layer->moe->count;
  return SLUICE_OK;
}

/* All contexts, and so the arena, belong to one group of ranks. */
static sluice_status_t check_group(const sluice_stage_layers_t* layers, int32_t index) {
  const sluice_planner_workload_t* own = layers->of[index].given.moe;
  for (int32_t i = 0; own != NULL && i < index; ++i) {
    const sluice_planner_workload_t* other = layers->of[i].given.moe;
    if (other == NULL || other->world_size == own->world_size) continue;
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "world_size is %d, and %d in layer %d: MoE layers of a model share one context, and with it its "
                       "ranks",
                       own->world_size, other->world_size, i);
  }
  return SLUICE_OK;
}

/* ---- all layers ---- */

static sluice_status_t read_layer(const sluice_stage_layers_t* layers, const sluice_planner_layer_t* given,
                                  int32_t index) {
  sluice_stage_layer_t* layer = &layers->of[index];
  sluice_stages_layer_t* out = &layers->list[index];
  sluice_planner_layer_t* l = &layer->given;
  SLUICE_TRY(sluice_struct_copy(l, sizeof *l, given, sizeof *l, "sluice_planner_layer_t"));
  SLUICE_TRY(sluice_struct_check_next(l->next, "sluice_planner_layer_t"));
  SLUICE_TRY(check_flags(l));
  SLUICE_TRY(check_kind(l));
  SLUICE_TRY(check_numbers(l));
  *out = (sluice_stages_layer_t){
      .parameter_bytes = l->parameter_bytes, .state_bytes = l->state_bytes, .output_bytes = l->output_bytes};
  if (l->options != NULL) return read_own(layer, out);
  if (l->moe == NULL) return read_plain(layer, out);
  SLUICE_TRY(read_moe(layers, index, out));
  return check_group(layers, index);
}

/* Adds the layer to an error message. */
static sluice_status_t of_layer(int32_t index, sluice_status_t status) {
  if (status == SLUICE_OK || sluice_is_out_of_memory(status)) return status;
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_capture(&why);
  return SLUICE_FAIL(status, "layer %d: %s", index, why.message);
}

sluice_status_t sluice_stage_layers_make(const sluice_planner_problem_t* problem, sluice_stage_layers_t* layers) {
  const int32_t n = problem->num_layers;
  *layers = (sluice_stage_layers_t){.count = n};
  layers->of = sluice_alloc_zeroed(sluice_process_allocator(), (uint64_t)n * sizeof *layers->of, "layers");
  layers->list = sluice_alloc_zeroed(sluice_process_allocator(), (uint64_t)n * sizeof *layers->list, "layers");
  sluice_status_t status = layers->of == NULL || layers->list == NULL ? sluice_alloc_status() : SLUICE_OK;
  for (int32_t i = 0; i < n && status == SLUICE_OK; ++i) {
    status = of_layer(i, read_layer(layers, problem->layers[i], i));
  }
  if (status != SLUICE_OK) sluice_stage_layers_deinit(layers);
  return status;
}

void sluice_stage_layers_deinit(sluice_stage_layers_t* layers) {
  sluice_allocator_t* allocator = sluice_process_allocator();
  for (int32_t i = 0; layers->of != NULL && i < layers->count; ++i) {
    sluice_stage_layer_t* layer = &layers->of[i];
    if (layer->with_host != NULL)
      sluice_free(allocator, layer->with_host, (uint64_t)layer->moe->count * sizeof *layer->with_host);
  }
  /* Freed after the layers that borrow them. */
  for (int32_t i = 0; layers->of != NULL && i < layers->count; ++i)
    sluice_free(allocator, layers->of[i].owned, sizeof *layers->of[i].owned);
  sluice_free(allocator, layers->of, (uint64_t)layers->count * sizeof *layers->of);
  sluice_free(allocator, layers->list, (uint64_t)layers->count * sizeof *layers->list);
  *layers = (sluice_stage_layers_t){0};
}

/* ---- names ---- */

static int is_plain(const sluice_stage_layer_t* layer) { return layer->moe == NULL && layer->given.options == NULL; }

int32_t sluice_stage_layer_option(const sluice_stage_layers_t* layers, int32_t layer, int32_t option) {
  return is_plain(&layers->of[layer]) ? layers->list[layer].options[option].kind : option;
}

int32_t sluice_stage_layer_place(const sluice_stage_layers_t* layers, int32_t layer, int32_t number) {
  if (!is_plain(&layers->of[layer])) return number;
  int32_t place = 0;
  while (place < layers->list[layer].num_options && layers->list[layer].options[place].kind != number) ++place;
  return place;
}

void sluice_stage_layers_name(void* user, int32_t layer, int32_t option, sluice_text_t* text) {
  const sluice_stage_layers_t* layers = user;
  const sluice_stage_layer_t* l = &layers->of[layer];
  if (l->moe != NULL) {
    sluice_moe_options_name(&l->moe->choices[option], text);
    return;
  }
  sluice_text_add(text, "%s", sluice_stages_kind_name(layers->list[layer].options[option].kind));
  if (!is_plain(l)) sluice_text_add(text, " (option %d)", option);
}
