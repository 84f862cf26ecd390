// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/bucketed/handshake.h"

#include <float.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/hash.h"
#include "backend/base/math.h"

#define PROTOCOL 1

/* ---- the opening record of a step ---- */

/* X(type, member, value, the rest of a sluice_record_field_t). */
#define COMPARED(X)                                                                                                 \
  X(int64_t, protocol, PROTOCOL, .name = "the protocol of steps")                                                   \
  X(int64_t, lines, lines->num_lines,                                                                               \
    .name = "the number of lines of groups (those that are summed over the same ranks)")                            \
  X(int64_t, own_lines, own, .is_hash = 1, .name = "which groups have a communicator of their own (as a checksum)") \
  X(int64_t, elements, elements, .name = "the number of elements")                                                  \
  X(int64_t, tensors, tensors, .is_hash = 1, .name = TENSORS)                                                       \
  X(int64_t, rules, hash_rules(&step->adam), .is_hash = 1,                                                          \
    .name = "lr, betas, epsilon, weight decay or flags of groups (as a checksum)")                                  \
  X(int64_t, bucket, step->bucket, .name = "bucket")                                                                \
  X(int64_t, chunk, step->chunk, .name = "sum_buckets")                                                             \
  X(int64_t, loss_scale, bits_of(step->adam.loss_scale), .name = "loss_scale (its bits)")                           \
  X(int64_t, max_norm, bits_of(step->adam.max_norm), .name = "max_norm (its bits)")                                 \
  X(int64_t, looks, step->adam.looks_first != 0, .name = "check_finite")                                            \
  X(int64_t, file, step->file != NULL, .name = "whether states are in a file")

#define TENSORS "counts, dtypes or step numbers of tensors (as a checksum)"

typedef struct opening_s {
  sluice_refusal_t refusal;
  float largest;
  int64_t proposal;
  COMPARED(SLUICE_RECORD_MEMBER)
} opening_t;

#define ROW(type, member, value, ...) {SLUICE_RECORD_FIELD(opening_t, member), __VA_ARGS__},
static const sluice_record_field_t opening_fields[] = {COMPARED(ROW)};

static int64_t bits_of(double x) {
  int64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static uint64_t hash_tensor(uint64_t hash, const sluice_adam_tensor_t* tensor) {
  const int64_t said[] = {tensor->count, tensor->step, tensor->grad_dtype};
  return sluice_hash_bytes(hash, said, sizeof said);
}

/* Hashes the tensors of one line. */
static uint64_t hash_line(uint64_t hash, const sluice_lines_t* lines, int32_t line) {
  for (int64_t t = 0; t < lines->num_tensors; ++t) {
    const sluice_line_tensor_t* at = lines->tensors + t;
    if (at->first_piece < lines->first_pieces[line] || at->first_piece >= lines->first_pieces[line + 1]) continue;
    hash = hash_tensor(hash, at->tensor);
  }
  return hash;
}

static uint64_t hash_rules(const sluice_adam_step_t* adam) {
  uint64_t hash = SLUICE_HASH_OF_NOTHING;
  for (int64_t g = 0; g < adam->num_groups; ++g) {
    const sluice_adam_rule_t* rule = &adam->groups[g].rule;
    const double numbers[] = {rule->lr, rule->beta1, rule->beta2, rule->epsilon, rule->weight_decay};
    const int32_t flags[] = {rule->is_decoupled, rule->corrects_the_bias, rule->maximizes};
    hash = sluice_hash_bytes(sluice_hash_bytes(hash, numbers, sizeof numbers), flags, sizeof flags);
  }
  return hash;
}

static void fill(opening_t* mine, const sluice_bucketed_step_t* step, const sluice_lines_t* lines) {
  uint64_t tensors = SLUICE_HASH_OF_NOTHING, own = SLUICE_HASH_OF_NOTHING;
  int64_t elements = 0;
  for (int32_t line = 0; line < lines->num_lines; ++line) {
    const int32_t is_own = lines->comms[line] != step->comm;
    own = sluice_hash_bytes(own, &is_own, sizeof is_own);
    if (is_own) continue;
    tensors = hash_line(tensors, lines, line);
    elements += lines->counts[line];
  }
#define FILL(type, member, value, ...) mine->member = (type)(value);
  COMPARED(FILL)
}

static sluice_status_t open_step(const sluice_bucketed_step_t* step, const sluice_lines_t* lines,
                                 const sluice_agreed_t* known, sluice_agreed_t* out_agreed) {
  static const sluice_agreement_t opening = {"optimizer", "took no step", "the ranks of an optimizer's step"};
  opening_t mine = {.largest = known->largest, .proposal = known->proposal};
  if (step->refused == SLUICE_OK) fill(&mine, step, lines);
  sluice_records_t records;
  const uint64_t begin_ns = sluice_now_ns();
  SLUICE_TRY(sluice_comm_agree(step->comm, &opening, step->refused, &mine, sizeof mine, &records));
  out_agreed->latency_ns = sluice_now_ns() - begin_ns;
  out_agreed->proposal = ((const opening_t*)sluice_record_of(&records, 0))->proposal;
  out_agreed->largest = 0.0F;
  for (int32_t r = 0; r < records.world_size; ++r) {
    const opening_t* of = sluice_record_of(&records, r);
    out_agreed->largest = of->largest > out_agreed->largest ? of->largest : out_agreed->largest;
  }
  const sluice_status_t status = sluice_records_compare(&records, opening_fields, SLUICE_NUM_FIELDS(opening_fields));
  sluice_records_free(&records);
  return status;
}

/* ---- lines that only some ranks sum ---- */

typedef struct line_record_s {
  sluice_refusal_t refusal; /* unused: the opening carried refusals */
  int64_t tensors;
} line_record_t;

static sluice_status_t compare_line(const sluice_lines_t* lines, int32_t line) {
  static const sluice_record_field_t field[] = {
      {SLUICE_RECORD_FIELD(line_record_t, tensors), .is_hash = 1, .name = TENSORS}};
  char what[96];
  (void)snprintf(what, sizeof what, "optimizer: line %d of groups, by ranks of its communicator", line);
  const sluice_agreement_t agreement = {what, "", "the ranks of a group of parameters"};
  line_record_t mine = {.tensors = (int64_t)hash_line(SLUICE_HASH_OF_NOTHING, lines, line)};
  sluice_records_t records;
  SLUICE_TRY(sluice_comm_agree(lines->comms[line], &agreement, SLUICE_OK, &mine, sizeof mine, &records));
  const sluice_status_t status = sluice_records_compare(&records, field, 1);
  sluice_records_free(&records);
  return status;
}

/* Compares all lines even after a difference, so that every rank takes part in every exchange. *out_any: whether there
 * is such a line. */
static sluice_status_t compare_own_lines(const sluice_bucketed_step_t* step, const sluice_lines_t* lines,
                                         int* out_any) {
  sluice_status_t status = SLUICE_OK;
  *out_any = 0;
  sluice_error_info_t why;
  for (int32_t line = 0; line < lines->num_lines; ++line) {
    if (lines->comms[line] == step->comm) continue;
    *out_any = 1;
    const sluice_status_t of_line = compare_line(lines, line);
    if (status != SLUICE_OK || of_line == SLUICE_OK) continue;
    status = of_line;
    sluice_error_capture(&why);
  }
  return status == SLUICE_OK ? SLUICE_OK : sluice_error_adopt(&why);
}

sluice_status_t sluice_step_handshake(const sluice_bucketed_step_t* step, const sluice_lines_t* lines,
                                      const sluice_agreed_t* mine, sluice_agreed_t* out_agreed) {
  *out_agreed = *mine;
  if (step->comm == NULL) return step->refused;
  SLUICE_TRY(open_step(step, lines, mine, out_agreed));
  int any;
  sluice_bucketed_step_t compared = *step;
  compared.refused = compare_own_lines(step, lines, &any);
  if (!any) return SLUICE_OK;
  sluice_agreed_t ignored;
  return open_step(&compared, lines, mine, &ignored);
}

/* ---- sums ---- */

/* Half of the bound for exact sums, because partial sums may be rounded up. */
float sluice_largest_safe_gradient(const sluice_lines_t* lines) {
  int32_t w = 1;
  for (int32_t i = 0; i < lines->num_lines; ++i) {
    if (lines->comms[i] != NULL) w = (int32_t)sluice_max(w, sluice_comm_world_size(lines->comms[i]));
  }
  return w == 1 ? FLT_MAX : FLT_MAX / 2.0F / (float)w;
}

typedef struct found_record_s {
  sluice_refusal_t refusal; /* unused */
  sluice_found_t found;
} found_record_t;

sluice_status_t sluice_handshake_on_sums(sluice_comm_t* comm, const sluice_found_t* mine, sluice_found_t* out_found) {
  static const sluice_agreement_t sums = {"optimizer: an exchange", "", "whether sums of gradients are finite"};
  *out_found = *mine;
  if (comm == NULL) return SLUICE_OK;
  found_record_t record = {.found = *mine};
  sluice_records_t records;
  SLUICE_TRY(sluice_comm_agree(comm, &sums, SLUICE_OK, &record, sizeof record, &records));
  out_found->squares = 0.0;
  for (int32_t r = 0; r < records.world_size; ++r) {
    const sluice_found_t* found = &((const found_record_t*)sluice_record_of(&records, r))->found;
    out_found->squares += found->squares;
    out_found->largest = found->largest > out_found->largest ? found->largest : out_found->largest;
  }
  sluice_records_free(&records);
  return SLUICE_OK;
}

/* ---- the end of a step with states in files ---- */

sluice_status_t sluice_handshake_on_end(sluice_comm_t* comm, sluice_status_t ran) {
  static const sluice_agreement_t ending = {"optimizer", "did not end the step", "how an optimizer's step ended"};
  return comm == NULL ? ran : sluice_comm_agree_on_status(comm, &ending, ran);
}

/* ---- creating and opening files ---- */

typedef struct files_record_s {
  sluice_refusal_t refusal;
  sluice_files_t files;
} files_record_t;

static int has_step(const sluice_files_t* files, int64_t step) {
  return step != SLUICE_NO_STEP && (files->step == step || files->other_step == step);
}

static const sluice_files_t* files_of(const sluice_records_t* records, int32_t rank) {
  return &((const files_record_t*)sluice_record_of(records, rank))->files;
}

static sluice_status_t compare_files(const sluice_records_t* records, int64_t* out_step) {
  const sluice_files_t* first = files_of(records, 0);
  const int32_t rank = records->rank;
  int32_t lacks[2] = {0, 0};
  for (int32_t r = 1; r < records->world_size; ++r) {
    const sluice_files_t* files = files_of(records, r);
    if (files->makes != first->makes) {
      return SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, rank, r,
                              "optimizer: rank %d %s, but rank 0 %s: do the same on all ranks", r,
                              files->makes ? "creates a state file" : "opens a state file",
                              first->makes ? "creates a state file" : "opens a state file");
    }
    if (!has_step(files, first->step)) lacks[0] = r;
    if (!has_step(files, first->other_step)) lacks[1] = r;
  }
  const int64_t steps[2] = {lacks[0] == 0 ? first->step : SLUICE_NO_STEP,
                            lacks[1] == 0 ? first->other_step : SLUICE_NO_STEP};
  *out_step = sluice_max(steps[0], steps[1]);
  if (*out_step != SLUICE_NO_STEP) return SLUICE_OK;
  const int32_t r = lacks[0] > lacks[1] ? lacks[0] : lacks[1];
  return SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, rank, r,
                          "optimizer: no step is complete in the files of all ranks: rank %d has %lld and %lld, rank 0 "
                          "has %lld and %lld (-1: none)",
                          r, (long long)files_of(records, r)->step, (long long)files_of(records, r)->other_step,
                          (long long)first->step, (long long)first->other_step);
}

sluice_status_t sluice_handshake_on_files(sluice_comm_t* comm, sluice_status_t status, const sluice_files_t* mine,
                                          int64_t* out_step) {
  static const sluice_agreement_t opening = {"optimizer", "has no state file", "files of an optimizer's states"};
  *out_step = mine->step;
  if (comm == NULL) return status;
  files_record_t record = {.files = *mine};
  sluice_records_t records;
  SLUICE_TRY(sluice_comm_agree(comm, &opening, status, &record, sizeof record, &records));
  const sluice_status_t found = compare_files(&records, out_step);
  sluice_records_free(&records);
  return found;
}
