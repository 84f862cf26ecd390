#include "backend/optim/bucketed/handshake.h"

#include <float.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/check.h"
#include "backend/base/clock.h"
#include "backend/base/hash.h"
#include "backend/base/math.h"

#define PROTOCOL 1

/* ---- what a step opens with ---- */

enum {
  FIELD_PROTOCOL = 0,
  FIELD_LINES,
  FIELD_OWN_LINES,
  FIELD_ELEMENTS,
  FIELD_TENSORS,
  FIELD_RULES,
  FIELD_BUCKET,
  FIELD_CHUNK,
  FIELD_LOSS_SCALE,
  FIELD_MAX_NORM,
  FIELD_LOOKS,
  FIELD_FILE,
  NUM_FIELDS
};

static const char* const field_names[NUM_FIELDS] = {
    "the protocol of steps",
    "the number of lines of groups (those that are summed over the same ranks)",
    "which groups have a communicator of their own (as a checksum)",
    "the number of elements",
    "counts, dtypes or step numbers of tensors (as a checksum)",
    "lr, betas, epsilon, weight decay or flags of groups (as a checksum)",
    "bucket",
    "sum_buckets",
    "loss_scale (its bits)",
    "max_norm (its bits)",
    "check_finite",
    "whether states lie in a file",
};

typedef struct opening_s {
  int32_t status;
  float largest;
  int64_t proposal;
  int64_t fields[NUM_FIELDS];
  char refusal[256];
} opening_t;

static int64_t bits_of(double x) {
  int64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static uint64_t hash_tensor(uint64_t hash, const sluice_adam_tensor_t* tensor) {
  const int64_t said[] = {tensor->count, tensor->step, tensor->grad_dtype};
  return sluice_hash_bytes(hash, said, sizeof said);
}

/* Of the tensors of one line: those that lie in it. */
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
  const int64_t fields[NUM_FIELDS] = {
      [FIELD_PROTOCOL] = PROTOCOL,
      [FIELD_LINES] = lines->num_lines,
      [FIELD_OWN_LINES] = (int64_t)own,
      [FIELD_ELEMENTS] = elements,
      [FIELD_TENSORS] = (int64_t)tensors,
      [FIELD_RULES] = (int64_t)hash_rules(&step->adam),
      [FIELD_BUCKET] = step->bucket,
      [FIELD_CHUNK] = step->chunk,
      [FIELD_LOSS_SCALE] = bits_of(step->adam.loss_scale),
      [FIELD_MAX_NORM] = bits_of(step->adam.max_norm),
      [FIELD_LOOKS] = step->adam.looks_first != 0,
      [FIELD_FILE] = step->file != NULL,
  };
  memcpy(mine->fields, fields, sizeof fields);
}

static void say(opening_t* mine, const sluice_bucketed_step_t* step, const sluice_lines_t* lines,
                const sluice_agreed_t* known) {
  mine->status = step->refused;
  mine->largest = known->largest;
  mine->proposal = known->proposal;
  if (step->refused == SLUICE_OK) {
    fill(mine, step, lines);
    return;
  }
  sluice_error_info_t why;
  sluice_error_capture(&why);
  (void)snprintf(mine->refusal, sizeof mine->refusal, "%.*s", (int)sizeof mine->refusal - 1, why.message);
}

static sluice_status_t check_refusals(const opening_t* records, int32_t w, int32_t rank) {
  for (int32_t r = 0; r < w; ++r) {
    if (records[r].status == SLUICE_OK) continue;
    return SLUICE_FAIL_PEER(SLUICE_E_PEER_REFUSED, rank, r, "optimizer: rank %d took no step: %s: %.255s", r,
                            sluice_status_name(records[r].status), records[r].refusal);
  }
  return SLUICE_OK;
}

static sluice_status_t check_fields(const opening_t* records, int32_t w, int32_t rank) {
  for (int32_t field = 0; field < NUM_FIELDS; ++field) {
    for (int32_t r = 1; r < w; ++r) {
      if (records[r].fields[field] == records[0].fields[field]) continue;
      return SLUICE_FAIL_PEER(
          SLUICE_E_MISMATCH, rank, r, "optimizer: %s: %lld on rank %d and %lld on rank 0; give all ranks the same",
          field_names[field], (long long)records[r].fields[field], r, (long long)records[0].fields[field]);
    }
  }
  return SLUICE_OK;
}

static sluice_status_t open_step(const sluice_bucketed_step_t* step, const sluice_lines_t* lines,
                                 const sluice_agreed_t* mine, sluice_agreed_t* out_agreed) {
  const int32_t w = sluice_comm_world_size(step->comm), rank = sluice_comm_rank(step->comm);
  sluice_error_info_t own;
  sluice_error_capture(&own);
  opening_t* records = sluice_comm_take_records(step->comm, sizeof *records, "optimizer: an exchange");
  if (records == NULL) return sluice_alloc_status();
  say(records + rank, step, lines, mine);
  const uint64_t begin_ns = sluice_now_ns();
  sluice_status_t status =
      sluice_comm_all_gather(step->comm, records, sizeof *records, "the ranks of an optimizer's step");
  out_agreed->latency_ns = sluice_now_ns() - begin_ns;
  if (status == SLUICE_OK && step->refused != SLUICE_OK) status = sluice_error_adopt(&own);
  if (status == SLUICE_OK) status = check_refusals(records, w, rank);
  if (status == SLUICE_OK) status = check_fields(records, w, rank);
  out_agreed->proposal = records[0].proposal;
  out_agreed->largest = 0.0F;
  for (int32_t r = 0; r < w; ++r) {
    out_agreed->largest = records[r].largest > out_agreed->largest ? records[r].largest : out_agreed->largest;
  }
  sluice_comm_free_records(step->comm, records, sizeof *records);
  return status;
}

/* ---- lines that a part of the ranks sums ---- */

static sluice_status_t compare_line(const sluice_lines_t* lines, int32_t line) {
  sluice_comm_t* comm = lines->comms[line];
  uint64_t* records = sluice_comm_take_records(comm, sizeof *records, "optimizer: an exchange");
  if (records == NULL) return sluice_alloc_status();
  const int32_t w = sluice_comm_world_size(comm), rank = sluice_comm_rank(comm);
  records[rank] = hash_line(SLUICE_HASH_OF_NOTHING, lines, line);
  sluice_status_t status = sluice_comm_all_gather(comm, records, sizeof *records, "the ranks of a group of parameters");
  for (int32_t r = 1; r < w && status == SLUICE_OK; ++r) {
    if (records[r] == records[0]) continue;
    status = SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, rank, r,
                              "optimizer: counts, dtypes or step numbers of line %d of groups differ on ranks %d and 0 "
                              "of its communicator; give all of them the same",
                              line, r);
  }
  sluice_comm_free_records(comm, records, sizeof *records);
  return status;
}

/* All of them even where one differs, so that every rank takes part in every exchange. */
static sluice_status_t compare_own_lines(const sluice_bucketed_step_t* step, const sluice_lines_t* lines) {
  sluice_status_t status = SLUICE_OK;
  sluice_error_info_t why;
  for (int32_t line = 0; line < lines->num_lines; ++line) {
    if (lines->comms[line] == step->comm) continue;
    const sluice_status_t of_line = compare_line(lines, line);
    if (status != SLUICE_OK || of_line == SLUICE_OK) continue;
    status = of_line;
    sluice_error_capture(&why);
  }
  return status == SLUICE_OK ? SLUICE_OK : sluice_error_adopt(&why);
}

static int has_own_lines(const sluice_bucketed_step_t* step, const sluice_lines_t* lines) {
  for (int32_t line = 0; line < lines->num_lines; ++line) {
    if (lines->comms[line] != step->comm) return 1;
  }
  return 0;
}

sluice_status_t sluice_step_handshake(const sluice_bucketed_step_t* step, const sluice_lines_t* lines,
                                      const sluice_agreed_t* mine, sluice_agreed_t* out_agreed) {
  *out_agreed = *mine;
  if (step->comm == NULL) return step->refused;
  SLUICE_TRY(open_step(step, lines, mine, out_agreed));
  if (!has_own_lines(step, lines)) return SLUICE_OK;
  sluice_bucketed_step_t compared = *step;
  compared.refused = compare_own_lines(step, lines);
  sluice_agreed_t ignored;
  return open_step(&compared, lines, mine, &ignored);
}

/* ---- sums ---- */

/* Half of what the exact sum allows: partial sums are rounded up now and then. */
float sluice_largest_safe_gradient(const sluice_lines_t* lines) {
  int32_t w = 1;
  for (int32_t i = 0; i < lines->num_lines; ++i) {
    if (lines->comms[i] != NULL) w = (int32_t)sluice_max(w, sluice_comm_world_size(lines->comms[i]));
  }
  return w == 1 ? FLT_MAX : FLT_MAX / 2.0F / (float)w;
}

sluice_status_t sluice_handshake_on_sums(sluice_comm_t* comm, const sluice_found_t* mine, sluice_found_t* out_found) {
  *out_found = *mine;
  if (comm == NULL) return SLUICE_OK;
  sluice_found_t* records = sluice_comm_take_records(comm, sizeof *records, "optimizer: an exchange");
  if (records == NULL) return sluice_alloc_status();
  records[sluice_comm_rank(comm)] = *mine;
  const sluice_status_t status =
      sluice_comm_all_gather(comm, records, sizeof *records, "what is in the sums of gradients");
  out_found->squares = 0.0;
  for (int32_t r = 0; r < sluice_comm_world_size(comm); ++r) {
    out_found->squares += records[r].squares;
    out_found->largest = records[r].largest > out_found->largest ? records[r].largest : out_found->largest;
  }
  sluice_comm_free_records(comm, records, sizeof *records);
  return status;
}

/* ---- the end of a step whose states lie in files ---- */

typedef struct ending_s {
  int32_t status;
  char message[252];
} ending_t;

sluice_status_t sluice_handshake_on_end(sluice_comm_t* comm, sluice_status_t ran) {
  if (comm == NULL) return ran;
  sluice_error_info_t own;
  sluice_error_capture(&own);
  ending_t* records = sluice_comm_take_records(comm, sizeof *records, "optimizer: an exchange");
  if (records == NULL) return ran != SLUICE_OK ? ran : sluice_alloc_status();
  const int32_t w = sluice_comm_world_size(comm), rank = sluice_comm_rank(comm);
  records[rank].status = ran;
  if (ran != SLUICE_OK) {
    (void)snprintf(records[rank].message, sizeof records->message, "%.*s", (int)sizeof records->message - 1,
                   own.message);
  }
  sluice_status_t status = sluice_comm_all_gather(comm, records, sizeof *records, "how an optimizer's step ended");
  if (ran != SLUICE_OK) status = sluice_error_adopt(&own);
  for (int32_t r = 0; r < w && status == SLUICE_OK; ++r) {
    if (records[r].status == SLUICE_OK) continue;
    status = SLUICE_FAIL_PEER(SLUICE_E_PEER_REFUSED, rank, r, "optimizer: rank %d did not end the step: %s: %.251s", r,
                              sluice_status_name(records[r].status), records[r].message);
  }
  sluice_comm_free_records(comm, records, sizeof *records);
  return status;
}

/* ---- files that are made and opened ---- */

typedef struct files_record_s {
  int32_t status;
  sluice_files_t files;
  char message[224];
} files_record_t;

static int has_step(const sluice_files_t* files, int64_t step) {
  return step != SLUICE_NO_STEP && (files->step == step || files->other_step == step);
}

static sluice_status_t compare_files(const files_record_t* records, int32_t w, int32_t rank, int64_t* out_step) {
  const sluice_files_t* first = &records[0].files;
  int32_t lacks[2] = {0, 0};
  for (int32_t r = 0; r < w; ++r) {
    if (records[r].status == SLUICE_OK) continue;
    return SLUICE_FAIL_PEER(SLUICE_E_PEER_REFUSED, rank, r, "optimizer: rank %d has no file of states: %s: %.223s", r,
                            sluice_status_name(records[r].status), records[r].message);
  }
  for (int32_t r = 1; r < w; ++r) {
    const sluice_files_t* files = &records[r].files;
    if (files->makes != first->makes) {
      return SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, rank, r,
                              "optimizer: rank %d %s, and rank 0 %s: give all ranks their files, or none", r,
                              files->makes ? "makes a new file" : "goes on with one",
                              first->makes ? "makes a new one" : "goes on with one");
    }
    if (!has_step(files, first->step)) lacks[0] = r;
    if (!has_step(files, first->other_step)) lacks[1] = r;
  }
  const int64_t steps[2] = {lacks[0] == 0 ? first->step : SLUICE_NO_STEP,
                            lacks[1] == 0 ? first->other_step : SLUICE_NO_STEP};
  *out_step = sluice_max(steps[0], steps[1]);
  if (*out_step != SLUICE_NO_STEP) return SLUICE_OK;
  const int32_t r = lacks[0] > lacks[1] ? lacks[0] : lacks[1];
  return SLUICE_FAIL_PEER(
      SLUICE_E_MISMATCH, rank, r,
      "optimizer: no step is whole in the files of all ranks: rank %d has %lld and %lld, rank 0 has "
      "%lld and %lld (-1: none)",
      r, (long long)records[r].files.step, (long long)records[r].files.other_step, (long long)first->step,
      (long long)first->other_step);
}

sluice_status_t sluice_handshake_on_files(sluice_comm_t* comm, sluice_status_t status, const sluice_files_t* mine,
                                          int64_t* out_step) {
  *out_step = mine->step;
  if (comm == NULL) return status;
  sluice_error_info_t own;
  sluice_error_capture(&own);
  files_record_t* records = sluice_comm_take_records(comm, sizeof *records, "optimizer: an exchange");
  if (records == NULL) return status != SLUICE_OK ? status : sluice_alloc_status();
  const int32_t w = sluice_comm_world_size(comm), rank = sluice_comm_rank(comm);
  records[rank].status = status;
  records[rank].files = *mine;
  if (status != SLUICE_OK) {
    (void)snprintf(records[rank].message, sizeof records->message, "%.*s", (int)sizeof records->message - 1,
                   own.message);
  }
  const sluice_status_t exchanged =
      sluice_comm_all_gather(comm, records, sizeof *records, "files of an optimizer's states");
  sluice_status_t found = status != SLUICE_OK ? sluice_error_adopt(&own) : exchanged;
  if (found == SLUICE_OK) found = compare_files(records, w, rank, out_step);
  sluice_comm_free_records(comm, records, sizeof *records);
  return found;
}
