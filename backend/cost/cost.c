// SPDX-License-Identifier: Apache-2.0
#include "backend/cost/cost.h"

#include <math.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/model/restore.h"
#include "backend/model/shape.h"
#include "backend/schedule/op_table.h"
#include "backend/schedule/template/template.h"
#include "backend/schedule/uneven_chunks.h"

#define HEADER_BYTES 1024.0 /* of the header to each peer that opens a pass */
#define SCALAR_BYTES 4.0    /* of a route's slot, and of its weight */
#define LEAST_SHARE  0.05   /* of its speed, that computation keeps during an exchange */
#define BOTH         (1 << SLUICE_LANE_COMPUTE | 1 << SLUICE_LANE_COMM)

/* ---- rows ---- */

static double local_experts(const sluice_workload_t* w) {
  return ceil((double)w->num_experts / (double)(w->world_size > 0 ? w->world_size : 1));
}

double sluice_ranks_per_token(const sluice_workload_t* w) {
  return sluice_token_copies_share(w->num_experts, w->world_size, w->top_k) * w->top_k;
}

int sluice_choice_chunks_by_experts(const sluice_workload_t* w, const sluice_choice_t* c) {
  const sluice_chunking_t chunking = {.num_chunks = c->num_chunks,
                                      .chunking = w->chunking,
                                      .num_experts = w->num_experts,
                                      .world_size = w->world_size,
                                      .deduplicate = w->deduplicate,
                                      .restore_input = c->restore_input,
                                      .restore_pre_activation = c->restore_pre_activation};
  return !c->bounded && sluice_chunking_is_by_rows(&chunking);
}

double sluice_wire_row_bytes(const sluice_workload_t* w) {
  const double width = (double)w->model_width;
  switch (w->wire_dtype) {
    case SLUICE_WIRE_BF16: return 2 * width;
    case SLUICE_WIRE_INT8: return width + 4 * ceil(width / 128);
    default: return width * (double)sluice_dtype_bytes(w->dtype);
  }
}

int sluice_workload_has_two_levels(const sluice_workload_t* w) {
  return w->deduplicate == SLUICE_DEDUPLICATE_NODES && w->ranks_per_node > 1 && w->ranks_per_node < w->world_size &&
         w->top_k > 1; /* as sluice_shape_set_nodes */
}

/* With two levels, `out` and `in` travel within a node. Each forwarding rank has the tokens of its local index on all
 * nodes, as many as its own; sums return by node. */
static void set_levels(const sluice_workload_t* w, sluice_chunk_rows_t* rows) {
  const double ranks = w->world_size, per_node = w->ranks_per_node, nodes = ranks / per_node;
  const double on_node = (per_node - 1) / per_node * ranks / (ranks - 1); /* of the rows sent to any other rank */
  const double node_copies =
      rows->tokens * w->top_k * sluice_token_copies_share(w->num_experts, (int32_t)nodes, w->top_k);
  rows->passed_on = rows->returned;
  rows->between = node_copies * (nodes - 1) / nodes;
  rows->out *= on_node, rows->in *= on_node, rows->leaving *= on_node;
  rows->returned = node_copies;
}

sluice_chunk_rows_t sluice_rows_of(const sluice_workload_t* w, const sluice_choice_t* c) {
  double ranks = w->world_size, tokens = (double)w->num_tokens / c->num_chunks;
  double sent = tokens * w->top_k, experts = local_experts(w);
  /* A rank receives at most every token of every rank, once for each of its experts that a token may choose. */
  double most = ranks * tokens * fmin(w->top_k, experts);
  double received = fmin(sent * w->skew, most);
  double remote = (ranks - 1) / ranks;
  sluice_chunk_rows_t rows = {.sent = sent,
                              .sent_remote = sent * remote,
                              .received = received,
                              .received_remote = received * remote,
                              .tokens = tokens};
  rows.experts = sluice_choice_chunks_by_experts(w, c) ? fmax(1, experts / c->num_chunks) : experts;
  rows.per_expert = received / rows.experts;
  double share = w->deduplicate ? sluice_ranks_per_token(w) / w->top_k : 1;
  rows.out = rows.sent_remote * share;
  rows.in = rows.received_remote * share;
  rows.returned = rows.sent * share;
  if (w->deduplicate) rows.in = fmin(rows.in, ranks * tokens * remote); /* a rank gets each token at most once */
  const double copies = sent * share, kept = ranks > 1 ? rows.in / (ranks - 1) : copies; /* all ranks route the same */
  rows.leaving = fmax(0, copies - kept);
  if (sluice_workload_has_two_levels(w)) set_levels(w, &rows);
  return rows;
}

/* Rows of one chunk of a pass that divides rows; the first and last chunk have half of the others' rows. */
static sluice_chunk_rows_t rows_of_chunk(const sluice_workload_t* w, sluice_chunk_rows_t rows, int32_t chunk,
                                         int32_t num_chunks) {
  double part = sluice_uneven_chunk_share(chunk, num_chunks) * num_chunks;
  rows.sent *= part, rows.sent_remote *= part, rows.received *= part, rows.received_remote *= part;
  rows.out *= part, rows.in *= part, rows.leaving *= part, rows.returned *= part, rows.tokens *= part;
  rows.experts = fmax(1, local_experts(w) * sluice_uneven_chunk_share(chunk, num_chunks));
  rows.per_expert = rows.received / rows.experts;
  return rows;
}

/* ---- single ops ---- */

typedef sluice_pass_costs_t op_scene_t;

static double gather(const op_scene_t* s, double rows) {
  return sluice_curve_at(&s->machine->rows, rows * s->row_bytes);
}

/* The traffic of an op: the rows of a chunk, and the number of exchanges of one scalar per route that accompany
 * them. */
typedef struct traffic_s {
  double packed;  /* rows gathered on the communication lane before they are sent */
  double out, in; /* rows that leave and enter the fullest rank; `mean` is the average over all ranks */
  double mean;
  double more_bytes; /* additional, in each direction */
  double bytes;      /* of the fuller direction: a link carries both directions at once */
  int32_t is_exchange, num_second;
  int32_t level;      /* LEVEL_* */
  int32_t num_rounds; /* of sequential exchanges: in a group, scalars follow the rows */
} traffic_t;

/* The participants of an exchange. */
enum { LEVEL_RANKS = 0, LEVEL_NODES, LEVEL_WITHIN };

static double scalar_bytes(const op_scene_t* s) {
  return SCALAR_BYTES * fmax(s->rows.sent_remote, s->rows.received_remote);
}

/* The traffic and level of an op with two levels: between nodes each rank sends the same number of rows, for any
 * load of experts. Rows that do not travel on this level were packed, too. */
static void set_level(const op_scene_t* s, sluice_op_price_t price, traffic_t* t) {
  t->level = price == SLUICE_PRICE_SEND || price == SLUICE_PRICE_RETURN ? LEVEL_NODES : LEVEL_WITHIN;
  if (t->level == LEVEL_NODES) t->out = t->in = t->mean = s->rows.between;
  switch (price) {
    case SLUICE_PRICE_SEND: t->packed = s->rows.between; return;
    case SLUICE_PRICE_NODE_SEND:
    case SLUICE_PRICE_RETURN: t->packed = s->rows.passed_on; return;
    default: t->packed = s->rows.received; return;
  }
}

static double bytes_of(const op_scene_t* s, const traffic_t* t) {
  return sluice_machine_skewed_bytes(s->machine, fmax(t->out, t->in), t->mean) * sluice_wire_row_bytes(s->work) +
         t->more_bytes;
}

/* Route weights are sent with the gradients, and with the rows if the layer is deduplicated; the gate's scalars return
 * with the gradients of inputs (architecture.md). */
static traffic_t traffic_of(const op_scene_t* s, int32_t kind) {
  const sluice_op_row_t* op = sluice_op_row(kind);
  const int returns = op->price == SLUICE_PRICE_RETURN;
  if (!op->is_exchange) return (traffic_t){0};
  traffic_t t = {.out = returns ? s->rows.in : s->rows.leaving,
                 .in = returns ? s->rows.leaving : s->rows.in,
                 .mean = s->rows.out,
                 .is_exchange = 1,
                 .num_rounds = 1};
  t.num_second = op->scalars == SLUICE_SCALARS_ALWAYS;
  t.packed =
      op->price == SLUICE_PRICE_RETURN || op->price == SLUICE_PRICE_NODE_RETURN ? s->rows.received_remote : s->rows.out;
  if (sluice_workload_has_two_levels(s->work)) set_level(s, op->price, &t);
  if (op->scalars == SLUICE_SCALARS_WHERE_DEDUP && s->work->deduplicate) {
    t.num_second = 1;
    t.more_bytes = scalar_bytes(s); /* small compared with gradients */
  }
  if (s->work->wire_dtype != SLUICE_WIRE_LAYER_DTYPE && t.num_second > 0)
    t.num_rounds = 2; /* scalars follow the rows */
  t.bytes = bytes_of(s, &t);
  return t;
}

static double level_seconds(const op_scene_t* s, const traffic_t* t, double bytes) {
  const int32_t per_node = s->work->ranks_per_node;
  switch (t->level) {
    case LEVEL_NODES: return sluice_machine_between(s->machine, s->work->world_size / per_node, bytes);
    case LEVEL_WITHIN: return sluice_machine_within(s->machine, per_node, bytes);
    default: return sluice_machine_exchange(s->machine, s->work->world_size, bytes);
  }
}

static double exchange_seconds(const op_scene_t* s, const traffic_t* t) {
  return level_seconds(s, t, t->bytes) + t->num_second * s->machine->second_exchange_seconds +
         (t->num_rounds - 1) * level_seconds(s, t, 0);
}

static double exchange(const op_scene_t* s, int32_t kind) {
  const traffic_t t = traffic_of(s, kind);
  return exchange_seconds(s, &t);
}

/* `matrices` GEMMs of [rows, M] with [M, H], or equivalent, for each of the given number of experts. */
static double gemms(const op_scene_t* s, int32_t form, double matrices, double experts, double rows_per_expert) {
  const sluice_workload_t* w = s->work;
  double flops = 2.0 * rows_per_expert * (double)w->model_width * (double)w->hidden_width * matrices;
  double each = flops * sluice_machine_gemm(s->machine, w->dtype, form, rows_per_expert);
  return experts * (each + s->machine->gemm_call_seconds);
}

static double gemm(const op_scene_t* s, int32_t form, double matrices) {
  return gemms(s, form, matrices, s->rows.experts, s->rows.per_expert);
}

/* Seconds of the activation. Activations without an exponential have seconds of their own if the machine has them. */
static double activation(const op_scene_t* s, int32_t direction) {
  const sluice_machine_t* m = s->machine;
  const int32_t kind = s->work->activation;
  int is_plain =
      kind == SLUICE_ACTIVATION_IDENTITY || kind == SLUICE_ACTIVATION_RELU || kind == SLUICE_ACTIVATION_RELU2;
  double each = direction == SLUICE_FORWARD ? m->activation_seconds : m->activation_grad_seconds;
  if (is_plain && m->relu_seconds + m->relu_grad_seconds > 0) {
    each = direction == SLUICE_FORWARD ? m->relu_seconds : m->relu_grad_seconds;
  }
  return s->rows.received * (double)s->work->hidden_width * each;
}

static double copied_bytes(const op_scene_t* s, int is_pre_activation) {
  const sluice_workload_t* w = s->work;
  double width = is_pre_activation ? (double)w->hidden_width * w->gate_factor : (double)w->model_width;
  if (is_pre_activation && w->callback) width = (double)w->model_width;
  return s->rows.received * width * (double)sluice_dtype_bytes(w->dtype);
}

static double copy(const op_scene_t* s, int is_pre_activation) {
  return sluice_curve_at(&s->machine->host_copy, copied_bytes(s, is_pre_activation));
}

/* The GEMMs of both factors of a matrix's adapter, in units of a GEMM with a matrix [M, H]. */
static double low_rank(const op_scene_t* s, double in, double out) {
  return s->work->lora_rank * (in + out) / ((double)s->work->model_width * (double)s->work->hidden_width);
}

/* The GEMMs of [W1; W3], and of W2, with their adapters, in the same units. */
static double first_matrices(const op_scene_t* s) {
  const double g = s->work->gate_factor;
  return g + low_rank(s, (double)s->work->model_width, g * (double)s->work->hidden_width);
}
static double second_matrices(const op_scene_t* s) {
  return 1 + low_rank(s, (double)s->work->hidden_width, (double)s->work->model_width);
}

/* The GEMMs of weight gradients, in the same units. Adapters need the product with A again, and two gradients each. */
static double trained_matrices(const op_scene_t* s) {
  const double g = s->work->gate_factor, all = g + 1;
  if (s->work->lora_rank == 0) return s->work->is_frozen ? 0 : all;
  const double in = (double)s->work->model_width + (double)s->work->hidden_width; /* of both linear layers */
  return first_matrices(s) + second_matrices(s) - all + low_rank(s, in, 0);
}

static double expert_forward(const op_scene_t* s) {
  return gemm(s, SLUICE_FORM_FORWARD, first_matrices(s)) + activation(s, SLUICE_FORWARD) +
         gemm(s, SLUICE_FORM_FORWARD, second_matrices(s));
}

/* Seconds of the weight gradients of one chunk, or of all chunks at once. */
static double weight_grad(const op_scene_t* s, int32_t chunks) {
  double matrices = trained_matrices(s), experts = local_experts(s->work);
  if (matrices == 0) return 0;
  if (chunks == 1) return gemm(s, SLUICE_FORM_WEIGHT_GRAD, matrices);
  return gemms(s, SLUICE_FORM_WEIGHT_GRAD, matrices, experts, s->rows.received * chunks / experts);
}

static double expert_backward(const op_scene_t* s) {
  double matrices = first_matrices(s) + second_matrices(s);
  return gemm(s, SLUICE_FORM_INPUT_GRAD, matrices) + weight_grad(s, 1) + activation(s, SLUICE_BACKWARD);
}

static int touches_pre_activation(const sluice_op_t* op) {
  for (int32_t i = 0; i < op->num_reads; ++i) {
    int32_t t = op->reads[i].tensor;
    if (t == SLUICE_T_M || t == SLUICE_T_HOST_M || t == SLUICE_T_DO) return 1;
  }
  return 0;
}

/* Everything except the exchange itself. */
static double local_seconds(const op_scene_t* s, const sluice_op_t* op) {
  const sluice_chunk_rows_t* r = &s->rows;
  const int32_t num_chunks = s->num_chunks;
  switch (sluice_op_row(op->kind)->price) {
    case SLUICE_PRICE_NONE: return 0;
    case SLUICE_PRICE_SEND:
    case SLUICE_PRICE_RETURN:
    case SLUICE_PRICE_NODE_SEND:
    case SLUICE_PRICE_NODE_RETURN: return gather(s, traffic_of(s, op->kind).packed);
    case SLUICE_PRICE_PLACE: return gather(s, r->received);
    case SLUICE_PRICE_SUM: return gather(s, r->returned * (op->chunk < 0 ? num_chunks : 1));
    case SLUICE_PRICE_FIRST_GEMM: return gemm(s, SLUICE_FORM_FORWARD, first_matrices(s));
    case SLUICE_PRICE_SECOND_GEMM: return gemm(s, SLUICE_FORM_FORWARD, second_matrices(s));
    case SLUICE_PRICE_FIRST_GRAD: return gemm(s, SLUICE_FORM_INPUT_GRAD, first_matrices(s));
    case SLUICE_PRICE_SECOND_GRAD: return gemm(s, SLUICE_FORM_INPUT_GRAD, second_matrices(s));
    case SLUICE_PRICE_WEIGHT_GRAD: return weight_grad(s, op->chunk < 0 ? num_chunks : 1);
    case SLUICE_PRICE_ACTIVATION: return activation(s, SLUICE_FORWARD);
    case SLUICE_PRICE_ACTIVATION_GRAD: return activation(s, SLUICE_BACKWARD);
    case SLUICE_PRICE_EXPERT: return expert_forward(s);
    case SLUICE_PRICE_EXPERT_GRAD: return expert_backward(s);
    case SLUICE_PRICE_COPY: return copy(s, touches_pre_activation(op));
  }
  return 0;
}

double sluice_bytes_touched(const sluice_workload_t* w) {
  const sluice_choice_t whole = {.num_chunks = 1};
  double width = (double)w->model_width + (double)w->hidden_width * w->gate_factor;
  return sluice_rows_of(w, &whole).received * width * (double)sluice_dtype_bytes(w->dtype);
}

static op_scene_t scene_of(const sluice_machine_t* m, const sluice_workload_t* w, const sluice_choice_t* c,
                           int32_t direction) {
  return (op_scene_t){.machine = m,
                      .work = w,
                      .rows = sluice_rows_of(w, c),
                      .row_bytes = (double)w->model_width * (double)sluice_dtype_bytes(w->dtype),
                      .cache_miss_factor = sluice_machine_cache_miss_factor(m, direction, sluice_bytes_touched(w)),
                      .num_chunks = c->num_chunks,
                      .chunks_by_experts = sluice_choice_chunks_by_experts(w, c)};
}

/* The rows of an op of one chunk; for ops of a whole pass, those of a chunk with 1/n of the rows. */
static sluice_chunk_rows_t rows_at(const op_scene_t* s, const sluice_op_t* op) {
  return op->chunk >= 0 && s->chunks_by_experts ? rows_of_chunk(s->work, s->rows, op->chunk, s->num_chunks) : s->rows;
}

static op_scene_t scene_at(void* user, const sluice_op_t* op) {
  op_scene_t s = *(const op_scene_t*)user;
  s.rows = rows_at(user, op);
  return s;
}

/* The traffic while the op runs. An op that opens a group only posts; the one that closes it has the rows of both, of
 * which each direction of the link carries one: a skewed dispatch is long towards the fullest rank, and a skewed return
 * is long from it. */
static traffic_t traffic_at(void* user, const sluice_op_t* op) {
  const op_scene_t s = scene_at(user, op);
  traffic_t t = traffic_of(&s, op->kind);
  if (op->group == SLUICE_GROUP_OPENS) return (traffic_t){0};
  if (op->group != SLUICE_GROUP_CLOSES) return t;
  const op_scene_t of_first = scene_at(user, op - 1);
  const traffic_t first = traffic_of(&of_first, op[-1].kind);
  t.out += first.out, t.in += first.in, t.mean += first.mean, t.more_bytes += first.more_bytes;
  t.num_second += first.num_second;
  t.num_rounds += t.num_second > 0;
  t.bytes = bytes_of(&s, &t);
  return t;
}

static double op_seconds(void* user, const sluice_op_t* op) {
  const op_scene_t s = scene_at(user, op);
  const traffic_t t = traffic_at(user, op);
  double factor = op->lane == SLUICE_LANE_COMPUTE ? s.cache_miss_factor : 1;
  double seconds = local_seconds(&s, op) * factor + s.machine->op_seconds;
  return t.is_exchange ? seconds + exchange_seconds(&s, &t) : seconds;
}

static double op_line(void* user, const sluice_op_t* op) {
  const op_scene_t s = scene_at(user, op);
  const traffic_t t = traffic_at(user, op);
  return t.is_exchange && t.level != LEVEL_WITHIN ? sluice_machine_line(s.machine, s.work->world_size, t.bytes) : 0;
}

/* While both lanes run, packing and the op's bookkeeping are slowed by the lanes' shares, and the exchange by the
 * measured contention at its size. */
static sluice_overlap_t op_overlap(void* user, const sluice_op_t* op) {
  const op_scene_t scene = scene_at(user, op);
  const op_scene_t* s = &scene;
  const sluice_machine_t* m = s->machine;
  const traffic_t t = traffic_at(user, op);
  if (!t.is_exchange || m->exchange_contention.count == 0 || s->work->world_size <= 1) return (sluice_overlap_t){0, 0};
  double exchanges = exchange_seconds(s, &t), alone = local_seconds(s, op) + m->op_seconds + exchanges;
  double measured_at = m->world_size > 1 ? m->world_size : s->work->world_size;
  double reference = sluice_machine_exchange(m, (int32_t)measured_at, t.bytes);
  sluice_contention_t contention = sluice_machine_contention(m, t.bytes, reference);
  /* With another number of ranks, in proportion: each message waits equally often. */
  double scale = reference > 0 ? sluice_machine_exchange(m, s->work->world_size, t.bytes) / reference : 1;
  double later = scale * (contention.exchange + t.num_second * m->second_exchange_contention);
  double lost = scale * (contention.compute + t.num_second * m->second_compute_contention);
  double share[2] = {m->share[SLUICE_LANE_COMM][BOTH], m->share[SLUICE_LANE_COMPUTE][BOTH]};
  double rest = (alone - exchanges) / (share[0] > 0 ? share[0] : 1), together = rest + exchanges + later;
  if (together <= 0) return (sluice_overlap_t){0, 0};
  lost += rest * (1 - (share[1] > 0 ? share[1] : 1));
  return (sluice_overlap_t){fmin(1, alone / together), fmax(LEAST_SHARE, 1 - lost / together)};
}

static const double (*op_copy_share(void* user, const sluice_op_t* op))[1 << SLUICE_NUM_LANES] {
  const op_scene_t s = scene_at(user, op);
  const sluice_copy_share_t* of_size =
      sluice_machine_copy_share(s.machine, copied_bytes(&s, touches_pre_activation(op)));
  return of_size == NULL ? NULL : of_size->share;
}

sluice_op_costs_t sluice_pass_costs(sluice_pass_costs_t* state, const sluice_machine_t* m, const sluice_workload_t* w,
                                    const sluice_choice_t* c, int32_t direction) {
  *state = scene_of(m, w, c, direction);
  return (sluice_op_costs_t){.seconds = op_seconds,
                             .overlap = op_overlap,
                             .copy_share = op_copy_share,
                             .line = op_line,
                             .bucket = m->exchange.token_bucket_seconds,
                             .user = state,
                             .share = m->share};
}

/* ---- policies ---- */

static int falls_back(const sluice_choice_t* c, int32_t chunk) { return c->kept_chunks > 0 && chunk >= c->kept_chunks; }

static int32_t policy_of_di(const sluice_choice_t* c, int32_t chunk) {
  if (falls_back(c, chunk)) return sluice_restore_least(SLUICE_T_DI);
  return c->by_chunk == NULL ? c->restore_input : sluice_policy_of_di(c->restore_input, c->by_chunk, chunk);
}

static int32_t policy_of_m(const sluice_choice_t* c, int32_t chunk) {
  if (falls_back(c, chunk)) return sluice_restore_least(SLUICE_T_M);
  return c->by_chunk == NULL ? c->restore_pre_activation
                             : sluice_policy_of_m(c->restore_pre_activation, c->by_chunk, chunk);
}

/* The papers have one policy for all chunks: the mean represents them. */
static sluice_restore_mean_t restore_mean(const sluice_choice_t* c,
                                          int32_t (*policy_of)(const sluice_choice_t*, int32_t chunk)) {
  uint8_t policies[SLUICE_MAX_CHUNKS];
  for (int32_t i = 0; i < c->num_chunks; ++i) policies[i] = (uint8_t)policy_of(c, i);
  return sluice_restore_mean(policies, c->num_chunks);
}

/* ---- the papers' forms ---- */

sluice_chunk_times_t sluice_chunk_times(const sluice_machine_t* m, const sluice_workload_t* w, const sluice_choice_t* c,
                                        int32_t direction) {
  const op_scene_t s = scene_of(m, w, c, direction);
  const sluice_restore_mean_t di = restore_mean(c, policy_of_di), pre_activation = restore_mean(c, policy_of_m);
  int forward = direction == SLUICE_FORWARD;
  double packed = gather(&s, s.rows.out), unpacked = gather(&s, s.rows.received);
  const double on_node =
      sluice_workload_has_two_levels(w)
          ? gather(&s, traffic_of(&s, SLUICE_OP_NODE_DISPATCH).packed) + exchange(&s, SLUICE_OP_NODE_DISPATCH)
          : 0;
  sluice_chunk_times_t t = {
      .dispatch = packed + exchange(&s, forward ? SLUICE_OP_DISPATCH : SLUICE_OP_DISPATCH_GRAD) + on_node + unpacked,
      .compute = expert_forward(&s) * s.cache_miss_factor,
      .combine = gather(&s, s.rows.received_remote) + on_node +
                 exchange(&s, forward ? SLUICE_OP_COMBINE : SLUICE_OP_COMBINE_GRAD) + gather(&s, s.rows.returned),
      .copy = di.copies * copy(&s, 0) + pre_activation.copies * copy(&s, 1),
  };
  if (forward) return t;
  t.dispatch += di.exchanges * (packed + exchange(&s, SLUICE_OP_REDISPATCH) + on_node + unpacked);
  double again = w->callback ? expert_forward(&s) : gemm(&s, SLUICE_FORM_FORWARD, first_matrices(&s));
  t.compute = (expert_backward(&s) + pre_activation.gemms * again) * s.cache_miss_factor;
  return t;
}

static double or_one(double share) { return share > 0 ? share : 1; }

/* The share of its speed that a lane keeps while the lanes of `set` run, with copies of the given size. */
static double share_at(const sluice_machine_t* m, int32_t lane, int32_t set, double bytes) {
  const sluice_copy_share_t* of_size = sluice_machine_copy_share(m, bytes);
  const double with = of_size == NULL ? 0 : of_size->share[lane][set];
  return or_one(with > 0 ? with : m->share[lane][set]);
}

/* From the machine's shares by lane. If contention was measured by size, the pair of exchange and computation uses it,
 * at the size of a chunk; the effect of copies stays in proportion. */
sluice_alphas_t sluice_alphas_of(const sluice_machine_t* m, const sluice_workload_t* w, const sluice_choice_t* c,
                                 int32_t direction) {
  const int32_t copies = direction == SLUICE_FORWARD ? SLUICE_LANE_COPY_OUT : SLUICE_LANE_COPY_IN;
  const int32_t lanes[] = {SLUICE_LANE_COMM, SLUICE_LANE_COMPUTE, copies};
  sluice_alphas_t a = sluice_no_interference();
  op_scene_t scene = scene_of(m, w, c, direction);
  const double bytes = copied_bytes(&scene, !sluice_restore_is_offloaded(policy_of_di(c, 0)));
  const int32_t all = 1 << lanes[0] | 1 << lanes[1] | 1 << lanes[2];
  for (int32_t y = 0; y < 3; ++y) {
    for (int32_t x = 0; x < 3; ++x) {
      if (x != y) a.alpha[y][x] = share_at(m, lanes[y], 1 << lanes[y] | 1 << lanes[x], bytes);
    }
    a.alpha[y][SLUICE_STREAM_ALL] = share_at(m, lanes[y], all, bytes);
  }
  const sluice_op_t dispatch = {.kind = direction == SLUICE_FORWARD ? SLUICE_OP_DISPATCH : SLUICE_OP_DISPATCH_GRAD,
                                .lane = SLUICE_LANE_COMM};
  const sluice_overlap_t overlap = op_overlap(&scene, &dispatch);
  if (overlap.own <= 0) return a; /* `share` applies */
  const double measured[] = {overlap.own, overlap.compute};
  for (int32_t y = SLUICE_STREAM_COMM; y <= SLUICE_STREAM_COMP; ++y) {
    double* pair = &a.alpha[y][1 - y];
    a.alpha[y][SLUICE_STREAM_ALL] *= measured[y] / *pair;
    *pair = measured[y];
  }
  return a;
}

double sluice_mpmoe_seconds(const sluice_machine_t* m, const sluice_workload_t* w, const sluice_choice_t* c,
                            int32_t direction) {
  int copies = restore_mean(c, policy_of_di).copies + restore_mean(c, policy_of_m).copies > 0;
  int32_t paradigm = !copies                       ? SLUICE_PARADIGM_NO_COPIES
                     : direction == SLUICE_FORWARD ? SLUICE_PARADIGM_COPY_AFTER
                                                   : SLUICE_PARADIGM_COPY_BEFORE;
  const sluice_alphas_t alphas = sluice_alphas_of(m, w, c, direction);
  return sluice_mpmoe_pass(paradigm, c->num_chunks, sluice_chunk_times(m, w, c, direction), &alphas);
}

double sluice_mpipemoe_seconds(const sluice_machine_t* m, const sluice_workload_t* w, const sluice_choice_t* c,
                               int32_t direction) {
  const sluice_alphas_t alphas = sluice_alphas_of(m, w, c, direction);
  return sluice_mpipemoe_pass(c->num_chunks, sluice_chunk_times(m, w, c, direction), &alphas);
}

/* ---- a whole step ---- */

static int32_t deduplication(const sluice_workload_t* w) {
  if (!w->deduplicate || w->world_size == 1) return SLUICE_DEDUPLICATE_NONE;
  return sluice_workload_has_two_levels(w) ? SLUICE_DEDUPLICATE_NODES : SLUICE_DEDUPLICATE_RANKS;
}

sluice_status_t sluice_choice_template(const sluice_workload_t* w, const sluice_choice_t* c, int32_t direction,
                                       sluice_template_t** out_template) {
  int backward = direction == SLUICE_BACKWARD;
  sluice_template_spec_t spec = {
      .direction = direction,
      .num_chunks = c->num_chunks,
      .single_rank = w->world_size == 1,
      .keep = !backward,
      .callback = w->callback,
      .gated = w->gate_factor > 1,
      .dgrad = backward,
      .wgrad = backward ? SLUICE_WGRAD_CALL_NOW : SLUICE_WGRAD_CALL_NONE,
      .wgrad_mode = backward ? c->wgrad_mode : 0,
      .reuse_saved = backward && !w->callback,
      .bounded = c->bounded,
      .low_rank = w->lora_rank > 0 && !w->callback,
      .dedup = deduplication(w),
      .chunks_by_experts = (int16_t)sluice_choice_chunks_by_experts(w, c),
      .grouped = c->grouped && w->world_size > 1 && !sluice_workload_has_two_levels(w) &&
                 c->num_chunks > SLUICE_GROUPED_CHUNKS,
  };
  for (int32_t i = 0; i < c->num_chunks && i < SLUICE_MAX_CHUNKS; ++i) {
    spec.restore_input[i] = (uint8_t)policy_of_di(c, i);
    spec.restore_pre_activation[i] = (uint8_t)policy_of_m(c, i);
  }
  spec.shares_act = c->shares_act && sluice_spec_offloads_m(&spec);
  return sluice_template_build(&spec, sluice_process_allocator(), out_template);
}

double sluice_pass_overhead(const sluice_machine_t* m, const sluice_workload_t* w, int32_t direction) {
  double seconds = m->pass_seconds + m->pass_byte_seconds * sluice_bytes_touched(w) +
                   sluice_machine_exchange(m, w->world_size, HEADER_BYTES * (w->world_size - 1));
  if (!w->deduplicate || direction != SLUICE_FORWARD) return seconds;
  const sluice_choice_t whole = {.num_chunks = 1};
  sluice_chunk_rows_t rows = sluice_rows_of(w, &whole);
  return seconds +
         sluice_machine_exchange(m, w->world_size, SCALAR_BYTES * fmax(rows.sent_remote, rows.received_remote));
}

sluice_status_t sluice_predict_pass_lanes(const sluice_machine_t* m, const sluice_workload_t* w,
                                          const sluice_choice_t* c, int32_t direction, sluice_prediction_t* out) {
  sluice_pass_costs_t state;
  sluice_template_t* schedule = NULL;
  SLUICE_TRY(sluice_choice_template(w, c, direction, &schedule));
  const sluice_op_costs_t costs = sluice_pass_costs(&state, m, w, c, direction);
  sluice_status_t status = sluice_predict(schedule, &costs, sluice_process_allocator(), out, NULL, NULL);
  sluice_template_destroy(schedule, sluice_process_allocator());
  out->total += sluice_pass_overhead(m, w, direction);
  return status;
}

sluice_status_t sluice_predict_pass(const sluice_machine_t* m, const sluice_workload_t* w, const sluice_choice_t* c,
                                    int32_t direction, double* out_seconds) {
  sluice_prediction_t prediction = {0};
  SLUICE_TRY(sluice_predict_pass_lanes(m, w, c, direction, &prediction));
  *out_seconds = prediction.total;
  return SLUICE_OK;
}

sluice_status_t sluice_predict_step(const sluice_machine_t* m, const sluice_workload_t* w, const sluice_choice_t* c,
                                    sluice_step_prediction_t* out) {
  for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    sluice_prediction_t prediction = {0};
    SLUICE_TRY(sluice_predict_pass_lanes(m, w, c, direction, &prediction));
    out->seconds[direction] = prediction.total;
    memcpy(out->busy[direction], prediction.busy, sizeof prediction.busy);
  }
  return SLUICE_OK;
}
