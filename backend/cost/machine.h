// SPDX-License-Identifier: Apache-2.0
/* The costs of a machine as data: curves from a calibration, or from a named profile of a cluster.
 *
 * It holds everything that a prediction needs, and nothing about a layer. It is written and read as JSON
 * (docs/tuning.md describes the form), so that a machine can be stored, edited and sent. Plain data: copy and compare
 * it freely; there is no destroy.
 *
 * Ours: costs of single ops are piecewise linear in size. MPipeMoE and MPMoE use one constant rate each for
 * computation, communication and copies, which misses that GEMMs are slower for few rows.
 */
#pragma once

#include "backend/base/alloc.h"
#include "backend/base/lanes.h"

#define SLUICE_CURVE_POINTS 24

/* y against x: linear between points, constant before the first, extrapolated along the last segment after the last
 * (through the origin if there is only one point). count 0: unknown. x ascends strictly, y >= 0. */
typedef struct sluice_curve_s {
  int32_t count;
  double x[SLUICE_CURVE_POINTS];
  double y[SLUICE_CURVE_POINTS];
} sluice_curve_t;

/* An all-to-all of W ranks takes startup + per_peer * (W - 1) + bytes(the most that a rank sends or receives). */
typedef struct sluice_link_s {
  double startup_seconds;
  double per_peer_seconds;
  sluice_curve_t bytes;        /* seconds against bytes: line time */
  double token_bucket_seconds; /* line time that a pause earns at most; 0: no token bucket */
} sluice_link_t;

enum { SLUICE_MACHINE_PROFILE = 0, SLUICE_MACHINE_CALIBRATED = 1, SLUICE_MACHINE_REFINED = 2 }; /* JSON: refined */

/* The three GEMMs of a layer; the sizes that change with the batch are rows, rows, and the summed dimension. */
enum { SLUICE_FORM_FORWARD = 0, SLUICE_FORM_INPUT_GRAD = 1, SLUICE_FORM_WEIGHT_GRAD = 2, SLUICE_FORM_COUNT = 3 };
enum { SLUICE_MACHINE_F32 = 0, SLUICE_MACHINE_BF16 = 1, SLUICE_MACHINE_F16 = 2, SLUICE_MACHINE_DTYPES = 3 };

#define SLUICE_COPY_SHARES 4 /* sizes of copies */
typedef struct sluice_copy_share_s {
  double bytes;
  double share[SLUICE_NUM_LANES][1 << SLUICE_NUM_LANES];
} sluice_copy_share_t;

typedef struct sluice_machine_s {
  char name[64];
  int32_t provenance;                          /* SLUICE_MACHINE_* */
  int32_t world_size;                          /* ranks in the measured exchanges; 0: unknown */
  int32_t ranks_per_node;                      /* 0: one kind of link between all ranks */
  int64_t gemm_model_width, gemm_hidden_width; /* sizes of the measured GEMMs; 0: unknown */
  /* Seconds per flop against rows per expert, [dtype][form]; interpolated as seconds. */
  sluice_curve_t gemm[SLUICE_MACHINE_DTYPES][SLUICE_FORM_COUNT];
  double gemm_call_seconds;  /* additional, per GEMM of an expert */
  sluice_curve_t rows;       /* seconds against bytes gathered, packed or reduced */
  double activation_seconds; /* per element of the activated rows: GELU, used for all activations with an exponential */
  double activation_grad_seconds;         /* the same in backward */
  double relu_seconds, relu_grad_seconds; /* of relu, relu2 and none; both 0: unknown, as the others */
  sluice_link_t exchange;                 /* between ranks; between nodes if ranks_per_node is set */
  sluice_link_t node_exchange;            /* within a node */
  /* The extra time of an exchange while GEMMs run, since the threads that serve it wait for a core, and the time that
   * the GEMMs lose: seconds against bytes, measured at world_size. count 0: not measured, `share` applies. JSON:
   * exchange_contention, compute_contention.
   */
  sluice_curve_t exchange_contention, compute_contention;
  /* An almost empty second exchange in flight with a first, as for the scalars of a backward: the same three
   * quantities, additional. */
  double second_exchange_seconds, second_exchange_contention, second_compute_contention;
  /* For an exchange in which one rank has more than the others, in [0, 1]. 0: it takes as long as its fullest rank's
   * bytes, 1: as the average bytes (the ranks share a processor, or one wire). */
  double exchange_skew_gain;
  sluice_curve_t host_copy; /* seconds against bytes, device to host and back */
  /* Compute lane time over the sum of its ops if the rows of a pass, and the tensors computed from them, exceed the
   * cache: a factor against bytes, of a forward and of a backward. count 0: 1. */
  sluice_curve_t cache_miss_factor[2]; /* JSON: cache_miss_forward, cache_miss_backward */
  double op_seconds;                   /* per op, additional */
  double pass_seconds;                 /* per pass: routing, header, bookkeeping */
  double pass_byte_seconds;            /* additional, per byte of a rank's rows: time outside of ops */
  /* [lane][set of busy lanes, including it]: the share of its speed that the lane keeps; 0 stands for 1. */
  double share[SLUICE_NUM_LANES][1 << SLUICE_NUM_LANES];
  /* The same while copies of these bytes run, by direction; sizes ascend. 0: no share is given, and `share` applies.
   * JSON: entries of copy_share. */
  int32_t num_copy_shares;
  sluice_copy_share_t copy_share[SLUICE_COPY_SHARES];
  double error_median, error_p90; /* |predicted / measured - 1| on held-out sizes; 0: not measured */
  int32_t error_count;
} sluice_machine_t;

/* The shares while a copy of about `bytes` runs: those of the nearest size, by their ratio. NULL: not measured by size,
 * `share` applies to all copies. */
const sluice_copy_share_t* sluice_machine_copy_share(const sluice_machine_t* machine, double bytes);

void sluice_machine_init(sluice_machine_t* out_machine);

double sluice_curve_at(const sluice_curve_t* curve, double x);
/* Multiplies every y. */
static inline void sluice_curve_scale(sluice_curve_t* curve, double factor) {
  for (int32_t i = 0; i < curve->count; ++i) curve->y[i] *= factor;
}
/* Seconds per flop at `rows` per expert. dtype: SLUICE_DTYPE_*. */
double sluice_machine_gemm(const sluice_machine_t* machine, int32_t dtype, int32_t form, double rows);
/* The cache-miss factor for the given bytes of a rank's rows and the tensors computed from them. */
double sluice_machine_cache_miss_factor(const sluice_machine_t* machine, int32_t direction, double bytes);
/* Seconds of one all-to-all in which each rank sends and receives at most `bytes` to and from others, evenly spread. */
double sluice_machine_exchange(const sluice_machine_t* machine, int32_t world_size, double bytes);
/* Seconds of the parts of an exchange with two levels: between the ranks of one local index on `nodes` nodes, and
 * within a node of `ranks` ranks. */
double sluice_machine_between(const sluice_machine_t* machine, int32_t nodes, double bytes);
double sluice_machine_within(const sluice_machine_t* machine, int32_t ranks, double bytes);
/* The line time of an exchange over a link with a token bucket (token_bucket_seconds); 0 if links have none. */
double sluice_machine_line(const sluice_machine_t* machine, int32_t world_size, double bytes);
/* The bytes of an even exchange that takes as long as one whose fullest rank has `most` and whose mean is `mean`. */
double sluice_machine_skewed_bytes(const sluice_machine_t* machine, double most, double mean);
/* Extra seconds while GEMMs run, and the seconds that the GEMMs lose, for an exchange of the given bytes that takes
 * `seconds` alone. */
typedef struct sluice_contention_s {
  double exchange, compute;
} sluice_contention_t;
sluice_contention_t sluice_machine_contention(const sluice_machine_t* machine, double bytes, double seconds);

/* Errors: INVALID_ARGUMENT with the field, its value and the remedy. */
sluice_status_t sluice_machine_check(const sluice_machine_t* machine);
/* INVALID_ARGUMENT if the machine lacks what a layer of this dtype, or several ranks, needs. */
sluice_status_t sluice_machine_check_for(const sluice_machine_t* machine, int32_t dtype, int32_t world_size);

/* Reads the JSON form and checks it. Errors: INVALID_ARGUMENT with the line or field; for unknown fields it lists the
 * known ones.
 */
sluice_status_t sluice_machine_read(const char* text, uint64_t length, sluice_machine_t* out_machine);
/* Writes at most `room` bytes, terminated; returns the full length without the terminator. text may be NULL to get the
 * length. */
uint64_t sluice_machine_write(const sluice_machine_t* machine, char* text, uint64_t room);

/* "compute", "comm", "copy_out", "copy_in"; "f32", "bf16", "f16"; "forward", "input_grad", "weight_grad". */
extern const char* const sluice_lane_names[SLUICE_NUM_LANES];
extern const char* const sluice_machine_dtype_names[SLUICE_MACHINE_DTYPES];
extern const char* const sluice_form_names[SLUICE_FORM_COUNT];
extern const char* const sluice_provenance_names[3];
