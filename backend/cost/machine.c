// SPDX-License-Identifier: Apache-2.0
/* Evaluates the curves of a machine, and checks its values. */
#include "backend/cost/machine.h"

#include <math.h>
#include <string.h>

const char* const sluice_lane_names[SLUICE_NUM_LANES] = {"compute", "comm", "copy_out", "copy_in"};
const char* const sluice_machine_dtype_names[SLUICE_MACHINE_DTYPES] = {"f32", "bf16", "f16"};
const char* const sluice_form_names[SLUICE_FORM_COUNT] = {"forward", "input_grad", "weight_grad"};
const char* const sluice_provenance_names[3] = {"profile", "calibrated", "refined"};

void sluice_machine_init(sluice_machine_t* out_machine) {
  memset(out_machine, 0, sizeof *out_machine);
  memcpy(out_machine->name, "unnamed", sizeof "unnamed");
}

/* ---- evaluating ---- */

static double between(double x0, double y0, double x1, double y1, double x) {
  return y0 + (y1 - y0) * (x - x0) / (x1 - x0);
}

/* The segment [i, i + 1] that contains x or extrapolates to it. */
static int32_t segment(const sluice_curve_t* c, double x) {
  int32_t i = 0;
  while (i + 2 < c->count && x > c->x[i + 1]) ++i;
  return i;
}

double sluice_curve_at(const sluice_curve_t* c, double x) {
  if (c->count == 0 || x <= 0) return 0;
  if (c->count == 1) return c->y[0] * x / c->x[0];
  if (x <= c->x[0]) return c->y[0];
  int32_t i = segment(c, x);
  double y = between(c->x[i], c->y[i], c->x[i + 1], c->y[i + 1], x);
  double last = c->y[c->count - 1];
  return x > c->x[c->count - 1] && y < last ? last : y; /* a falling last segment is noise */
}

static int32_t dtype_index(int32_t dtype) {
  switch (dtype) {
    case SLUICE_DTYPE_BF16: return SLUICE_MACHINE_BF16;
    case SLUICE_DTYPE_F16: return SLUICE_MACHINE_F16;
    default: return SLUICE_MACHINE_F32;
  }
}

/* Interpolated as seconds of a GEMM, which are close to linear in rows; seconds per flop are not. */
double sluice_machine_gemm(const sluice_machine_t* machine, int32_t dtype, int32_t form, double rows) {
  const sluice_curve_t* forms = machine->gemm[dtype_index(dtype)];
  const sluice_curve_t* c = forms[form].count > 0 ? &forms[form] : &forms[SLUICE_FORM_FORWARD];
  if (c->count == 0 || rows <= 0) return 0;
  if (rows <= c->x[0]) return c->y[0] * c->x[0] / rows;
  if (c->count == 1 || rows >= c->x[c->count - 1]) return c->y[c->count - 1];
  int32_t i = segment(c, rows);
  return between(c->x[i], c->x[i] * c->y[i], c->x[i + 1], c->x[i + 1] * c->y[i + 1], rows) / rows;
}

double sluice_machine_cache_miss_factor(const sluice_machine_t* machine, int32_t direction, double bytes) {
  const sluice_curve_t* factor = &machine->cache_miss_factor[direction];
  return factor->count == 0 ? 1 : sluice_curve_at(factor, bytes);
}

static double link_seconds(const sluice_link_t* link, double peers, double bytes) {
  return link->startup_seconds + link->per_peer_seconds * peers + sluice_curve_at(&link->bytes, bytes);
}

double sluice_machine_exchange(const sluice_machine_t* machine, int32_t world_size, double bytes) {
  if (world_size <= 1) return 0;
  double peers = world_size - 1, in_node = machine->ranks_per_node > 0 ? machine->ranks_per_node : 0;
  if (in_node == 0) return link_seconds(&machine->exchange, peers, bytes);
  if (in_node >= world_size) return link_seconds(&machine->node_exchange, peers, bytes);
  /* Both kinds of link work at the same time. */
  double outside = world_size - in_node;
  return fmax(link_seconds(&machine->exchange, outside, bytes * outside / peers),
              link_seconds(&machine->node_exchange, in_node - 1, bytes * (in_node - 1) / peers));
}

double sluice_machine_between(const sluice_machine_t* machine, int32_t nodes, double bytes) {
  return nodes <= 1 ? 0 : link_seconds(&machine->exchange, nodes - 1, bytes);
}

double sluice_machine_within(const sluice_machine_t* machine, int32_t ranks, double bytes) {
  const int has_own = machine->ranks_per_node > 0 && machine->node_exchange.bytes.count > 0;
  return ranks <= 1 ? 0 : link_seconds(has_own ? &machine->node_exchange : &machine->exchange, ranks - 1, bytes);
}

double sluice_machine_line(const sluice_machine_t* m, int32_t world_size, double bytes) {
  int has_bucket = world_size > 1 && m->ranks_per_node == 0 && m->exchange.token_bucket_seconds > 0;
  return has_bucket ? sluice_curve_at(&m->exchange.bytes, bytes) : 0;
}

double sluice_machine_skewed_bytes(const sluice_machine_t* m, double most, double mean) {
  return most > mean ? most - m->exchange_skew_gain * (most - mean) : most;
}

sluice_contention_t sluice_machine_contention(const sluice_machine_t* m, double bytes, double seconds) {
  bytes = fmax(bytes, 1);
  sluice_contention_t c = {sluice_curve_at(&m->exchange_contention, bytes),
                           sluice_curve_at(&m->compute_contention, bytes)};
  c.compute = fmin(c.compute, seconds + c.exchange);
  return c;
}

/* ---- checking ---- */

static sluice_status_t check_seconds(const char* field, double value) {
  SLUICE_TRY(SLUICE_REQUIRE(isfinite(value) && value >= 0, "machine: %s is %g; it is a time in seconds, 0 or more",
                            field, value));
  return SLUICE_OK;
}

static sluice_status_t check_curve(const char* field, const sluice_curve_t* c) {
  SLUICE_TRY(SLUICE_REQUIRE(c->count >= 0 && c->count <= SLUICE_CURVE_POINTS, "machine: %s has %d points; at most %d",
                            field, c->count, SLUICE_CURVE_POINTS));
  for (int32_t i = 0; i < c->count; ++i) {
    SLUICE_TRY(SLUICE_REQUIRE(isfinite(c->x[i]) && c->x[i] > 0, "machine: point %d of %s is at %g; sizes are above 0",
                              i, field, c->x[i]));
    SLUICE_TRY(SLUICE_REQUIRE(isfinite(c->y[i]) && c->y[i] >= 0,
                              "machine: point %d of %s is %g seconds; times are 0 or more", i, field, c->y[i]));
    SLUICE_TRY(SLUICE_REQUIRE(i == 0 || c->x[i] > c->x[i - 1], "machine: points of %s must ascend, but %g follows %g",
                              field, c->x[i], c->x[i - 1]));
  }
  return SLUICE_OK;
}

static sluice_status_t check_link(const char* field, const sluice_link_t* link) {
  SLUICE_TRY(
      SLUICE_REQUIRE(isfinite(link->startup_seconds) && link->startup_seconds >= 0 &&
                         isfinite(link->per_peer_seconds) && link->per_peer_seconds >= 0,
                     "machine: %s has startup_seconds %g and per_peer_seconds %g; both are times in seconds, 0 or more",
                     field, link->startup_seconds, link->per_peer_seconds));
  SLUICE_TRY(SLUICE_REQUIRE(isfinite(link->token_bucket_seconds) && link->token_bucket_seconds >= 0,
                            "machine: %s has token_bucket_seconds %g; it is line time in seconds, 0 or more", field,
                            link->token_bucket_seconds));
  return check_curve(field, &link->bytes);
}

static double ratio_of(double a, double b) { return a > b ? a / b : b / a; }

const sluice_copy_share_t* sluice_machine_copy_share(const sluice_machine_t* m, double bytes) {
  const sluice_copy_share_t* nearest = NULL;
  for (int32_t i = 0; i < m->num_copy_shares; ++i) {
    const sluice_copy_share_t* c = &m->copy_share[i];
    if (nearest == NULL || ratio_of(bytes, c->bytes) < ratio_of(bytes, nearest->bytes)) nearest = c;
  }
  return nearest;
}

static sluice_status_t check_shares_of(const double (*share)[1 << SLUICE_NUM_LANES]) {
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
    for (int32_t set = 0; set < 1 << SLUICE_NUM_LANES; ++set) {
      double s = share[lane][set];
      SLUICE_TRY(SLUICE_REQUIRE(s >= 0 && s <= 1,
                                "machine: share of lane %s is %g; it is the part of its speed that is left, in (0, 1]",
                                sluice_lane_names[lane], s));
    }
  }
  return SLUICE_OK;
}

static sluice_status_t check_shares(const sluice_machine_t* m) {
  SLUICE_TRY(check_shares_of(m->share));
  SLUICE_TRY(SLUICE_REQUIRE(m->num_copy_shares >= 0 && m->num_copy_shares <= SLUICE_COPY_SHARES,
                            "machine: copy_share has %d sizes; at most %d", m->num_copy_shares, SLUICE_COPY_SHARES));
  for (int32_t i = 0; i < m->num_copy_shares; ++i) {
    SLUICE_TRY(SLUICE_REQUIRE(m->copy_share[i].bytes > 0, "machine: copy_share has a size of %g bytes; it is above 0",
                              m->copy_share[i].bytes));
    SLUICE_TRY(check_shares_of(m->copy_share[i].share));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_machine_check(const sluice_machine_t* m) {
  SLUICE_TRY(SLUICE_REQUIRE(m->provenance >= SLUICE_MACHINE_PROFILE && m->provenance <= SLUICE_MACHINE_REFINED,
                            "machine: provenance is %d; known are profile (0), calibrated (1) and refined (2)",
                            m->provenance));
  SLUICE_TRY(SLUICE_REQUIRE(
      m->world_size >= 0, "machine: world_size is %d; give the number of ranks, or 0 if it is unknown", m->world_size));
  SLUICE_TRY(SLUICE_REQUIRE(m->ranks_per_node >= 0,
                            "machine: ranks_per_node is %d; it is 1 or more, or 0 for one kind of link",
                            m->ranks_per_node));
  SLUICE_TRY(SLUICE_REQUIRE(
      m->ranks_per_node <= 1 || m->node_exchange.bytes.count > 0,
      "machine: ranks_per_node is %d but node_exchange is missing; give the costs of links within a node",
      m->ranks_per_node));
  for (int32_t d = 0; d < SLUICE_MACHINE_DTYPES; ++d) {
    for (int32_t f = 0; f < SLUICE_FORM_COUNT; ++f) SLUICE_TRY(check_curve("gemm", &m->gemm[d][f]));
  }
  SLUICE_TRY(check_seconds("gemm_call_seconds", m->gemm_call_seconds));
  SLUICE_TRY(check_curve("rows", &m->rows));
  SLUICE_TRY(check_seconds("activation_seconds", m->activation_seconds));
  SLUICE_TRY(check_seconds("activation_grad_seconds", m->activation_grad_seconds));
  SLUICE_TRY(check_seconds("relu_seconds", m->relu_seconds));
  SLUICE_TRY(check_seconds("relu_grad_seconds", m->relu_grad_seconds));
  SLUICE_TRY(check_link("exchange", &m->exchange));
  SLUICE_TRY(check_link("node_exchange", &m->node_exchange));
  SLUICE_TRY(check_curve("exchange_contention", &m->exchange_contention));
  SLUICE_TRY(check_curve("compute_contention", &m->compute_contention));
  SLUICE_TRY(check_seconds("second_exchange_seconds", m->second_exchange_seconds));
  SLUICE_TRY(check_seconds("second_exchange_contention", m->second_exchange_contention));
  SLUICE_TRY(check_seconds("second_compute_contention", m->second_compute_contention));
  SLUICE_TRY(SLUICE_REQUIRE(m->exchange_skew_gain >= 0 && m->exchange_skew_gain <= 1,
                            "machine: exchange_skew_gain is %g; it is in [0, 1]", m->exchange_skew_gain));
  SLUICE_TRY(check_curve("host_copy", &m->host_copy));
  SLUICE_TRY(check_curve("cache_miss_forward", &m->cache_miss_factor[0]));
  SLUICE_TRY(check_curve("cache_miss_backward", &m->cache_miss_factor[1]));
  SLUICE_TRY(check_seconds("op_seconds", m->op_seconds));
  SLUICE_TRY(check_seconds("pass_seconds", m->pass_seconds));
  SLUICE_TRY(check_seconds("pass_byte_seconds", m->pass_byte_seconds));
  SLUICE_TRY(check_seconds("error median", m->error_median));
  SLUICE_TRY(check_seconds("error p90", m->error_p90));
  return check_shares(m);
}

sluice_status_t sluice_machine_check_for(const sluice_machine_t* m, int32_t dtype, int32_t world_size) {
  int32_t d = dtype_index(dtype);
  SLUICE_TRY(
      SLUICE_REQUIRE(m->gemm[d][SLUICE_FORM_FORWARD].count > 0,
                     "machine %s: gemm.%s is missing; calibrate with this dtype, or add its curve to the profile",
                     m->name, sluice_machine_dtype_names[d]));
  SLUICE_TRY(SLUICE_REQUIRE(
      world_size <= 1 || m->exchange.bytes.count > 0 ||
          (m->ranks_per_node >= world_size && m->node_exchange.bytes.count > 0),
      "machine %s: exchange is missing, and %d ranks exchange rows; calibrate on several ranks, or add it", m->name,
      world_size));
  return SLUICE_OK;
}
