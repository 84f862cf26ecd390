// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/layer_planner.h"

#include <math.h>
#include <string.h>

#include "backend/model/pass_sizes.h"
#include "backend/model/restore.h"
#include "backend/model/words.h"
#include "backend/schedule/template/template.h"

/* Profiles describe clusters whose devices have their own memory, with chunks divided by tokens. */
static sluice_workload_t workload_of(const sluice_machine_t* machine, const sluice_planner_workload_t* w) {
  return (sluice_workload_t){
      .model_width = w->model_width,
      .hidden_width = w->hidden_width,
      .num_experts = w->num_experts,
      .top_k = w->top_k,
      .gate_factor = w->gated ? 2 : 1,
      .dtype = w->dtype,
      .world_size = w->world_size,
      .callback = w->callback_experts,
      .chunking = machine->provenance == SLUICE_MACHINE_PROFILE ? SLUICE_CHUNKING_TOKENS : w->chunking,
      .num_tokens = w->num_tokens,
      .skew = w->skew,
      .deduplicate = w->world_size > 1 ? w->deduplicate : SLUICE_DEDUPLICATE_NONE,
      .ranks_per_node = machine->ranks_per_node,
      .activation = w->activation == SLUICE_ACTIVATION_IDENTITY ? SLUICE_ACTIVATION_GELU : w->activation,
      .lora_rank = w->lora_rank,
      .is_frozen = w->weight_format != SLUICE_WEIGHTS_PLAIN,
  };
}

/* ---- bytes ---- */

static uint64_t cpu_events_bytes(const struct sluice_device_s* device, int32_t num_ops) {
  (void)device;
  return num_ops == 0 ? 0 : sluice_align_up((uint64_t)num_ops * SLUICE_CPU_JOB_BYTES);
}

sluice_plan_problem_t sluice_planner_problem(const sluice_machine_t* machine, const sluice_planner_workload_t* w,
                                             const sluice_planner_asked_t* asked, sluice_ring_memo_t* rings) {
  sluice_moe_config_t config = {
      .model_width = w->model_width,
      .hidden_width = w->callback_experts ? 0 : w->hidden_width,
      .num_experts = w->num_experts,
      .top_k = w->top_k,
      .dtype = w->dtype,
      .gated = w->gated,
      .callback_experts = w->callback_experts,
      .deduplicate = w->deduplicate,
      .lora_rank = w->lora_rank,
      .weight_format = w->weight_format,
      .weight_block = w->weight_block,
      .restore_input = SLUICE_RESTORE_ADAPTIVE,
      .restore_pre_activation = w->callback_experts ? asked->choice.restore_pre_activation : SLUICE_RESTORE_ADAPTIVE,
      .wgrad_mode = SLUICE_WGRAD_ADAPTIVE,
  };
  sluice_plan_problem_t problem = {
      .header_bytes = sluice_headers_bytes(w->world_size),
      .gemm_bytes = SLUICE_BORROWED_GEMM_BYTES,
      .events_bytes = cpu_events_bytes,
      .rings = rings,
  };
  sluice_shape_init(&problem.shape, &config, &asked->policies, 0, w->world_size, NULL, 0);
  sluice_shape_set_nodes(&problem.shape, machine->ranks_per_node);
  return problem;
}

uint64_t sluice_planner_base_bytes(const sluice_shape_t* shape) {
  return SLUICE_CPU_CONTEXT_BYTES + sluice_align_up(SLUICE_LAYER_BYTES) +
         sluice_align_up(sluice_layer_tables_bytes(shape->config.num_experts, shape->world_size));
}

static sluice_plan_inputs_t plan_inputs(const sluice_plan_problem_t* problem, const sluice_planner_workload_t* w,
                                        const sluice_planner_asked_t* asked) {
  const sluice_planner_choice_t* wanted = &asked->choice;
  return (sluice_plan_inputs_t){
      .max_tokens = w->num_tokens,
      .budget = w->memory_budget,
      .host_budget = w->host_memory_budget,
      .base = sluice_planner_base_bytes(&problem->shape),
      .max_outstanding = w->max_outstanding,
      .num_chunks = wanted->num_chunks,
      .restore_input = wanted->restore_input,
      .restore_pre_activation = wanted->restore_pre_activation,
      .wgrad_mode = wanted->wgrad_mode,
      .policies = asked->policies,
  };
}

/* Keeps the sizes of the only candidate, whether it fits the budget or not. */
static void keep_candidate(void* user, const sluice_plan_data_t* plan, int32_t fits) {
  (void)fits;
  *(sluice_plan_data_t*)user = *plan;
}

static sluice_status_t plan_bytes(const sluice_machine_t* machine, const sluice_planner_workload_t* w,
                                  const sluice_planner_asked_t* asked, sluice_plan_data_t* out_plan) {
  sluice_ring_memo_t rings = {0};
  const sluice_plan_problem_t problem = sluice_planner_problem(machine, w, asked, &rings);
  const sluice_plan_inputs_t inputs = plan_inputs(&problem, w, asked);
  sluice_plan_data_t best;
  sluice_status_t status = sluice_plan_make(&problem, &inputs, NULL, keep_candidate, out_plan, &best);
  if (status == SLUICE_E_OVER_BUDGET) status = SLUICE_OK;
  if (status == SLUICE_OK && w->kept_chunks > 0) status = sluice_plan_keep_chunks(&problem, w->kept_chunks, out_plan);
  sluice_ring_memo_deinit(&rings);
  return status;
}

/* Returns the total if no rank receives more than `rows`, in as many chunks as then run. */
static sluice_status_t usual_bytes(const sluice_machine_t* machine, const sluice_planner_workload_t* w,
                                   const sluice_planner_asked_t* asked, const sluice_plan_data_t* plan, double rows,
                                   int32_t run_chunks, uint64_t* out_bytes) {
  sluice_ring_memo_t rings = {0};
  const sluice_plan_problem_t problem = sluice_planner_problem(machine, w, asked, &rings);
  sluice_plan_data_t usual = *plan;
  usual.worst_rows = sluice_min(plan->worst_rows, (int64_t)ceil(rows));
  usual.kept_rows = sluice_min(plan->kept_rows, usual.worst_rows);
  usual.max_chunks = run_chunks;
  usual.chunk_rows = sluice_ceil_div(usual.worst_rows, run_chunks); /* within the plan's under a budget */
  sluice_status_t status = sluice_plan_measure(&problem, &usual);
  sluice_ring_memo_deinit(&rings);
  *out_bytes = sluice_min_u64(usual.bytes.total, plan->bytes.total);
  return status;
}

/* ---- predicting ---- */

typedef struct scene_s {
  const sluice_machine_t* machine;
  sluice_workload_t work;
  sluice_choice_t choice;
} scene_t;

/* Under a budget, a rank that receives more than its share makes all ranks use more chunks. plan: borrowed with it. */
static sluice_choice_t choice_of(const sluice_workload_t* w, const sluice_plan_data_t* plan, int32_t grouped) {
  int bounded = plan->inputs.budget != 0 || plan->inputs.host_budget != 0;
  const sluice_choice_t whole = {.num_chunks = 1};
  double rows = sluice_rows_of(w, &whole).received;
  int32_t n = plan->num_chunks;
  if (bounded && rows > (double)n * (double)plan->chunk_rows) n = (int32_t)ceil(rows / (double)plan->chunk_rows);
  if (n > plan->max_chunks) n = plan->max_chunks;
  return (sluice_choice_t){n,
                           plan->restore_input,
                           plan->restore_pre_activation,
                           plan->wgrad_mode,
                           bounded,
                           &plan->inputs.policies,
                           bounded ? plan->kept_chunks : 0,
                           plan->shares_act,
                           !bounded && grouped};
}

static void write_entries(const sluice_template_t* schedule, const double* begin, const double* end,
                          sluice_planner_entry_t* entries, int32_t capacity, int32_t at) {
  for (int32_t i = 0; i < schedule->num_ops && at + i < capacity; ++i) {
    const sluice_op_t* op = &schedule->ops[i];
    entries[at + i] = (sluice_planner_entry_t){
        begin[i], end[i], sluice_op_name(op->kind), schedule->spec.direction, op->lane, op->chunk, i};
  }
}

static sluice_status_t predict_direction(scene_t* s, int32_t direction, double* out_seconds, double* out_busy,
                                         sluice_planner_entry_t* entries, int32_t capacity, int32_t* inout_count) {
  sluice_template_t* schedule = NULL;
  SLUICE_TRY(sluice_choice_template(&s->work, &s->choice, direction, &schedule));
  uint64_t bytes = 2 * (uint64_t)schedule->num_ops * sizeof(double);
  double* begin = sluice_alloc(sluice_process_allocator(), bytes, "timeline");
  sluice_status_t status = begin == NULL ? sluice_alloc_status() : SLUICE_OK;
  if (begin != NULL) {
    double* end = begin + schedule->num_ops;
    sluice_prediction_t p;
    sluice_pass_costs_t state;
    const sluice_op_costs_t costs = sluice_pass_costs(&state, s->machine, &s->work, &s->choice, direction);
    status = sluice_predict(schedule, &costs, sluice_process_allocator(), &p, begin, end);
    if (status == SLUICE_OK) {
      *out_seconds = p.total + sluice_pass_overhead(s->machine, &s->work, direction);
      memcpy(out_busy, p.busy, sizeof p.busy);
      write_entries(schedule, begin, end, entries, capacity, *inout_count);
      *inout_count += schedule->num_ops;
    }
  }
  sluice_free(sluice_process_allocator(), begin, bytes);
  sluice_template_destroy(schedule, sluice_process_allocator());
  return status;
}

static uint64_t bytes_over(uint64_t bytes, uint64_t budget) {
  return budget != 0 && bytes > budget ? bytes - budget : 0;
}

static void fill_bytes(const sluice_plan_data_t* plan, const sluice_planner_workload_t* w,
                       sluice_planner_prediction_t* p) {
  p->base_bytes = plan->bytes.base, p->slot_bytes = plan->bytes.slots, p->routing_bytes = plan->bytes.routing;
  p->schedule_bytes = plan->bytes.schedules, p->header_bytes = plan->bytes.headers;
  p->gemm_bytes = plan->bytes.gemms, p->step_bytes = plan->bytes.step, p->total_bytes = plan->bytes.total;
  p->chunk_rows = plan->chunk_rows;
  p->max_chunks = plan->max_chunks, p->kept_chunks = plan->kept_chunks;
  p->fits = bytes_over(plan->bytes.total, w->memory_budget) == 0 &&
            bytes_over(plan->bytes.host_pool, w->host_memory_budget) == 0;
}

sluice_status_t sluice_planner_predict_layer(const sluice_machine_t* m, const sluice_planner_workload_t* w,
                                             const sluice_planner_asked_t* asked, sluice_planner_prediction_t* p,
                                             sluice_planner_entry_t* entries, int32_t capacity) {
  scene_t s = {.machine = m, .work = workload_of(m, w)};
  SLUICE_TRY(sluice_machine_check_for(m, w->dtype, w->world_size));
  sluice_plan_data_t plan;
  SLUICE_TRY(plan_bytes(m, w, asked, &plan));
  s.choice = choice_of(&s.work, &plan, w->grouped);
  p->run_chunks = s.choice.num_chunks;
  fill_bytes(&plan, w, p);
  SLUICE_TRY(
      predict_direction(&s, SLUICE_FORWARD, &p->forward_seconds, p->forward_busy, entries, capacity, &p->num_entries));
  SLUICE_TRY(predict_direction(&s, SLUICE_BACKWARD, &p->backward_seconds, p->backward_busy, entries, capacity,
                               &p->num_entries));
  p->overhead_seconds = sluice_pass_overhead(m, &s.work, SLUICE_BACKWARD);
  const sluice_choice_t whole = {.num_chunks = 1};
  const sluice_chunk_rows_t rows = sluice_rows_of(&s.work, &whole);
  p->sent_rows = rows.out;
  SLUICE_TRY(usual_bytes(m, w, asked, &plan, rows.received, p->run_chunks, &p->usual_bytes));
  p->mpmoe_forward_seconds = sluice_mpmoe_seconds(m, &s.work, &s.choice, SLUICE_FORWARD);
  p->mpmoe_backward_seconds = sluice_mpmoe_seconds(m, &s.work, &s.choice, SLUICE_BACKWARD);
  p->mpipemoe_forward_seconds = sluice_mpipemoe_seconds(m, &s.work, &s.choice, SLUICE_FORWARD);
  p->mpipemoe_backward_seconds = sluice_mpipemoe_seconds(m, &s.work, &s.choice, SLUICE_BACKWARD);
  p->machine_error_median = m->error_median, p->machine_error_p90 = m->error_p90;
  return SLUICE_OK;
}

/* ---- choosing ---- */

static double seconds_of(const sluice_planner_candidate_t* c) { return c->forward_seconds + c->backward_seconds; }

static void add_candidate(void* user, const sluice_plan_data_t* plan, int32_t fits) {
  sluice_planner_candidates_t* all = user;
  if (all->count == SLUICE_PLANNER_MOST_CANDIDATES || all->status != SLUICE_OK) return;
  const sluice_choice_t choice = choice_of(&all->work, plan, 0);
  sluice_step_prediction_t p;
  all->status = sluice_predict_step(all->machine, &all->work, &choice, &p);
  if (all->status != SLUICE_OK) return;
  sluice_planner_candidate_t* c = &all->list[all->count];
  memset(c, 0, sizeof *c);
  c->choice =
      (sluice_planner_choice_t){plan->num_chunks, plan->restore_input, plan->restore_pre_activation, plan->wgrad_mode};
  c->forward_seconds = p.seconds[SLUICE_FORWARD], c->backward_seconds = p.seconds[SLUICE_BACKWARD];
  c->total_bytes = plan->bytes.total, c->kept_chunks = plan->kept_chunks;
  uint64_t over = bytes_over(c->total_bytes, plan->inputs.budget);
  if (!fits) {
    c->verdict = over > 0 ? SLUICE_PLANNER_OVER_BUDGET : SLUICE_PLANNER_OVER_HOST_BUDGET;
    c->bytes_over = over > 0 ? over : bytes_over(plan->bytes.host_pool, plan->inputs.host_budget);
  } else if (all->best < 0 || seconds_of(c) < seconds_of(&all->list[all->best])) {
    all->best = all->count; /* candidates are ordered by n: among equal ones the first has the fewest chunks */
  }
  ++all->count;
}

static void add_part(void* user, const sluice_plan_data_t* plan, int32_t fits) {
  if (fits && plan->kept_chunks < plan->num_chunks) add_candidate(user, plan, fits);
}

static void judge(sluice_planner_candidates_t* all) {
  if (all->best < 0) return;
  double best = seconds_of(&all->list[all->best]);
  for (int32_t i = 0; i < all->count; ++i) {
    sluice_planner_candidate_t* c = &all->list[i];
    c->slower_by = seconds_of(c) / best - 1;
    if (c->verdict == SLUICE_PLANNER_OVER_BUDGET || c->verdict == SLUICE_PLANNER_OVER_HOST_BUDGET) continue;
    c->verdict = i == all->best         ? SLUICE_PLANNER_CHOSEN
                 : seconds_of(c) > best ? SLUICE_PLANNER_SLOWER
                                        : SLUICE_PLANNER_EQUAL;
  }
}

sluice_status_t sluice_planner_choose_layer(const sluice_machine_t* machine, const sluice_planner_workload_t* w,
                                            const sluice_planner_asked_t* wanted, sluice_planner_candidates_t* all) {
  memset(all, 0, sizeof *all);
  all->machine = machine, all->work = workload_of(machine, w), all->best = -1;
  SLUICE_TRY(sluice_machine_check_for(all->machine, w->dtype, w->world_size));
  sluice_ring_memo_t rings = {0};
  const sluice_plan_problem_t problem = sluice_planner_problem(machine, w, wanted, &rings);
  sluice_plan_inputs_t inputs = plan_inputs(&problem, w, wanted);
  sluice_plan_data_t ignored; /* the plan's own choice, which uses default rates */
  sluice_status_t status = sluice_plan_make(&problem, &inputs, NULL, add_candidate, all, &ignored);
  if (w->may_keep_part && (status == SLUICE_OK || status == SLUICE_E_OVER_BUDGET)) {
    inputs.may_keep_part = 1;
    status = sluice_plan_make(&problem, &inputs, NULL, add_part, all, &ignored);
  }
  sluice_ring_memo_deinit(&rings);
  judge(all);
  return all->status != SLUICE_OK ? all->status : status;
}

/* ---- options of the planner over layers ---- */

typedef struct filling_s {
  const sluice_machine_t* machine;
  sluice_workload_t work;
  const sluice_moe_allowed_t* allowed;
  sluice_moe_options_t* options;
  uint64_t layer_bytes; /* handle and tables */
  sluice_status_t status;
} filling_t;

static int is_allowed(const sluice_moe_allowed_t* allowed, int32_t restore) {
  const sluice_restore_t* row = sluice_restore(restore);
  const int again = row->exchanges > 0 || row->gemms > 0;
  return (allowed->recompute || !again) && (allowed->offload || row->host_rows == 0);
}

static int32_t kind_of(const sluice_plan_data_t* plan) {
  const int is_kept =
      sluice_restore_is_kept(plan->restore_input) && sluice_restore_is_kept(plan->restore_pre_activation);
  return is_kept ? SLUICE_STAGES_KEEP : SLUICE_STAGES_MIXED;
}

static void add_option(void* user, const sluice_plan_data_t* plan, int32_t fits) {
  filling_t* f = user;
  (void)fits;
  sluice_moe_options_t* o = f->options;
  if (!is_allowed(f->allowed, plan->restore_input) || !is_allowed(f->allowed, plan->restore_pre_activation)) return;
  if (o->count == SLUICE_PLANNER_MOST_CANDIDATES || f->status != SLUICE_OK) return;
  const sluice_choice_t choice = choice_of(&f->work, plan, 0);
  sluice_step_prediction_t prediction;
  f->status = sluice_predict_step(f->machine, &f->work, &choice, &prediction);
  if (f->status != SLUICE_OK) return;
  const sluice_plan_bytes_t* b = &plan->bytes;
  o->list[o->count] = (sluice_stages_option_t){
      .forward_seconds = prediction.seconds[SLUICE_FORWARD],
      .backward_seconds = prediction.seconds[SLUICE_BACKWARD],
      .resident_bytes = f->layer_bytes + b->routing + b->schedules,
      .held_bytes = b->step,
      .arena_bytes = SLUICE_CPU_CONTEXT_BYTES + b->slots + b->headers + b->gemms,
      .kind = kind_of(plan),
      .tag = o->count,
  };
  o->choices[o->count] =
      (sluice_planner_choice_t){plan->num_chunks, plan->restore_input, plan->restore_pre_activation, plan->wgrad_mode};
  ++o->count;
}

sluice_status_t sluice_moe_options_make(const sluice_machine_t* machine, const sluice_planner_workload_t* w,
                                        const sluice_planner_asked_t* wanted, const sluice_moe_allowed_t* allowed,
                                        sluice_moe_options_t* out) {
  memset(out, 0, sizeof *out);
  SLUICE_TRY(sluice_machine_check_for(machine, w->dtype, w->world_size));
  sluice_ring_memo_t rings = {0};
  const sluice_plan_problem_t problem = sluice_planner_problem(machine, w, wanted, &rings);
  const sluice_plan_inputs_t inputs = plan_inputs(&problem, w, wanted);
  filling_t filling = {.machine = machine,
                       .work = workload_of(machine, w),
                       .allowed = allowed,
                       .options = out,
                       .layer_bytes = inputs.base - SLUICE_CPU_CONTEXT_BYTES};
  const sluice_status_t status = sluice_plan_visit_leanest(&problem, &inputs, add_option, &filling);
  sluice_ring_memo_deinit(&rings);
  SLUICE_TRY(status);
  SLUICE_TRY(filling.status);
  return SLUICE_REQUIRE(out->count > 0,
                        "no choice of what is wanted remains: may_recompute is %d and may_offload %d; set one of them "
                        "to 1, or leave restore_input and restore_pre_activation open",
                        allowed->recompute, allowed->offload);
}

void sluice_moe_options_name(const sluice_planner_choice_t* choice, sluice_text_t* text) {
  sluice_text_add(text, "n %d (T_DI %s, T_M %s, weight gradients %s)", choice->num_chunks,
                  sluice_restore_name(choice->restore_input), sluice_restore_name(choice->restore_pre_activation),
                  sluice_wgrad_word(choice->wgrad_mode));
}
