/* Choosing a plan: candidates (n, restore policy, weight-gradient mode), their bytes at the ceilings, and a relative
 * time for each by the closed forms, or by the chooser where it knows the machine. */
#include "backend/moe/plan.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/moe/binding.h"
#include "backend/moe/ceiling.h"
#include "backend/moe/pass.h"
#include "backend/moe/step.h"
#include "backend/moe/weight_grad.h"

/* Chunks may receive a quarter more rows than balanced routing gives them before they are cut shorter. */
#define SLACK_NUMERATOR   5
#define SLACK_DENOMINATOR 4

static const int32_t chunk_candidates[] = {1, 2, 3, 4, 6, 8, 12, 16};
#define NUM_CANDIDATES ((int32_t)(sizeof chunk_candidates / sizeof chunk_candidates[0]))
static const int32_t policies_di[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_REDISPATCH};
static const int32_t policies_m[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- rows ---- */

/* The most local experts of any rank: ceilings are the same on all ranks. */
static int32_t most_local(const sluice_moe_t* moe) {
  int32_t most = 0;
  for (int32_t r = 0; r < moe->context->world_size; ++r) {
    int32_t experts = sluice_layer_experts_of(moe, r);
    if (experts > most) most = experts;
  }
  return most;
}

/* Routes of one token that one rank can own. */
static int64_t routes_per_rank(const sluice_moe_t* moe) { return min_i64(moe->config.top_k, most_local(moe)); }

static int64_t balanced_rows(const sluice_moe_t* moe, int64_t max_tokens) {
  return ceil_div(max_tokens * moe->context->world_size * moe->config.top_k * most_local(moe), moe->config.num_experts);
}

/* Under ceilings every chunk has the same rows on every rank: nothing is cut, and nothing needs to fall back. */
static void set_fixed_rows(const sluice_moe_t* moe, sluice_plan_data_t* plan) {
  plan->num_blocks = plan->num_chunks = plan->max_chunks = moe->config.num_chunks;
  plan->blocks_per_chunk = 1;
  plan->chunk_rows = moe->context->world_size * sluice_layer_ceiling(moe) * most_local(moe);
  plan->worst_rows = plan->num_chunks * plan->chunk_rows;
}

static void set_ceilings(const sluice_moe_t* moe, int32_t n, sluice_plan_data_t* plan) {
  if (sluice_layer_ceiling(moe) > 0) {
    set_fixed_rows(moe, plan);
    return;
  }
  int64_t tokens = plan->inputs.max_tokens, w = moe->context->world_size, routes = routes_per_rank(moe);
  int64_t balanced = balanced_rows(moe, tokens);
  plan->num_blocks = sluice_is_far(moe) ? SLUICE_PLAN_BLOCKS : (int32_t)max_i64(1, min_i64(SLUICE_PLAN_BLOCKS, tokens));
  plan->num_chunks = n;
  plan->blocks_per_chunk = (int32_t)ceil_div(plan->num_blocks, n);
  plan->worst_rows = w * tokens * routes;
  int64_t one_block = w * ceil_div(tokens, plan->num_blocks) * routes;
  int64_t wanted = ceil_div(balanced * SLACK_NUMERATOR, SLACK_DENOMINATOR * (int64_t)n);
  plan->chunk_rows = min_i64(plan->worst_rows, max_i64(one_block, wanted));
  plan->max_chunks = n == 1 && plan->chunk_rows == plan->worst_rows ? 1 : plan->num_blocks;
}

/* Rows that this rank may send in one chunk. */
static int64_t sent_rows(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  if (sluice_layer_ceiling(moe) > 0) return sluice_layer_ceiling(moe) * moe->config.num_experts;
  int64_t tokens = plan->inputs.max_tokens;
  int64_t per_chunk = plan->blocks_per_chunk * ceil_div(tokens, plan->num_blocks);
  return min_i64(tokens, per_chunk) * moe->config.top_k;
}

/* ---- bytes ---- */

static int is_stored(int32_t restore) { return restore == SLUICE_RESTORE_KEEP || restore == SLUICE_RESTORE_OFFLOAD; }

static uint64_t stored_row_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  uint64_t bytes = 0;
  if (is_stored(plan->restore_di)) bytes += sluice_pass_row_bytes(moe, SLUICE_T_KEPT_DI);
  if (is_stored(plan->restore_m)) bytes += sluice_pass_row_bytes(moe, SLUICE_T_KEPT_M);
  return bytes;
}

static uint64_t offloaded_row_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  uint64_t bytes = 0;
  if (plan->restore_di == SLUICE_RESTORE_OFFLOAD) bytes += sluice_pass_row_bytes(moe, SLUICE_T_KEPT_DI);
  if (plan->restore_m == SLUICE_RESTORE_OFFLOAD) bytes += sluice_pass_row_bytes(moe, SLUICE_T_KEPT_M);
  return bytes;
}

/* Buffers of the pool are one per chunk and tensor, each rounded up. */
static uint64_t host_pool_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int64_t kept_rows) {
  uint64_t row = offloaded_row_bytes(moe, plan);
  if (row == 0) return 0;
  return (uint64_t)plan->inputs.max_outstanding *
         ((uint64_t)kept_rows * row + (uint64_t)plan->max_chunks * 2 * SLUICE_ALIGNMENT);
}

static int fits_host(const sluice_plan_data_t* plan) {
  return plan->inputs.host_budget == 0 || plan->bytes.host_pool <= plan->inputs.host_budget;
}

/* Slots of `rows` rows in at most max_chunks chunks, each rounded up: a whole number of lines. */
static uint64_t stored_bytes(const sluice_plan_data_t* plan, uint64_t row) {
  uint64_t bytes = (uint64_t)plan->kept_rows * row + (uint64_t)plan->max_chunks * SLUICE_ALIGNMENT;
  return bytes / SLUICE_ALIGNMENT * SLUICE_ALIGNMENT;
}

uint64_t sluice_plan_block_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int32_t which) {
  uint64_t di = stored_bytes(plan, sluice_pass_row_bytes(moe, SLUICE_T_KEPT_DI));
  uint64_t m = stored_bytes(plan, sluice_pass_row_bytes(moe, SLUICE_T_KEPT_M));
  switch (which) {
    case SLUICE_SAVED_INPUT:
      return sluice_binding_routes_bytes(moe, plan->inputs.max_tokens) +
             (plan->restore_di == SLUICE_RESTORE_KEEP ? di : 0);
    case SLUICE_SAVED_MIDDLE: return plan->restore_m == SLUICE_RESTORE_KEEP ? m : 0;
    case SLUICE_SAVED_HOST_INPUT: return plan->restore_di == SLUICE_RESTORE_OFFLOAD ? di : 0;
    case SLUICE_SAVED_HOST_MIDDLE: return plan->restore_m == SLUICE_RESTORE_OFFLOAD ? m : 0;
    default: return 0;
  }
}

static uint64_t far_step_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  return sluice_plan_block_bytes(moe, plan, SLUICE_SAVED_INPUT) +
         sluice_plan_block_bytes(moe, plan, SLUICE_SAVED_MIDDLE);
}

uint64_t sluice_plan_step_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int32_t num_chunks,
                                const int64_t* kept_chunk_rows, int64_t num_tokens, int64_t num_sent) {
  if (sluice_is_far(moe)) return far_step_bytes(moe, plan); /* whatever the routing */
  uint64_t bytes = sluice_align_up(sizeof(sluice_step_t)) +
                   sluice_align_up(sluice_binding_meta_bytes_of(moe, num_chunks, num_tokens, num_sent));
  const int32_t policy[] = {plan->restore_di, plan->restore_m};
  const int32_t tensor[] = {SLUICE_T_KEPT_DI, SLUICE_T_KEPT_M};
  for (int which = 0; which < 2; ++which) {
    uint64_t row = sluice_pass_row_bytes(moe, tensor[which]), rows = 0, slots = 0;
    int32_t chunks = 0;
    for (int32_t i = 0; i < num_chunks && is_stored(policy[which]); ++i) {
      if (kept_chunk_rows[i] < 0) continue;
      rows += (uint64_t)kept_chunk_rows[i];
      slots += sluice_align_up((uint64_t)kept_chunk_rows[i] * row);
      ++chunks;
    }
    int joined =
        chunks == num_chunks && policy[which] == SLUICE_RESTORE_KEEP && (which == 0 || !moe->config.callback_experts);
    /* Two buffers each, one of them empty: an empty block still takes one line. */
    bytes += sluice_align_up(max_i64(1, (int64_t)(joined ? rows * row : slots))) + SLUICE_ALIGNMENT;
  }
  return bytes;
}

/* Whether every chunk has the plan's policies whatever the routing. */
static int is_uniform(const sluice_plan_data_t* plan) {
  return plan->kept_rows >= plan->worst_rows || !(is_stored(plan->restore_di) || is_stored(plan->restore_m));
}

static void fill_policies(const sluice_plan_data_t* plan, sluice_template_spec_t* spec) {
  int all_stored = is_uniform(plan);
  for (int32_t i = 0; i < spec->num_chunks; ++i) {
    int stored = all_stored || i < spec->num_chunks / 2;
    spec->restore_di[i] = (uint8_t)(stored ? plan->restore_di : SLUICE_RESTORE_REDISPATCH);
    spec->restore_m[i] = (uint8_t)(stored ? plan->restore_m : SLUICE_RESTORE_RECOMPUTE);
  }
}

/* Slots of one direction at the ceilings: a small template has all the rings that a large one has. Where the number of
 * chunks is fixed it is the template that will run. */
static sluice_status_t measure_slots(sluice_moe_t* moe, const sluice_plan_data_t* plan, int32_t direction,
                                     uint64_t* out_bytes) {
  int is_fixed = sluice_layer_ceiling(moe) > 0;
  sluice_template_spec_t spec = {
      .direction = direction,
      .num_chunks = is_fixed ? plan->num_chunks : (int32_t)min_i64(plan->max_chunks, 4),
      .single_rank = moe->context->world_size == 1,
      .keep = direction == SLUICE_FORWARD,
      .callback = moe->config.callback_experts,
      .gated = moe->config.gated != SLUICE_GATED_NO,
      .bounded = 1,
      .input_half = direction == SLUICE_BACKWARD,
      .weight_half = direction == SLUICE_BACKWARD ? SLUICE_WEIGHTS_NOW : SLUICE_WEIGHTS_NONE,
      .wgrad_mode = plan->wgrad_mode,
  };
  fill_policies(plan, &spec);
  sluice_template_t* schedule = NULL;
  SLUICE_TRY(sluice_template_build(&spec, sluice_process_allocator(), &schedule));
  uint64_t tensors = 0;
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) {
    int given = t == SLUICE_T_KEPT_DI || t == SLUICE_T_KEPT_M || t == SLUICE_T_HOST_DI || t == SLUICE_T_HOST_M;
    uint64_t row = sluice_pass_row_bytes(moe, t), ring = (uint64_t)schedule->ring[t];
    if (given || row == 0 || ring == 0) continue;
    uint64_t rows = (uint64_t)plan->chunk_rows;
    if (t == SLUICE_T_SEND || t == SLUICE_T_RECV) rows = (uint64_t)max_i64(plan->chunk_rows, sent_rows(moe, plan));
    uint64_t bytes = ring * sluice_align_up(rows * row);
    int one_per_chunk = ring == (uint64_t)spec.num_chunks && spec.num_chunks > 2;
    if (direction == SLUICE_BACKWARD && plan->wgrad_mode == SLUICE_WGRAD_DEFERRED) {
      one_per_chunk |= t == SLUICE_T_DI || t == SLUICE_T_M; /* all that were not kept, until the last product */
    }
    if (one_per_chunk && !is_fixed)
      bytes = (uint64_t)plan->worst_rows * row + (uint64_t)plan->max_chunks * SLUICE_ALIGNMENT;
    tensors += sluice_align_up(bytes);
  }
  sluice_template_destroy(schedule, sluice_process_allocator());
  if (direction == SLUICE_BACKWARD) {
    tensors += sluice_align_up(sluice_weight_sum_ceiling(moe, plan->wgrad_mode, plan->max_chunks, !is_uniform(plan)));
  }
  int64_t scalars = max_i64(plan->chunk_rows, sent_rows(moe, plan));
  if (sluice_is_far(moe)) {
    *out_bytes = tensors + sluice_pass_far_scratch_bytes((uint64_t)scalars * sizeof(float));
    return SLUICE_OK;
  }
  *out_bytes = tensors + sluice_pass_scratch_bytes(moe, (uint64_t)scalars * sizeof(float),
                                                   sluice_template_max_ops(plan->max_chunks));
  return SLUICE_OK;
}

static uint64_t far_base_bytes(const sluice_context_t* context) {
  sluice_device_t* device = context->device;
  return context->far_allocator.current_bytes - context->slots.capacity - context->routes.capacity -
         device->far->idle_bytes(device) - context->step_bytes;
}

uint64_t sluice_plan_base_bytes(const sluice_context_t* context) {
  if (context->device->far != NULL) return far_base_bytes(context);
  const sluice_arena_t* arenas[] = {&context->slots, &context->binding, &context->layout, &context->cut,
                                    &context->envelope};
  uint64_t sized = 0;
  for (size_t i = 0; i < sizeof arenas / sizeof arenas[0]; ++i) sized += arenas[i]->capacity;
  const sluice_template_cache_t* cache = &context->templates;
  for (int32_t i = 0; i < cache->count && cache->block == NULL; ++i) sized += sluice_align_up(cache->items[i]->bytes);
  sized += sluice_align_up(cache->block_bytes);
  if (cache->capacity > 0) sized += sluice_align_up((uint64_t)cache->capacity * sizeof(sluice_template_t*));
  if (context->device->vtable->events_bytes != NULL) {
    sized += context->device->vtable->events_bytes(context->device, -1);
  }
  return context->allocator.current_bytes - sized - context->step_bytes;
}

static uint64_t events_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  const sluice_device_t* device = moe->context->device;
  return device->vtable->events_bytes == NULL
             ? 0
             : device->vtable->events_bytes(device, sluice_template_max_ops(plan->max_chunks));
}

static uint64_t layout_bytes(const sluice_plan_data_t* plan) {
  return (SLUICE_T_COUNT + 1) * sluice_align_up((uint64_t)plan->max_chunks * sizeof(uint64_t));
}

static uint64_t cut_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  if (sluice_layer_ceiling(moe) > 0) return 0; /* nothing is cut */
  return sluice_align_up((uint64_t)plan->num_blocks * (uint64_t)moe->context->world_size * 8) +
         sluice_align_up(((uint64_t)plan->num_blocks + 1) * 8);
}

static uint64_t routing_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  return sluice_align_up(sluice_binding_arena_bytes(moe, plan->max_chunks, plan->inputs.max_tokens));
}

/* Of one outstanding forward, at most; under ceilings exactly, on the rank with most tokens and experts. */
static uint64_t step_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  int64_t tokens = plan->inputs.max_tokens, rows[SLUICE_MAX_CHUNKS] = {plan->kept_rows};
  if (sluice_layer_ceiling(moe) > 0) {
    for (int32_t i = 0; i < plan->num_chunks; ++i) rows[i] = plan->chunk_rows;
    return sluice_plan_step_bytes(moe, plan, plan->num_chunks, rows, tokens, plan->num_chunks * sent_rows(moe, plan));
  }
  return sluice_plan_step_bytes(moe, plan, 1, rows, tokens, tokens * moe->config.top_k) +
         (uint64_t)plan->max_chunks * 3 * SLUICE_ALIGNMENT + sluice_binding_meta_bytes_of(moe, plan->max_chunks, 0, 0);
}

sluice_status_t sluice_plan_measure(sluice_moe_t* layer, sluice_plan_data_t* plan) {
  uint64_t forward = 0, backward = 0;
  /* Ceilings are those of the rank with the most experts, so that all ranks find the same plan. */
  sluice_moe_t widest = *layer;
  widest.num_local = most_local(layer);
  sluice_moe_t* moe = &widest;
  SLUICE_TRY(measure_slots(moe, plan, SLUICE_FORWARD, &forward));
  SLUICE_TRY(measure_slots(moe, plan, SLUICE_BACKWARD, &backward));
  sluice_plan_bytes_t* b = &plan->bytes;
  memset(b, 0, sizeof *b);
  b->base = plan->inputs.base;
  b->slots = sluice_align_up(forward > backward ? forward : backward);
  if (sluice_is_far(moe)) {
    b->routing = sluice_binding_far_bytes(moe, plan->max_chunks, plan->inputs.max_tokens);
    b->step = far_step_bytes(moe, plan);
    b->host_pool = host_pool_bytes(moe, plan, plan->kept_rows);
    b->total = b->base + b->slots + b->routing + (uint64_t)plan->inputs.max_outstanding * b->step;
    return SLUICE_OK;
  }
  b->routing = routing_bytes(moe, plan) + layout_bytes(plan) + cut_bytes(moe, plan);
  b->schedules = SLUICE_PLANNED_TEMPLATES * sluice_align_up(sluice_template_bytes(plan->max_chunks)) +
                 SLUICE_TEMPLATE_LIST_BYTES + events_bytes(moe, plan);
  b->headers = moe->context->envelope.capacity;
  b->products = strcmp(moe->context->gemm->name, "ref") == 0 ? 0 : SLUICE_GEMM_SCRATCH_BYTES;
  b->step = step_bytes(moe, plan);
  b->host_pool = host_pool_bytes(moe, plan, plan->kept_rows);
  b->total = b->base + b->slots + b->routing + b->schedules + b->headers + b->products +
             (uint64_t)plan->inputs.max_outstanding * b->step;
  return SLUICE_OK;
}

/* ---- relative time ---- */

/* Round figures of a core, a network and a memory; only the order of candidates comes from them. */
#define FLOPS      1e11
#define LINK_BYTES 5e8
#define COPY_BYTES 5e9
#define OP_SECONDS 2e-5

static double pass_time(double comm, double compute, double copy, int32_t n) {
  double longest = fmax(comm, fmax(compute, copy));
  return longest + (comm + compute + copy - longest) / n + OP_SECONDS * n;
}

/* MPipeMoE Table II's work per chunk, in seconds over all chunks; MPMoE's phases folded into "the longest lane, plus
 * what one chunk leaves uncovered". */
static double relative_time(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  const sluice_moe_config_t* c = &moe->config;
  double rows = (double)balanced_rows(moe, plan->inputs.max_tokens), w = moe->context->world_size;
  if (sluice_layer_ceiling(moe) > 0) rows = (double)plan->worst_rows; /* padding travels and is computed as rows are */
  double row_bytes = (double)c->model_width * (double)sluice_dtype_bytes(c->dtype);
  double product = rows * 2.0 * (double)c->model_width * (double)c->hidden_width / FLOPS;
  double exchange = rows * row_bytes * (w - 1) / w / LINK_BYTES;
  double copy = rows * row_bytes / COPY_BYTES;
  double wide = (double)sluice_pass_row_bytes(moe, SLUICE_T_KEPT_M) / row_bytes;
  double copies = (plan->restore_di == SLUICE_RESTORE_OFFLOAD ? copy : 0) +
                  (plan->restore_m == SLUICE_RESTORE_OFFLOAD ? wide * copy : 0);
  double g = moe->gate_factor, weights = 0;
  if (plan->wgrad_mode == SLUICE_WGRAD_PER_CHUNK) {
    double element = fmax(4, (double)sluice_dtype_bytes(c->dtype)); /* sums of 16-bit gradients are f32 */
    weights = (plan->num_chunks - 1) * 2.0 * (double)moe->num_local * (g + 1) * (double)c->hidden_width *
              (double)c->model_width * element / COPY_BYTES;
  }
  double forward = (g + 1) * product;
  double backward = 2 * forward + weights + (plan->restore_m == SLUICE_RESTORE_RECOMPUTE ? g * product : 0);
  double backward_comm = (plan->restore_di == SLUICE_RESTORE_REDISPATCH ? 3 : 2) * exchange;
  return pass_time(2 * exchange, forward, copies, plan->num_chunks) +
         pass_time(backward_comm, backward, copies, plan->num_chunks);
}

/* One or the other for all candidates of a layer: they are compared. */
static double cost_of(sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  sluice_chooser_t* chooser = moe->context->chooser;
  double seconds = chooser != NULL ? chooser->vtable->price(chooser, moe, plan) : -1;
  return seconds >= 0 ? seconds : relative_time(moe, plan);
}

/* ---- choosing ---- */

typedef struct search_s {
  sluice_moe_t* moe;
  const sluice_plan_inputs_t* inputs;
  const sluice_plan_bytes_t* least; /* what is shared with other plans; NULL: nothing */
  sluice_plan_visit_fn_t visit;
  void* user;
  sluice_plan_data_t best;
  sluice_plan_data_t leanest;
  int32_t num_fitting, num_seen;
} search_t;

/* Rows that may be kept at most: all that can arrive, or what the host pool has room for. */
static int64_t most_kept(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int64_t least) {
  uint64_t row = offloaded_row_bytes(moe, plan), budget = plan->inputs.host_budget;
  uint64_t fixed = host_pool_bytes(moe, plan, 0);
  if (row == 0 || budget == 0) return plan->worst_rows;
  uint64_t room = budget > fixed ? (budget - fixed) / ((uint64_t)plan->inputs.max_outstanding * row) : 0;
  if (room >= (uint64_t)plan->worst_rows) return plan->worst_rows;
  return max_i64(least, (int64_t)room);
}

static uint64_t lift(uint64_t* bytes, uint64_t least) {
  uint64_t more = least > *bytes ? least - *bytes : 0;
  *bytes += more;
  return more;
}

static sluice_status_t measure(const search_t* s, sluice_plan_data_t* plan) {
  SLUICE_TRY(sluice_plan_measure(s->moe, plan));
  if (s->least == NULL) return SLUICE_OK;
  sluice_plan_bytes_t* b = &plan->bytes;
  b->total += lift(&b->slots, s->least->slots) + lift(&b->routing, s->least->routing) +
              lift(&b->schedules, s->least->schedules) + lift(&b->products, s->least->products);
  return SLUICE_OK;
}

/* As many rows are kept as the budget has room for; at least those of balanced routing, a quarter more to spare. */
static sluice_status_t size_candidate(search_t* s, sluice_plan_data_t* plan) {
  const sluice_moe_t* moe = s->moe;
  int64_t balanced = balanced_rows(moe, s->inputs->max_tokens);
  int64_t least = min_i64(plan->worst_rows, ceil_div(balanced * SLACK_NUMERATOR, SLACK_DENOMINATOR));
  uint64_t row = stored_row_bytes(moe, plan);
  int can_fall_back = (!moe->config.callback_experts || plan->restore_m == SLUICE_RESTORE_RECOMPUTE) &&
                      sluice_layer_ceiling(moe) == 0; /* all ranks know all rows: the policy itself is chosen */
  plan->kept_rows = row == 0 ? 0 : can_fall_back ? least : plan->worst_rows;
  SLUICE_TRY(measure(s, plan));
  if (row == 0 || plan->kept_rows == plan->worst_rows) return SLUICE_OK;
  uint64_t budget = s->inputs->budget == 0 ? UINT64_MAX : s->inputs->budget;
  if (plan->bytes.total >= budget) return SLUICE_OK;
  uint64_t counted = sluice_is_far(moe) ? row - offloaded_row_bytes(moe, plan) : row;
  uint64_t room =
      counted == 0 ? UINT64_MAX : (budget - plan->bytes.total) / ((uint64_t)s->inputs->max_outstanding * counted);
  int64_t most = most_kept(moe, plan, least) - plan->kept_rows;
  int64_t more = room > (uint64_t)most ? most : (int64_t)room;
  plan->kept_rows += more;
  SLUICE_TRY(measure(s, plan));
  if (plan->bytes.total <= budget) return SLUICE_OK;
  plan->kept_rows -= more; /* rounding up took more than was left */
  return measure(s, plan);
}

static int fits(const sluice_plan_data_t* plan) {
  return (plan->inputs.budget == 0 || plan->bytes.total <= plan->inputs.budget) && fits_host(plan);
}

sluice_status_t sluice_plan_size_beside(sluice_moe_t* moe, const sluice_plan_bytes_t* least, sluice_plan_data_t* plan,
                                        int32_t* out_fits) {
  search_t s = {.moe = moe, .inputs = &plan->inputs, .least = least};
  SLUICE_TRY(size_candidate(&s, plan));
  *out_fits = fits(plan);
  return SLUICE_OK;
}

static sluice_status_t try_candidate(search_t* s, int32_t n, int32_t restore_di, int32_t restore_m,
                                     int32_t wgrad_mode) {
  sluice_plan_data_t plan;
  memset(&plan, 0, sizeof plan);
  plan.inputs = *s->inputs;
  plan.restore_di = restore_di, plan.restore_m = restore_m, plan.wgrad_mode = wgrad_mode;
  set_ceilings(s->moe, n, &plan);
  SLUICE_TRY(size_candidate(s, &plan));
  plan.cost = cost_of(s->moe, &plan);
  int in_budget = fits(&plan);
  if (s->visit != NULL) s->visit(s->user, &plan, in_budget);
  if (s->num_seen++ == 0 || plan.bytes.total < s->leanest.bytes.total) s->leanest = plan;
  if (in_budget && (s->num_fitting++ == 0 || plan.cost < s->best.cost)) s->best = plan;
  return SLUICE_OK;
}

static int is_allowed(const sluice_moe_t* moe, int32_t restore_di, int32_t restore_m) {
  if (!moe->config.callback_experts) return 1;
  if (restore_m == SLUICE_RESTORE_RECOMPUTE) return moe->config.restore_middle == SLUICE_RESTORE_RECOMPUTE;
  return restore_di == SLUICE_RESTORE_KEEP && restore_m == SLUICE_RESTORE_KEEP;
}

static sluice_status_t try_policies(search_t* s, int32_t n) {
  const sluice_plan_inputs_t* q = s->inputs;
  for (int di = 0; di < 3; ++di) {
    if (q->restore_di >= 0 && policies_di[di] != q->restore_di) continue;
    for (int m = 0; m < 3; ++m) {
      if (q->restore_m >= 0 && policies_m[m] != q->restore_m) continue;
      if (!is_allowed(s->moe, policies_di[di], policies_m[m])) continue;
      for (int32_t mode = SLUICE_WGRAD_DEFERRED; mode <= SLUICE_WGRAD_PER_CHUNK; ++mode) {
        if (q->wgrad_mode >= 0 && mode != q->wgrad_mode) continue;
        SLUICE_TRY(try_candidate(s, n, policies_di[di], policies_m[m], mode));
      }
    }
  }
  return SLUICE_OK;
}

const char* sluice_restore_name(int32_t restore) {
  static const char* const names[] = {"keep", "offload", "redispatch", "recompute"};
  return names[restore];
}

static sluice_status_t fail_over_budget(const search_t* s) {
  const sluice_plan_data_t* lean = &s->leanest;
  uint64_t budget = s->inputs->budget, least = lean->bytes.total;
  if (budget == 0 || least <= budget) {
    return SLUICE_FAIL(
        SLUICE_E_OVER_BUDGET,
        "layer %d: no plan fits the host memory budget of %llu bytes: offloading (T_DI %s, T_M %s) takes "
        "%llu with %d outstanding forwards; raise host_memory_budget to that, allow fewer, or leave the "
        "policy to Sluice",
        s->moe->config.layer_id, (unsigned long long)s->inputs->host_budget, sluice_restore_name(lean->restore_di),
        sluice_restore_name(lean->restore_m), (unsigned long long)lean->bytes.host_pool, s->inputs->max_outstanding);
  }
  char advice[160];
  uint64_t fewer = least - (uint64_t)(s->inputs->max_outstanding - 1) * lean->bytes.step;
  if (s->inputs->max_outstanding > 1 && fewer <= budget) {
    uint64_t steps = 1 + (budget - fewer) / lean->bytes.step;
    snprintf(advice, sizeof advice, "or allow at most %llu outstanding forwards (max_outstanding is %d)",
             (unsigned long long)steps, s->inputs->max_outstanding);
  } else if (sluice_layer_ceiling(s->moe) > 0) {
    snprintf(advice, sizeof advice, "or give a smaller ceiling_rows (%lld now), or more chunks of fewer rows (%d now)",
             (long long)sluice_layer_ceiling(s->moe), lean->num_chunks);
  } else {
    snprintf(advice, sizeof advice, "or pass fewer tokens at a time (%lld now)", (long long)s->inputs->max_tokens);
  }
  return SLUICE_FAIL(
      SLUICE_E_OVER_BUDGET,
      "layer %d: no plan fits the memory budget of %llu bytes: the leanest (n = %d, T_DI %s, T_M %s) needs "
      "%llu, %llu more; raise memory_budget to that, %s",
      s->moe->config.layer_id, (unsigned long long)budget, lean->num_chunks, sluice_restore_name(lean->restore_di),
      sluice_restore_name(lean->restore_m), (unsigned long long)least, (unsigned long long)(least - budget), advice);
}

sluice_status_t sluice_plan_make(sluice_moe_t* moe, const sluice_plan_inputs_t* inputs, sluice_plan_visit_fn_t visit,
                                 void* user, sluice_plan_data_t* out_plan) {
  search_t s = {.moe = moe, .inputs = inputs, .visit = visit, .user = user};
  if (sluice_layer_ceiling(moe) > 0) {
    SLUICE_TRY(try_policies(&s, moe->config.num_chunks)); /* ceiling_rows is of one of so many chunks */
  } else if (inputs->num_chunks > 0) {
    SLUICE_TRY(try_policies(&s, inputs->num_chunks));
  } else {
    for (int32_t i = 0; i < NUM_CANDIDATES; ++i) {
      if (i > 0 && chunk_candidates[i] > inputs->max_tokens) break;
      SLUICE_TRY(try_policies(&s, chunk_candidates[i]));
    }
  }
  if (s.num_seen == 0) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "layer %d: callback experts keep their rows and outputs; no other restore policy is possible",
                       moe->config.layer_id);
  }
  if (s.num_fitting == 0) return fail_over_budget(&s);
  *out_plan = s.best;
  return SLUICE_OK;
}

uint64_t sluice_plan_hash(const sluice_plan_data_t* plan) {
  const int64_t numbers[] = {plan->inputs.max_tokens, plan->num_blocks, plan->num_chunks, plan->blocks_per_chunk,
                             plan->chunk_rows,        plan->kept_rows,  plan->restore_di, plan->restore_m};
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; ++i) hash = (hash ^ (uint64_t)numbers[i]) * 0x100000001b3u;
  return hash;
}

/* ---- installing ---- */

void sluice_plan_remove(sluice_moe_t* moe) {
  sluice_ceiling_forget_agreed(moe);
  sluice_free(sluice_process_allocator(), moe->plans, sizeof *moe->plans);
  moe->plans = NULL;
  moe->plan = NULL;
  moe->plan_is_given = 0;
}

sluice_status_t sluice_plan_install(sluice_moe_t* layer, const sluice_plan_data_t* plan) {
  sluice_moe_t widest = *layer;
  widest.num_local = most_local(layer);
  const sluice_moe_t* moe = &widest;
  sluice_context_t* context = layer->context;
  sluice_ceiling_forget_agreed(layer);
  context->memory->limit = plan->inputs.budget;
  context->ledger.pool_limit = plan->inputs.host_budget;
  if (sluice_is_far(layer)) {
    context->device->far->limit_pinned(context->device, plan->inputs.host_budget);
    SLUICE_TRY(sluice_arena_reserve(&context->routes, plan->bytes.routing, "routes of a plan"));
  }
  SLUICE_TRY(sluice_engine_reserve_templates(context, plan->max_chunks));
  SLUICE_TRY(sluice_arena_reserve(&context->slots, plan->bytes.slots, "slots of a plan"));
  SLUICE_TRY(sluice_arena_reserve(&context->binding, routing_bytes(moe, plan), "routes and offsets of a plan"));
  SLUICE_TRY(sluice_arena_reserve(&context->layout, layout_bytes(plan), "places of slots of a plan"));
  if (cut_bytes(moe, plan) > 0) {
    SLUICE_TRY(sluice_arena_reserve(&context->cut, cut_bytes(moe, plan), "rows by block of a plan"));
  }
  const sluice_device_t* device = context->device;
  if (device->vtable->reserve != NULL) {
    SLUICE_TRY(device->vtable->reserve(context->device, sluice_template_max_ops(plan->max_chunks)));
  }
  if (layer->plans == NULL) layer->plans = sluice_alloc(sluice_process_allocator(), sizeof *layer->plans, "plans");
  if (layer->plans == NULL) return sluice_alloc_status();
  layer->plans->count = 1;
  layer->plans->plans[0] = *plan;
  layer->plan = layer->plans->plans;
  return SLUICE_OK;
}
