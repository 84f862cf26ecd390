// SPDX-License-Identifier: Apache-2.0
/* Reads and writes a machine as JSON. One table has every field, for reading and for the list of known names. */
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/json.h"
#include "backend/base/text.h"
#include "backend/cost/machine.h"
#include "sluice/context.h"

#define FORM 2
#define WHAT "machine profile"

/* ---- reading ---- */

static const char* kind_name(const sluice_json_t* node) {
  static const char* const names[] = {"null", "true or false", "a number", "a string", "an array", "an object"};
  return names[node->kind];
}

static sluice_status_t unknown_field(const char* where, const sluice_json_t* node, const char* known) {
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, WHAT ": unknown field \"%.*s\" in %s; known are %s", node->name_length,
                     node->name, where, known);
}

static sluice_status_t want_kind(const char* field, const sluice_json_t* node, int32_t kind) {
  const sluice_json_t wanted = {.kind = kind};
  SLUICE_TRY(
      SLUICE_REQUIRE(node->kind == kind, WHAT ": %s is %s; it must be %s", field, kind_name(node), kind_name(&wanted)));
  return SLUICE_OK;
}

static sluice_status_t read_seconds(const char* field, const sluice_json_t* node, double* out) {
  SLUICE_TRY(want_kind(field, node, SLUICE_JSON_NUMBER));
  SLUICE_TRY(
      SLUICE_REQUIRE(node->number >= 0, WHAT ": %s is %g; it is a time in seconds, 0 or more", field, node->number));
  *out = node->number;
  return SLUICE_OK;
}

static sluice_status_t read_rate(const char* field, const char* unit, const sluice_json_t* node, double* out) {
  SLUICE_TRY(want_kind(field, node, SLUICE_JSON_NUMBER));
  SLUICE_TRY(
      SLUICE_REQUIRE(node->number > 0, WHAT ": %s is %g; it is %s per second, above 0", field, node->number, unit));
  *out = node->number;
  return SLUICE_OK;
}

static sluice_status_t read_whole(const char* field, const sluice_json_t* node, double most, double* out) {
  SLUICE_TRY(want_kind(field, node, SLUICE_JSON_NUMBER));
  SLUICE_TRY(SLUICE_REQUIRE(node->number >= 0 && node->number <= most && node->number == floor(node->number),
                            WHAT ": %s is %g; it must be a whole number in [0, %.0f]", field, node->number, most));
  *out = node->number;
  return SLUICE_OK;
}

static sluice_status_t read_points(const char* field, const sluice_json_t* node, sluice_curve_t* out) {
  SLUICE_TRY(want_kind(field, node, SLUICE_JSON_ARRAY));
  SLUICE_TRY(SLUICE_REQUIRE(node->count >= 1 && node->count <= SLUICE_CURVE_POINTS,
                            WHAT ": %s has %d points; it has 1 to %d", field, node->count, SLUICE_CURVE_POINTS));
  out->count = 0;
  for (const sluice_json_t* point = node->child; point != NULL; point = point->next) {
    int is_pair = point->kind == SLUICE_JSON_ARRAY && point->count == 2 && point->child->kind == SLUICE_JSON_NUMBER &&
                  point->child->next->kind == SLUICE_JSON_NUMBER;
    SLUICE_TRY(
        SLUICE_REQUIRE(is_pair, WHAT ": point %d of %s must be a pair of numbers [size, seconds]", out->count, field));
    double x = point->child->number, y = point->child->next->number;
    SLUICE_TRY(SLUICE_REQUIRE(x > 0 && y >= 0, WHAT ": point %d of %s is [%g, %g]; sizes are above 0, times 0 or more",
                              out->count, field, x, y));
    SLUICE_TRY(SLUICE_REQUIRE(out->count == 0 || x > out->x[out->count - 1],
                              WHAT ": points of %s must ascend, but %g follows %g", field, x, out->x[out->count - 1]));
    out->x[out->count] = x, out->y[out->count] = y;
    ++out->count;
  }
  return SLUICE_OK;
}

/* startup + bytes / rate as two points. */
static void line_curve(double startup, double bytes_per_second, sluice_curve_t* out) {
  out->count = 2;
  out->x[0] = 1, out->y[0] = startup + 1 / bytes_per_second;
  out->x[1] = 1e9, out->y[1] = startup + 1e9 / bytes_per_second;
}

/* {"points": [...]} or {"bytes_per_second": ..., "startup_seconds": ...}; a link may also have "per_peer_seconds" and
 * "token_bucket_seconds", and its start-up is stored separately. */
static sluice_status_t read_line(const char* field, const sluice_json_t* node, sluice_curve_t* out,
                                 sluice_link_t* link) {
  SLUICE_TRY(want_kind(field, node, SLUICE_JSON_OBJECT));
  char name[96];
  double rate = 0, startup = 0, per_peer = 0, bucket = 0;
  for (const sluice_json_t* c = node->child; c != NULL; c = c->next) {
    snprintf(name, sizeof name, "%s.%.*s", field, c->name_length, c->name);
    if (sluice_json_is_named(c, "points")) {
      SLUICE_TRY(read_points(name, c, out));
    } else if (sluice_json_is_named(c, "bytes_per_second")) {
      SLUICE_TRY(read_rate(name, "bytes", c, &rate));
    } else if (sluice_json_is_named(c, "startup_seconds")) {
      SLUICE_TRY(read_seconds(name, c, &startup));
    } else if (link != NULL && sluice_json_is_named(c, "per_peer_seconds")) {
      SLUICE_TRY(read_seconds(name, c, &per_peer));
    } else if (link != NULL && sluice_json_is_named(c, "token_bucket_seconds")) {
      SLUICE_TRY(read_seconds(name, c, &bucket));
    } else {
      return unknown_field(field, c,
                           link != NULL
                               ? "points, bytes_per_second, startup_seconds, per_peer_seconds and token_bucket_seconds"
                               : "points, bytes_per_second and startup_seconds");
    }
  }
  SLUICE_TRY(
      SLUICE_REQUIRE((rate > 0) != (out->count > 0), WHAT ": %s must have either points or bytes_per_second", field));
  SLUICE_TRY(SLUICE_REQUIRE(out->count == 0 || link != NULL || startup == 0,
                            WHAT ": %s has points, which contain the start-up: leave "
                                 "startup_seconds out",
                            field));
  if (link != NULL) {
    link->startup_seconds = startup, link->per_peer_seconds = per_peer, link->token_bucket_seconds = bucket;
  }
  if (rate > 0) line_curve(link != NULL ? 0 : startup, rate, out);
  return SLUICE_OK;
}

static sluice_status_t read_curve(const char* field, const sluice_json_t* node, void* out) {
  return read_line(field, node, out, NULL);
}

/* Factors against bytes: only points. */
static sluice_status_t read_factors(const char* field, const sluice_json_t* node, void* out) {
  sluice_curve_t* curve = out;
  SLUICE_TRY(read_line(field, node, curve, NULL));
  SLUICE_TRY(SLUICE_REQUIRE(sluice_json_member(node, "points") != NULL, WHAT ": %s has points [bytes, factor]", field));
  for (int32_t i = 0; i < curve->count; ++i) {
    SLUICE_TRY(SLUICE_REQUIRE(curve->y[i] > 0, WHAT ": point %d of %s is a factor of %g; it is above 0", i, field,
                              curve->y[i]));
  }
  return SLUICE_OK;
}

static sluice_status_t read_link(const char* field, const sluice_json_t* node, void* out) {
  sluice_link_t* link = out;
  return read_line(field, node, &link->bytes, link);
}

/* A rate with the rows at which half of it is reached, converted to a curve of seconds per flop. */
static void rate_curve(double flops_per_second, double half_rows, sluice_curve_t* out) {
  out->count = 0;
  for (int32_t rows = 1; rows <= 65536; rows *= 4) {
    out->x[out->count] = rows;
    out->y[out->count++] = (1 + half_rows / rows) / flops_per_second;
  }
}

static sluice_status_t read_gemms(const char* field, const sluice_json_t* node, sluice_curve_t* forms) {
  SLUICE_TRY(want_kind(field, node, SLUICE_JSON_OBJECT));
  char name[96];
  double rate = 0, half = 0;
  for (const sluice_json_t* c = node->child; c != NULL; c = c->next) {
    snprintf(name, sizeof name, "%s.%.*s", field, c->name_length, c->name);
    int32_t form = 0;
    while (form < SLUICE_FORM_COUNT && !sluice_json_is_named(c, sluice_form_names[form])) ++form;
    if (form < SLUICE_FORM_COUNT) {
      SLUICE_TRY(read_points(name, c, &forms[form]));
    } else if (sluice_json_is_named(c, "flops_per_second")) {
      SLUICE_TRY(read_rate(name, "flops", c, &rate));
    } else if (sluice_json_is_named(c, "half_rows")) {
      SLUICE_TRY(want_kind(name, c, SLUICE_JSON_NUMBER));
      SLUICE_TRY(SLUICE_REQUIRE(c->number >= 0,
                                WHAT ": %s is %g; it is the number of rows per expert at half the rate, 0 or more",
                                name, c->number));
      half = c->number;
    } else {
      return unknown_field(field, c, "forward, input_grad, weight_grad, flops_per_second and half_rows");
    }
  }
  SLUICE_TRY(SLUICE_REQUIRE((rate > 0) != (forms[0].count > 0),
                            WHAT ": %s must have either forward or flops_per_second", field));
  if (rate > 0) rate_curve(rate, half, &forms[0]);
  return SLUICE_OK;
}

static sluice_status_t read_gemm(const char* field, const sluice_json_t* node, void* out) {
  sluice_curve_t(*curves)[SLUICE_FORM_COUNT] = out;
  SLUICE_TRY(want_kind(field, node, SLUICE_JSON_OBJECT));
  for (const sluice_json_t* c = node->child; c != NULL; c = c->next) {
    int32_t d = 0;
    while (d < SLUICE_MACHINE_DTYPES && !sluice_json_is_named(c, sluice_machine_dtype_names[d])) ++d;
    if (d == SLUICE_MACHINE_DTYPES) return unknown_field(field, c, "f32, bf16 and f16");
    char name[32];
    snprintf(name, sizeof name, "gemm.%s", sluice_machine_dtype_names[d]);
    SLUICE_TRY(read_gemms(name, c, curves[d]));
  }
  return SLUICE_OK;
}

static int32_t lane_of(const sluice_json_t* node) {
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
    if (sluice_json_is_text(node, sluice_lane_names[lane])) return lane;
  }
  return -1;
}

/* Reads an entry of `share`, or of `copy_share`, which also has the bytes of a copy. */
static sluice_status_t read_one_share(const sluice_json_t* entry, int32_t num_members,
                                      double (*shares)[1 << SLUICE_NUM_LANES], uint32_t* out_set) {
  const sluice_json_t* lane = sluice_json_member(entry, "lane");
  const sluice_json_t* others = sluice_json_member(entry, "beside");
  const sluice_json_t* share = sluice_json_member(entry, "share");
  int is_whole = entry->count == num_members && lane != NULL && others != NULL && share != NULL;
  SLUICE_TRY(SLUICE_REQUIRE(is_whole && others->kind == SLUICE_JSON_ARRAY && share->kind == SLUICE_JSON_NUMBER, WHAT
                            ": an entry of share has lane (a name), beside (an array of names) and share (a number)"));
  SLUICE_TRY(SLUICE_REQUIRE(lane_of(lane) >= 0, WHAT ": share.lane: known are compute, comm, copy_out and copy_in"));
  SLUICE_TRY(SLUICE_REQUIRE(share->number > 0 && share->number <= 1,
                            WHAT ": share.share is %g; it is the part of its speed that the lane keeps, in (0, 1]",
                            share->number));
  uint32_t set = 1u << lane_of(lane);
  for (const sluice_json_t* b = others->child; b != NULL; b = b->next) {
    SLUICE_TRY(SLUICE_REQUIRE(lane_of(b) >= 0 && lane_of(b) != lane_of(lane),
                              WHAT ": share.beside names other lanes: of compute, comm, copy_out and copy_in"));
    set |= 1u << lane_of(b);
  }
  shares[lane_of(lane)][set] = share->number;
  *out_set = set;
  return SLUICE_OK;
}

static sluice_status_t read_shares(const char* field, const sluice_json_t* node, void* out) {
  SLUICE_TRY(want_kind(field, node, SLUICE_JSON_ARRAY));
  uint32_t set = 0;
  for (const sluice_json_t* c = node->child; c != NULL; c = c->next) SLUICE_TRY(read_one_share(c, 3, out, &set));
  return SLUICE_OK;
}

/* Finds or inserts the shares of this size; sizes stay in ascending order. NULL: there are too many sizes. */
static sluice_copy_share_t* shares_of_size(sluice_machine_t* m, double bytes) {
  int32_t at = 0;
  while (at < m->num_copy_shares && m->copy_share[at].bytes < bytes) ++at;
  if (at < m->num_copy_shares && m->copy_share[at].bytes <= bytes) return &m->copy_share[at];
  if (m->num_copy_shares == SLUICE_COPY_SHARES) return NULL;
  memmove(&m->copy_share[at + 1], &m->copy_share[at], (size_t)(m->num_copy_shares - at) * sizeof m->copy_share[0]);
  ++m->num_copy_shares;
  m->copy_share[at] = (sluice_copy_share_t){.bytes = bytes};
  return &m->copy_share[at];
}

static sluice_status_t read_copy_shares(const char* field, const sluice_json_t* node, void* out) {
  SLUICE_TRY(want_kind(field, node, SLUICE_JSON_ARRAY));
  for (const sluice_json_t* c = node->child; c != NULL; c = c->next) {
    const sluice_json_t* bytes = sluice_json_member(c, "bytes");
    SLUICE_TRY(SLUICE_REQUIRE(bytes != NULL && bytes->kind == SLUICE_JSON_NUMBER && bytes->number > 0,
                              WHAT ": an entry of copy_share has bytes, the size of a copy, above 0"));
    sluice_copy_share_t* of_size = shares_of_size(out, bytes->number);
    SLUICE_TRY(SLUICE_REQUIRE(of_size != NULL, WHAT ": copy_share has more than %d sizes", SLUICE_COPY_SHARES));
    uint32_t set = 0;
    SLUICE_TRY(read_one_share(c, 4, of_size->share, &set));
    SLUICE_TRY(SLUICE_REQUIRE((set >> SLUICE_LANE_COPY_OUT & 1) || (set >> SLUICE_LANE_COPY_IN & 1),
                              WHAT ": an entry of copy_share is about copy_out or copy_in, as lane or beside"));
  }
  return SLUICE_OK;
}

static sluice_status_t read_error(const char* field, const sluice_json_t* node, void* out) {
  sluice_machine_t* m = out;
  SLUICE_TRY(want_kind(field, node, SLUICE_JSON_OBJECT));
  double count = 0;
  for (const sluice_json_t* c = node->child; c != NULL; c = c->next) {
    if (sluice_json_is_named(c, "median")) {
      SLUICE_TRY(read_seconds("error.median", c, &m->error_median));
    } else if (sluice_json_is_named(c, "p90")) {
      SLUICE_TRY(read_seconds("error.p90", c, &m->error_p90));
    } else if (sluice_json_is_named(c, "count")) {
      SLUICE_TRY(read_whole("error.count", c, 1e6, &count));
    } else {
      return unknown_field(field, c, "median, p90 and count");
    }
  }
  m->error_count = (int32_t)count;
  return SLUICE_OK;
}

static sluice_status_t read_name(const char* field, const sluice_json_t* node, void* out) {
  sluice_machine_t* m = out;
  SLUICE_TRY(want_kind(field, node, SLUICE_JSON_STRING));
  SLUICE_TRY(SLUICE_REQUIRE(node->text_length >= 1 && node->text_length < (int32_t)sizeof m->name,
                            WHAT ": name has %d bytes; it has 1 to %d", node->text_length, (int)sizeof m->name - 1));
  snprintf(m->name, sizeof m->name, "%.*s", node->text_length, node->text);
  return SLUICE_OK;
}

static sluice_status_t read_gain(const char* field, const sluice_json_t* node, void* out) {
  SLUICE_TRY(want_kind(field, node, SLUICE_JSON_NUMBER));
  SLUICE_TRY(SLUICE_REQUIRE(node->number >= 0 && node->number <= 1,
                            WHAT ": %s is %g; it is in [0, 1]: 0 if the fullest rank counts, 1 if the mean does", field,
                            node->number));
  *(double*)out = node->number;
  return SLUICE_OK;
}

static sluice_status_t read_provenance(const char* field, const sluice_json_t* node, void* out) {
  sluice_machine_t* m = out;
  SLUICE_TRY(want_kind(field, node, SLUICE_JSON_STRING));
  for (int32_t p = 0; p < 3; ++p) {
    if (!sluice_json_is_text(node, sluice_provenance_names[p])) continue;
    m->provenance = p;
    return SLUICE_OK;
  }
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, WHAT ": provenance is \"%.*s\"; known are profile, calibrated, refined",
                     node->text_length, node->text);
}

enum { KIND_SECONDS, KIND_INT32, KIND_INT64, KIND_PART };
typedef struct field_s {
  const char* name;
  int32_t kind;
  size_t offset;
  sluice_status_t (*read)(const char* field, const sluice_json_t* node, void* out); /* KIND_PART */
} field_t;

#define AT(member) offsetof(sluice_machine_t, member)
static const field_t fields[] = {
    {"name", KIND_PART, 0, read_name},
    {"provenance", KIND_PART, 0, read_provenance},
    {"world_size", KIND_INT32, AT(world_size), NULL},
    {"ranks_per_node", KIND_INT32, AT(ranks_per_node), NULL},
    {"gemm_model_width", KIND_INT64, AT(gemm_model_width), NULL},
    {"gemm_hidden_width", KIND_INT64, AT(gemm_hidden_width), NULL},
    {"gemm", KIND_PART, AT(gemm), read_gemm},
    {"gemm_call_seconds", KIND_SECONDS, AT(gemm_call_seconds), NULL},
    {"rows", KIND_PART, AT(rows), read_curve},
    {"activation_seconds", KIND_SECONDS, AT(activation_seconds), NULL},
    {"activation_grad_seconds", KIND_SECONDS, AT(activation_grad_seconds), NULL},
    {"relu_seconds", KIND_SECONDS, AT(relu_seconds), NULL},
    {"relu_grad_seconds", KIND_SECONDS, AT(relu_grad_seconds), NULL},
    {"exchange", KIND_PART, AT(exchange), read_link},
    {"node_exchange", KIND_PART, AT(node_exchange), read_link},
    {"exchange_contention", KIND_PART, AT(exchange_contention), read_curve},
    {"compute_contention", KIND_PART, AT(compute_contention), read_curve},
    {"second_exchange_seconds", KIND_SECONDS, AT(second_exchange_seconds), NULL},
    {"second_exchange_contention", KIND_SECONDS, AT(second_exchange_contention), NULL},
    {"second_compute_contention", KIND_SECONDS, AT(second_compute_contention), NULL},
    {"exchange_skew_gain", KIND_PART, AT(exchange_skew_gain), read_gain},
    {"host_copy", KIND_PART, AT(host_copy), read_curve},
    {"cache_miss_forward", KIND_PART, AT(cache_miss_factor), read_factors},
    {"cache_miss_backward", KIND_PART, AT(cache_miss_factor) + sizeof(sluice_curve_t), read_factors},
    {"op_seconds", KIND_SECONDS, AT(op_seconds), NULL},
    {"pass_seconds", KIND_SECONDS, AT(pass_seconds), NULL},
    {"pass_byte_seconds", KIND_SECONDS, AT(pass_byte_seconds), NULL},
    {"share", KIND_PART, AT(share), read_shares},
    {"copy_share", KIND_PART, 0, read_copy_shares},
    {"error", KIND_PART, 0, read_error},
};
#define NUM_FIELDS (sizeof fields / sizeof fields[0])

static sluice_status_t read_field(const field_t* f, const sluice_json_t* node, sluice_machine_t* m) {
  void* at = (char*)m + f->offset;
  double value = 0;
  switch (f->kind) {
    case KIND_SECONDS: return read_seconds(f->name, node, at);
    case KIND_INT32:
      SLUICE_TRY(read_whole(f->name, node, 1 << 24, &value));
      *(int32_t*)at = (int32_t)value;
      return SLUICE_OK;
    case KIND_INT64:
      SLUICE_TRY(read_whole(f->name, node, 1 << 30, &value));
      *(int64_t*)at = (int64_t)value;
      return SLUICE_OK;
    default: return f->read(f->name, node, at);
  }
}

static sluice_status_t read_root(const sluice_json_t* root, sluice_machine_t* m) {
  SLUICE_TRY(want_kind("the outermost value", root, SLUICE_JSON_OBJECT));
  const sluice_json_t* form = sluice_json_member(root, "sluice_machine");
  SLUICE_TRY(SLUICE_REQUIRE(form != NULL && form->kind == SLUICE_JSON_NUMBER,
                            WHAT ": it must begin with \"sluice_machine\": %d, the version of its format", FORM));
  SLUICE_TRY(SLUICE_REQUIRE(form->number == FORM,
                            WHAT ": format version %g; this library reads version %d: calibrate again", form->number,
                            FORM));
  for (const sluice_json_t* c = root->child; c != NULL; c = c->next) {
    if (c == form) continue;
    size_t i = 0;
    while (i < NUM_FIELDS && !sluice_json_is_named(c, fields[i].name)) ++i;
    if (i < NUM_FIELDS) {
      SLUICE_TRY(read_field(&fields[i], c, m));
      continue;
    }
    char known[1024]; /* as large as the message that contains it */
    sluice_text_t list = sluice_text(known, sizeof known);
    for (i = 0; i < NUM_FIELDS; ++i) sluice_text_add(&list, "%s%s", i > 0 ? ", " : "", fields[i].name);
    return unknown_field("the machine", c, known);
  }
  return sluice_machine_check(m);
}

sluice_status_t sluice_machine_read(const char* text, uint64_t length, sluice_machine_t* out_machine) {
  sluice_json_tree_t tree;
  SLUICE_TRY(sluice_json_parse(text, length, WHAT, &tree));
  sluice_machine_t machine;
  sluice_machine_init(&machine);
  sluice_status_t status = read_root(&tree.nodes[0], &machine);
  sluice_json_free(&tree);
  if (status == SLUICE_OK) *out_machine = machine;
  return status;
}

/* ---- writing ---- */

static void add_number(sluice_text_t* text, const char* before, double value) {
  sluice_text_add(text, "%s", before);
  sluice_text_add_number(text, value);
}

/* A field of the machine; the text before it ends without a comma. */
static void add_field(sluice_text_t* text, const char* name, double value) {
  sluice_text_add(text, ",\n \"%s\": ", name);
  sluice_text_add_number(text, value);
}

static void add_points(sluice_text_t* text, const char* name, const sluice_curve_t* c) {
  sluice_text_add(text, "\"%s\": [", name);
  for (int32_t i = 0; i < c->count; ++i) {
    add_number(text, i > 0 ? ", [" : "[", c->x[i]);
    add_number(text, ", ", c->y[i]);
    sluice_text_add(text, "]");
  }
  sluice_text_add(text, "]");
}

static void add_gemm(sluice_text_t* text, const sluice_machine_t* m) {
  const char* separator = "";
  sluice_text_add(text, ",\n \"gemm\": {");
  for (int32_t d = 0; d < SLUICE_MACHINE_DTYPES; ++d) {
    if (m->gemm[d][0].count == 0) continue;
    sluice_text_add(text, "%s\n  \"%s\": {", separator, sluice_machine_dtype_names[d]);
    separator = ",";
    for (int32_t f = 0; f < SLUICE_FORM_COUNT; ++f) {
      if (m->gemm[d][f].count == 0) continue;
      sluice_text_add(text, "%s\n   ", f > 0 ? "," : "");
      add_points(text, sluice_form_names[f], &m->gemm[d][f]);
    }
    sluice_text_add(text, "}");
  }
  sluice_text_add(text, "}");
}

static void add_link(sluice_text_t* text, const char* name, const sluice_link_t* link) {
  if (link->bytes.count == 0) return;
  sluice_text_add(text, ",\n \"%s\": {", name);
  add_number(text, "\"startup_seconds\": ", link->startup_seconds);
  add_number(text, ", \"per_peer_seconds\": ", link->per_peer_seconds);
  add_number(text, ", \"token_bucket_seconds\": ", link->token_bucket_seconds);
  sluice_text_add(text, ", ");
  add_points(text, "points", &link->bytes);
  sluice_text_add(text, "}");
}

static void add_curve(sluice_text_t* text, const char* name, const sluice_curve_t* curve) {
  if (curve->count == 0) return;
  sluice_text_add(text, ",\n \"%s\": {", name);
  add_points(text, "points", curve);
  sluice_text_add(text, "}");
}

/* bytes 0: entries without a size. *separator: the text before the first entry. */
static void add_shares_of(sluice_text_t* text, const double (*share)[1 << SLUICE_NUM_LANES], double bytes,
                          const char** separator) {
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
    for (int32_t set = 0; set < 1 << SLUICE_NUM_LANES; ++set) {
      if (share[lane][set] == 0 || !(set >> lane & 1)) continue;
      sluice_text_add(text, "%s\n  {\"lane\": \"%s\", \"beside\": [", *separator, sluice_lane_names[lane]);
      *separator = ",";
      const char* comma = "";
      for (int32_t other = 0; other < SLUICE_NUM_LANES; ++other) {
        if (other == lane || !(set >> other & 1)) continue;
        sluice_text_add(text, "%s\"%s\"", comma, sluice_lane_names[other]);
        comma = ", ";
      }
      add_number(text, "], \"share\": ", share[lane][set]);
      if (bytes > 0) add_number(text, ", \"bytes\": ", bytes);
      sluice_text_add(text, "}");
    }
  }
}

static void add_shares(sluice_text_t* text, const sluice_machine_t* m) {
  const char* separator = "";
  sluice_text_add(text, ",\n \"share\": [");
  add_shares_of(text, m->share, 0, &separator);
  sluice_text_add(text, "]");
  if (m->num_copy_shares == 0) return;
  separator = "";
  sluice_text_add(text, ",\n \"copy_share\": [");
  for (int32_t i = 0; i < m->num_copy_shares; ++i)
    add_shares_of(text, m->copy_share[i].share, m->copy_share[i].bytes, &separator);
  sluice_text_add(text, "]");
}

uint64_t sluice_machine_write(const sluice_machine_t* m, char* data, uint64_t room) {
  sluice_text_t text = sluice_text(data, room);
  sluice_text_add(&text, "{\"sluice_machine\": %d,\n \"name\": \"", FORM);
  for (const char* c = m->name; *c != '\0'; ++c)
    sluice_text_add(&text, "%c", *c == '"' || *c == '\\' || (unsigned char)*c < ' ' ? '_' : *c);
  sluice_text_add(&text, "\",\n \"provenance\": \"%s\",\n \"world_size\": %d,\n \"ranks_per_node\": %d",
                  sluice_provenance_names[m->provenance], m->world_size, m->ranks_per_node);
  sluice_text_add(&text, ",\n \"gemm_model_width\": %" PRId64 ",\n \"gemm_hidden_width\": %" PRId64,
                  m->gemm_model_width, m->gemm_hidden_width);
  add_gemm(&text, m);
  add_field(&text, "gemm_call_seconds", m->gemm_call_seconds);
  add_curve(&text, "rows", &m->rows);
  add_field(&text, "activation_seconds", m->activation_seconds);
  add_field(&text, "activation_grad_seconds", m->activation_grad_seconds);
  add_field(&text, "relu_seconds", m->relu_seconds);
  add_field(&text, "relu_grad_seconds", m->relu_grad_seconds);
  add_link(&text, "exchange", &m->exchange);
  add_link(&text, "node_exchange", &m->node_exchange);
  add_curve(&text, "exchange_contention", &m->exchange_contention);
  add_curve(&text, "compute_contention", &m->compute_contention);
  add_field(&text, "second_exchange_seconds", m->second_exchange_seconds);
  add_field(&text, "second_exchange_contention", m->second_exchange_contention);
  add_field(&text, "second_compute_contention", m->second_compute_contention);
  add_field(&text, "exchange_skew_gain", m->exchange_skew_gain);
  add_curve(&text, "host_copy", &m->host_copy);
  add_curve(&text, "cache_miss_forward", &m->cache_miss_factor[0]);
  add_curve(&text, "cache_miss_backward", &m->cache_miss_factor[1]);
  add_field(&text, "op_seconds", m->op_seconds);
  add_field(&text, "pass_seconds", m->pass_seconds);
  add_field(&text, "pass_byte_seconds", m->pass_byte_seconds);
  add_shares(&text, m);
  add_number(&text, ",\n \"error\": {\"median\": ", m->error_median);
  add_number(&text, ", \"p90\": ", m->error_p90);
  sluice_text_add(&text, ", \"count\": %d}}\n", m->error_count);
  return text.used;
}
