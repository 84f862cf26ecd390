// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/policy.h"

#include <string.h>

#include "backend/base/math.h"
#include "backend/base/text.h"
#include "sluice/pipeline.h"

/* ---- message_driven ---- */

/* Algorithm 2 of AxoNN as printed. A stage runs what arrived first, but runs what its own last op made ready before
 * that: the first stage injects L micro-batches, then one for each gradient that returned (lines 3 to 9, 23 to 26), and
 * the last stage runs the backward of each micro-batch directly after its forward (lines 15 to 17). */

static int message_driven_before(const sluice_stage_candidate_t* a, const sluice_stage_candidate_t* b) {
  int a_waits = a->kind == SLUICE_STAGE_WEIGHT_GRAD, b_waits = b->kind == SLUICE_STAGE_WEIGHT_GRAD;
  if (a_waits != b_waits) return b_waits; /* not in the paper: nothing waits for a weight gradient */
  if (a->by_message != b->by_message) return b->by_message;
  return a->since < b->since;
}

/* ---- backward_first ---- */

/* Runs backwards before forwards before weight gradients; reductions, which only start here, before all of them. With
 * several virtual stages, ops whose output has the longest way go first: forwards nearest to the input, backwards
 * nearest to the loss. So the other stages get work soonest. */

static int rank_of(int32_t kind) {
  switch (kind) {
    case SLUICE_STAGE_REDUCE: return 0;
    case SLUICE_STAGE_BACKWARD: return 1;
    case SLUICE_STAGE_FORWARD: return 2;
    default: return 3;
  }
}

static int backward_first_before(const sluice_stage_candidate_t* a, const sluice_stage_candidate_t* b) {
  if (rank_of(a->kind) != rank_of(b->kind)) return rank_of(a->kind) < rank_of(b->kind);
  if (a->virtual_stage != b->virtual_stage) {
    int is_deeper = a->virtual_stage > b->virtual_stage;
    return a->kind == SLUICE_STAGE_FORWARD ? !is_deeper : is_deeper;
  }
  return a->micro_batch < b->micro_batch;
}

/* ---- 1f1b, 1f1b_hint ---- */

/* 1F1B [PipeDream; Megatron-LM]: as a plan, and as a hint for a stage that runs whatever is ready [RRFP]. */

/* Stage s has p - s in flight, or fewer if its limit or that of a stage before it is lower: a stage that waited for
 * more than the previous stage may send would wait forever. */
static int32_t in_flight(const sluice_pipeline_spec_t* spec, int32_t stage) {
  int64_t limit = spec->num_stages - stage;
  for (int32_t s = 0; s <= stage; ++s) {
    if (spec->in_flight[s] > 0) limit = sluice_min(limit, spec->in_flight[s]);
  }
  return (int32_t)sluice_min(limit, spec->num_micro_batches);
}

static void one_f_one_b_order(const sluice_pipeline_spec_t* spec, int32_t stage, sluice_stage_order_t* out) {
  int32_t ahead = in_flight(spec, stage) - 1, m = spec->num_micro_batches;
  for (int32_t i = 0; i < ahead; ++i) sluice_order_add(out, SLUICE_STAGE_FORWARD, stage, i);
  for (int32_t i = 0; i < m; ++i) {
    if (ahead + i < m) sluice_order_add(out, SLUICE_STAGE_FORWARD, stage, ahead + i);
    sluice_order_add(out, SLUICE_STAGE_BACKWARD, stage, i);
  }
}

static int hint_before(const sluice_stage_candidate_t* a, const sluice_stage_candidate_t* b) {
  return a->place < b->place;
}

/* ---- gpipe ---- */

/* GPipe: all forwards, then all backwards. Every micro-batch is in flight. */

static sluice_status_t gpipe_check(const sluice_pipeline_spec_t* spec) {
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    SLUICE_TRY(
        SLUICE_REQUIRE(spec->in_flight[c] == 0 || spec->in_flight[c] >= spec->num_micro_batches,
                       "pipeline: gpipe has all %d micro-batches in flight, but in_flight[%d] is %d; set it to 0",
                       spec->num_micro_batches, c, spec->in_flight[c]));
  }
  return SLUICE_OK;
}

static void gpipe_order(const sluice_pipeline_spec_t* spec, int32_t stage, sluice_stage_order_t* out) {
  for (int32_t k = 0; k < spec->num_virtual; ++k) {
    int32_t c = sluice_pipeline_virtual_stage(spec, stage, k);
    for (int32_t i = 0; i < spec->num_micro_batches; ++i) sluice_order_add(out, SLUICE_STAGE_FORWARD, c, i);
  }
  for (int32_t k = spec->num_virtual - 1; k >= 0; --k) {
    int32_t c = sluice_pipeline_virtual_stage(spec, stage, k);
    for (int32_t i = 0; i < spec->num_micro_batches; ++i) sluice_order_add(out, SLUICE_STAGE_BACKWARD, c, i);
  }
}

/* ---- zero_bubble ---- */

/* ZB-H1: 1F1B with weight gradients as separate ops. Stage s has p - s in flight before its first backward, and delays
 * its weight gradients by s micro-batches, so that every stage keeps at most p of both kinds, like the first stage of
 * 1F1B. Its bubble is (p - 1)(F + B - W), compared to (p - 1)(F + B + W) for 1F1B. */

static int32_t wanted_in_flight(const sluice_pipeline_spec_t* spec, int32_t stage) {
  return (int32_t)sluice_min(spec->num_stages - stage, spec->num_micro_batches);
}

static sluice_status_t zero_bubble_check(const sluice_pipeline_spec_t* spec) {
  for (int32_t s = 0; s < spec->num_stages; ++s) {
    int32_t wants = wanted_in_flight(spec, s);
    SLUICE_TRY(SLUICE_REQUIRE(
        spec->in_flight[s] == 0 || spec->in_flight[s] >= wants,
        "pipeline: zero_bubble has %d micro-batches in flight on stage %d, but in_flight is %d; set it to 0", wants, s,
        spec->in_flight[s]));
    SLUICE_TRY(SLUICE_REQUIRE(
        spec->held[s] == 0 || spec->held[s] > s,
        "pipeline: zero_bubble holds %d micro-batches for weight gradients on stage %d, but held is %d; set it to 0",
        s + 1, s, spec->held[s]));
  }
  return SLUICE_OK;
}

static void zero_bubble_order(const sluice_pipeline_spec_t* spec, int32_t stage, sluice_stage_order_t* out) {
  int32_t ahead = wanted_in_flight(spec, stage) - 1, m = spec->num_micro_batches;
  int32_t late = (int32_t)sluice_min(stage, m);
  for (int32_t i = 0; i < ahead; ++i) sluice_order_add(out, SLUICE_STAGE_FORWARD, stage, i);
  for (int32_t i = 0; i < m; ++i) {
    if (ahead + i < m) sluice_order_add(out, SLUICE_STAGE_FORWARD, stage, ahead + i);
    sluice_order_add(out, SLUICE_STAGE_BACKWARD, stage, i);
    if (i >= late) sluice_order_add(out, SLUICE_STAGE_WEIGHT_GRAD, stage, i - late);
  }
  for (int32_t i = m - late; i < m; ++i) sluice_order_add(out, SLUICE_STAGE_WEIGHT_GRAD, stage, i);
}

/* ---- looped ---- */

/* Interleaved 1F1B over looped virtual stages. Micro-batches are processed in groups of p: all of a group in one
 * virtual stage, then in the next one of the stage. Stage s runs 2(p - 1 - s) + (v - 1)p forwards ahead. */

static sluice_status_t looped_check(const sluice_pipeline_spec_t* spec) {
  SLUICE_TRY(
      SLUICE_REQUIRE(spec->num_micro_batches % spec->num_stages == 0,
                     "pipeline: policy looped needs num_micro_batches to be a multiple of num_stages = %d; it is %d",
                     spec->num_stages, spec->num_micro_batches));
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    SLUICE_TRY(SLUICE_REQUIRE(
        spec->in_flight[c] == 0,
        "pipeline: policy looped has a fixed number of micro-batches in flight; set in_flight[%d] to 0, found %d", c,
        spec->in_flight[c]));
  }
  return SLUICE_OK;
}

/* Adds the n-th forward or backward of a stage; backwards visit the virtual stages in reverse. */
static void add_nth(const sluice_pipeline_spec_t* spec, int32_t stage, int32_t kind, int32_t n,
                    sluice_stage_order_t* out) {
  int32_t p = spec->num_stages, v = spec->num_virtual;
  int32_t k = n % (p * v) / p;
  if (kind == SLUICE_STAGE_BACKWARD) k = v - 1 - k;
  sluice_order_add(out, kind, sluice_pipeline_virtual_stage(spec, stage, k), n / (p * v) * p + n % p);
}

static void looped_order(const sluice_pipeline_spec_t* spec, int32_t stage, sluice_stage_order_t* out) {
  int32_t p = spec->num_stages, v = spec->num_virtual, total = spec->num_micro_batches * v;
  int32_t ahead = (int32_t)sluice_min(2 * (p - 1 - stage) + (v - 1) * p, total);
  for (int32_t n = 0; n < ahead; ++n) add_nth(spec, stage, SLUICE_STAGE_FORWARD, n, out);
  for (int32_t n = 0; n < total; ++n) {
    if (ahead + n < total) add_nth(spec, stage, SLUICE_STAGE_FORWARD, ahead + n, out);
    add_nth(spec, stage, SLUICE_STAGE_BACKWARD, n, out);
  }
}

/* ---- v ---- */

/* Zero bubble with two virtual stages on each stage, placed in a V. The order is planned in steps of equal time, F = B
 * = W: in each step a stage runs a backward if one can run, else a forward, else a weight gradient. Among backwards it
 * prefers the one nearest to its end, among forwards the one nearest to its loss. A stage keeps 2p halves of a
 * micro-batch from forward to weight gradient, which are as many bytes as the first stage of 1F1B keeps. */

typedef struct counts_s {
  int32_t forward[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  int32_t backward[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  int32_t weight[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
} counts_t;

static sluice_status_t v_check(const sluice_pipeline_spec_t* spec) {
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    SLUICE_TRY(SLUICE_REQUIRE(
        spec->in_flight[c] == 0 && spec->held[c] == 0,
        "pipeline: policy v has fixed numbers of micro-batches in flight and held; set in_flight[%d] and held[%d] to 0",
        c, c));
  }
  return SLUICE_OK;
}

static int can_run_backward(const sluice_pipeline_spec_t* spec, const counts_t* now, int32_t c) {
  int32_t i = now->backward[c];
  if (i >= now->forward[c]) return 0;
  return c + 1 == sluice_pipeline_num_virtual_stages(spec) || now->backward[c + 1] > i;
}

static int can_run_forward(const sluice_pipeline_spec_t* spec, const counts_t* now, int32_t c) {
  int32_t i = now->forward[c];
  return i < spec->num_micro_batches && (c == 0 || now->forward[c - 1] > i);
}

/* Chooses what a stage does in a step, given the ops that ended before it. Returns 0 for nothing. */
static int choose_turn(const sluice_pipeline_spec_t* spec, const counts_t* now, int32_t stage,
                       sluice_stage_turn_t* out) {
  int32_t first = sluice_pipeline_virtual_stage(spec, stage, 0), second = sluice_pipeline_virtual_stage(spec, stage, 1);
  int32_t kept = now->forward[first] - now->weight[first] + now->forward[second] - now->weight[second];
  int32_t room = 2 * spec->num_stages - kept;
  if (can_run_backward(spec, now, first)) {
    *out = (sluice_stage_turn_t){SLUICE_STAGE_BACKWARD, first, now->backward[first]};
  } else if (can_run_backward(spec, now, second)) {
    *out = (sluice_stage_turn_t){SLUICE_STAGE_BACKWARD, second, now->backward[second]};
  } else if (room > 0 && can_run_forward(spec, now, second)) {
    *out = (sluice_stage_turn_t){SLUICE_STAGE_FORWARD, second, now->forward[second]};
  } else if (room > 1 && can_run_forward(spec, now, first)) {
    /* One slot stays free for the second, or nothing would ever end. */
    *out = (sluice_stage_turn_t){SLUICE_STAGE_FORWARD, first, now->forward[first]};
  } else if (now->weight[second] < now->backward[second]) {
    *out = (sluice_stage_turn_t){SLUICE_STAGE_WEIGHT_GRAD, second, now->weight[second]};
  } else if (now->weight[first] < now->backward[first]) {
    *out = (sluice_stage_turn_t){SLUICE_STAGE_WEIGHT_GRAD, first, now->weight[first]};
  } else {
    return 0;
  }
  return 1;
}

static void apply_turn(counts_t* counts, sluice_stage_turn_t turn) {
  counts->forward[turn.virtual_stage] += turn.kind == SLUICE_STAGE_FORWARD;
  counts->backward[turn.virtual_stage] += turn.kind == SLUICE_STAGE_BACKWARD;
  counts->weight[turn.virtual_stage] += turn.kind == SLUICE_STAGE_WEIGHT_GRAD;
}

static void v_order(const sluice_pipeline_spec_t* spec, int32_t stage, sluice_stage_order_t* out) {
  counts_t before = {.forward = {0}}, after = before;
  for (int moves = 1; moves;) {
    moves = 0;
    for (int32_t s = 0; s < spec->num_stages; ++s) {
      sluice_stage_turn_t turn;
      if (!choose_turn(spec, &before, s, &turn)) continue;
      if (s == stage) sluice_order_add(out, turn.kind, turn.virtual_stage, turn.micro_batch);
      apply_turn(&after, turn);
      moves = 1;
    }
    before = after;
  }
}

/* ---- forward_only ---- */

/* Evaluation: forwards in the order in which their inputs arrive. */

static int forward_only_before(const sluice_stage_candidate_t* a, const sluice_stage_candidate_t* b) {
  if (a->virtual_stage != b->virtual_stage) return a->virtual_stage > b->virtual_stage;
  return a->micro_batch < b->micro_batch;
}

/* ---- deepspeed ---- */

/* DeepSpeed's TrainSchedule: 1F1B whose instructions run one after the other. A send or receive blocks the stage, so no
 * message overlaps with computation. This policy exists for comparison; Sluice never runs it. */

typedef struct step_s {
  int32_t micro_batch; /* out of range: no op */
  int32_t is_forward;
} step_t;

/* Even stages run forwards in even steps, odd ones in odd steps. Division rounds down, including for negative
 * numbers. */
static step_t step_of(const sluice_pipeline_spec_t* spec, int32_t stage, int32_t step) {
  int32_t is_forward = step % 2 == stage % 2, base = step / 2;
  if (is_forward) return (step_t){base - stage / 2, 1};
  if (step % 2 == 0) return (step_t){base - spec->num_stages + (stage + 1) / 2, 0};
  return (step_t){base - spec->num_stages + 1 + stage / 2, 0};
}

static int exists(const sluice_pipeline_spec_t* spec, int32_t micro_batch) {
  return micro_batch >= 0 && micro_batch < spec->num_micro_batches;
}

static void deepspeed_order(const sluice_pipeline_spec_t* spec, int32_t stage, sluice_stage_order_t* out) {
  int has_previous = stage > 0, has_next = stage + 1 < spec->num_stages;
  int32_t last = -1;
  for (int32_t i = 0; i < 2 * (spec->num_micro_batches + spec->num_stages - 1); ++i) {
    step_t step = step_of(spec, stage, i);
    int runs = exists(spec, step.micro_batch);
    if (step.is_forward) {
      if (exists(spec, last) && has_previous) sluice_order_add(out, SLUICE_STAGE_SEND_GRADIENT, stage, last);
      if (runs && has_previous) sluice_order_add(out, SLUICE_STAGE_RECEIVE_ACTIVATION, stage, step.micro_batch);
    } else {
      if (runs && has_next) sluice_order_add(out, SLUICE_STAGE_RECEIVE_GRADIENT, stage, step.micro_batch);
      if (exists(spec, last) && has_next) sluice_order_add(out, SLUICE_STAGE_SEND_ACTIVATION, stage, last);
    }
    if (runs) {
      sluice_order_add(out, step.is_forward ? SLUICE_STAGE_FORWARD : SLUICE_STAGE_BACKWARD, stage, step.micro_batch);
    }
    last = step.micro_batch;
  }
}

/* ---- the table ---- */

/* Columns as in sluice_policy_t: name, source; whether the order is binding, and blocking; placement (-1: any),
 * smallest and largest v (0: no limit), separate_wgrad (-1: either), forward_only; check, order, before. */
static const sluice_policy_t rows[SLUICE_POLICY_COUNT] = {
    [SLUICE_POLICY_MESSAGE_DRIVEN] = {"message_driven", "AxoNN, Algorithm 2", 0, 0, -1, 1, 0, -1, 0, NULL, NULL,
                                      message_driven_before},
    [SLUICE_POLICY_BACKWARD_FIRST] = {"backward_first", "own; PipeDream's preference, message-driven", 0, 0, -1, 1, 0,
                                      -1, 0, NULL, NULL, backward_first_before},
    [SLUICE_POLICY_1F1B_HINT] = {"1f1b_hint", "RRFP, arXiv 2605.18750", 0, 0, -1, 1, 1, 0, 0, NULL, one_f_one_b_order,
                                 hint_before},
    [SLUICE_POLICY_1F1B] = {"1f1b", "Narayanan et al., Megatron-LM, section 2.2.1", 1, 0, -1, 1, 1, 0, 0, NULL,
                            one_f_one_b_order, NULL},
    [SLUICE_POLICY_GPIPE] = {"gpipe", "Huang et al., GPipe", 1, 0, -1, 1, 0, 0, 0, gpipe_check, gpipe_order, NULL},
    [SLUICE_POLICY_ZERO_BUBBLE] = {"zero_bubble", "Qi et al., Zero Bubble Pipeline Parallelism, section 2.3 (ZB-H1)", 1,
                                   0, -1, 1, 1, 1, 0, zero_bubble_check, zero_bubble_order, NULL},
    [SLUICE_POLICY_LOOPED] = {"looped", "Narayanan et al., Megatron-LM, section 2.2.2", 1, 0, SLUICE_PLACEMENT_LOOPED,
                              2, 0, 0, 0, looped_check, looped_order, NULL},
    [SLUICE_POLICY_V] =
        {"v", "Qi et al., Pipeline Parallelism with Controllable Memory (V-Half, ZB-V); the order is our own", 1, 0,
         SLUICE_PLACEMENT_V, 2, 2, 1, 0, v_check, v_order, NULL},
    [SLUICE_POLICY_FORWARD_ONLY] = {"forward_only", "own", 0, 0, -1, 1, 0, 0, 1, NULL, NULL, forward_only_before},
    [SLUICE_POLICY_DEEPSPEED] = {"deepspeed", "DeepSpeed 0.19.8, runtime/pipe/schedule.py, TrainSchedule", 1, 1, -1, 1,
                                 1, 0, 0, NULL, deepspeed_order, NULL},
};

const sluice_policy_t* sluice_policy(int32_t policy) {
  return policy >= 0 && policy < SLUICE_POLICY_COUNT ? &rows[policy] : NULL;
}

const char* sluice_policy_name(int32_t policy) {
  const sluice_policy_t* row = sluice_policy(policy);
  if (row != NULL) return row->name;
  return policy == SLUICE_POLICY_OPEN ? "adaptive" : "?";
}

/* Returns whether a host may name the policy: evaluation has its own, and the baseline is only simulated. */
static int is_offered(int32_t policy) {
  return policy != SLUICE_POLICY_FORWARD_ONLY && policy != SLUICE_POLICY_DEEPSPEED;
}

const char* sluice_pipeline_policy_name(int32_t index) {
  for (int32_t policy = 0; policy < SLUICE_POLICY_COUNT; ++policy) {
    if (is_offered(policy) && index-- == 0) return rows[policy].name;
  }
  return index == 0 ? sluice_policy_name(SLUICE_POLICY_OPEN) : NULL;
}

sluice_status_t sluice_policy_find(const char* name, int32_t is_simulated, int32_t* out_policy) {
  if (name == NULL) name = "backward_first";
  for (int32_t policy = SLUICE_POLICY_OPEN; policy < SLUICE_POLICY_COUNT; ++policy) {
    if (!is_offered(policy) && !(is_simulated && policy == SLUICE_POLICY_DEEPSPEED)) continue;
    *out_policy = policy;
    if (strcmp(sluice_policy_name(policy), name) == 0) return SLUICE_OK;
  }
  char names[256];
  sluice_text_t text = sluice_text(names, sizeof names);
  const char* known;
  for (int32_t i = 0; (known = sluice_pipeline_policy_name(i)) != NULL; ++i) {
    sluice_text_add(&text, "%s%s", i == 0 ? "" : ", ", known);
  }
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "pipeline: policy \"%s\" is not known; give one of %s", name, names);
}

void sluice_policy_fill(int32_t policy, int32_t* inout_placement, int32_t* inout_separate_wgrad) {
  const sluice_policy_t* row = sluice_policy(policy); /* NULL: open */
  if (*inout_placement == -1) {
    *inout_placement = row != NULL && row->placement >= 0 ? row->placement : SLUICE_PLACEMENT_LOOPED;
  }
  *inout_separate_wgrad =
      *inout_separate_wgrad == -1 ? row != NULL && row->separate_wgrad == 1 : *inout_separate_wgrad != 0;
}

sluice_status_t sluice_policy_check(const sluice_pipeline_spec_t* spec) {
  const sluice_policy_t* row = sluice_policy(spec->policy);
  SLUICE_TRY(
      SLUICE_REQUIRE(row != NULL, "pipeline: policy is %d; give 0 to %d", spec->policy, SLUICE_POLICY_COUNT - 1));
  SLUICE_TRY(SLUICE_REQUIRE(row->placement < 0 || row->placement == spec->placement,
                            "pipeline: policy %s needs placement %d; it is %d", row->name, row->placement,
                            spec->placement));
  int32_t most = row->max_virtual > 0 ? row->max_virtual : SLUICE_PIPELINE_MAX_VIRTUAL_STAGES;
  SLUICE_TRY(SLUICE_REQUIRE(spec->num_virtual >= row->min_virtual && spec->num_virtual <= most,
                            "pipeline: policy %s needs %d to %d virtual stages on a stage; num_virtual is %d",
                            row->name, row->min_virtual, most, spec->num_virtual));
  SLUICE_TRY(SLUICE_REQUIRE(row->separate_wgrad < 0 || row->separate_wgrad == (spec->separate_wgrad != 0),
                            "pipeline: policy %s needs separate_wgrad = %d", row->name, row->separate_wgrad));
  SLUICE_TRY(SLUICE_REQUIRE(row->forward_only == (spec->forward_only != 0),
                            "pipeline: policy %s needs forward_only = %d", row->name, row->forward_only));
  return row->check == NULL ? SLUICE_OK : row->check(spec);
}
