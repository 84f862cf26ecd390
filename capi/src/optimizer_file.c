/* Masters and moments in a file, behind its public calls. */
#include <stdatomic.h>

#include "backend/base/alloc.h"
#include "backend/base/check.h"
#include "backend/base/structs.h"
#include "backend/optim/file/load.h"
#include "capi/src/optimizer_groups.h"

struct sluice_optimizer_file_s {
  sluice_state_file_t* states;
  atomic_flag is_busy;
};

/* ---- structs ---- */

void sluice_optimizer_file_config_init(sluice_optimizer_file_config_t* out_config, size_t struct_size) {
  const sluice_optimizer_file_config_t defaults = {.step = SLUICE_NO_STEP};
  sluice_struct_init(out_config, struct_size, &defaults, sizeof defaults);
}

void sluice_optimizer_file_info_init(sluice_optimizer_file_info_t* out_info, size_t struct_size) {
  sluice_struct_init(out_info, struct_size, NULL, 0);
}

static sluice_status_t read_config(const sluice_optimizer_file_config_t* config, sluice_optimizer_file_config_t* c) {
  sluice_optimizer_file_config_init(c, sizeof *c);
  SLUICE_TRY(sluice_struct_copy(c, sizeof *c, config, sizeof *c, "sluice_optimizer_file_config_t"));
  if (c->next != NULL) return SLUICE_FAIL(SLUICE_E_ABI, "sluice_optimizer_file_config_t: extension of unknown type");
  SLUICE_TRY(SLUICE_REQUIRE(c->path != NULL, "sluice_optimizer_file_config_t: path is NULL"));
  SLUICE_TRY(
      SLUICE_REQUIRE(c->reserved == 0, "sluice_optimizer_file_config_t: reserved is %d; set it to 0", c->reserved));
  return SLUICE_REQUIRE(c->step >= SLUICE_NO_STEP, "sluice_optimizer_file_config_t: step is %lld; give a step, or -1",
                        (long long)c->step);
}

/* ---- what steps ask ---- */

sluice_status_t sluice_optimizer_file_take(sluice_optimizer_file_t* file, sluice_state_file_t** out_states) {
  if (atomic_flag_test_and_set(&file->is_busy)) {
    return SLUICE_FAIL(SLUICE_E_BUSY, "optimizer: another thread is in a call with this file");
  }
  *out_states = file->states;
  return SLUICE_OK;
}

void sluice_optimizer_file_release(sluice_optimizer_file_t* file) { atomic_flag_clear(&file->is_busy); }

sluice_status_t sluice_optimizer_file_check(const sluice_state_file_t* states, const sluice_optimizer_work_t* work) {
  const int64_t count = sluice_state_file_info(states).count;
  return SLUICE_REQUIRE(work->num_elements == count,
                        "optimizer: tensors have %lld elements, and the file %lld; give those that it was made of",
                        (long long)work->num_elements, (long long)count);
}

sluice_status_t sluice_optimizer_file_check_step(const sluice_state_file_t* states,
                                                 const sluice_optimizer_work_t* work) {
  const int64_t next = sluice_state_file_info(states).step + 1;
  SLUICE_TRY(sluice_optimizer_file_check(states, work));
  for (int64_t g = 0; g < work->num_groups; ++g) {
    for (int64_t t = 0; t < work->groups[g].num_tensors; ++t) {
      const int64_t step = work->groups[g].tensors[t].step;
      SLUICE_TRY(SLUICE_REQUIRE(step == next,
                                "optimizer: tensor %lld of group %lld is at step %lld, and the file goes on with step "
                                "%lld",
                                (long long)t, (long long)g, (long long)step, (long long)next));
    }
  }
  return SLUICE_OK;
}

/* ---- life ---- */

/* Takes the states over, whatever happens. */
static sluice_status_t wrap(sluice_state_file_t* states, sluice_optimizer_file_t** out_file) {
  sluice_optimizer_file_t* file = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *file, "optimizer: a file");
  if (file == NULL) return sluice_alloc_status();
  file->states = states;
  atomic_flag_clear(&file->is_busy);
  *out_file = file;
  return SLUICE_OK;
}

static sluice_status_t create(const sluice_optimizer_file_config_t* c, const sluice_optimizer_work_t* work,
                              sluice_optimizer_file_t** out_file) {
  sluice_state_file_t* states;
  SLUICE_TRY(
      sluice_state_file_create(c->path, work->num_elements, c->durable != 0, sluice_process_allocator(), &states));
  const int64_t step = c->step == SLUICE_NO_STEP ? 0 : c->step;
  sluice_status_t status = sluice_states_store(states, step, work->groups, work->num_groups);
  if (status == SLUICE_OK) status = wrap(states, out_file);
  if (status != SLUICE_OK) sluice_state_file_remove(states);
  return status;
}

sluice_status_t sluice_optimizer_file_create(const sluice_optimizer_file_config_t* config,
                                             const sluice_optimizer_group_t* const* groups, int64_t num_groups,
                                             sluice_optimizer_file_t** out_file) {
  SLUICE_TRY(SLUICE_REQUIRE(out_file != NULL, "sluice_optimizer_file_create: out_file is NULL"));
  *out_file = NULL;
  sluice_optimizer_file_config_t c;
  SLUICE_TRY(read_config(config, &c));
  sluice_optimizer_work_t work;
  sluice_status_t status = sluice_optimizer_work_make(groups, num_groups, NULL, SLUICE_TENSORS_TO_COPY, &work);
  if (status == SLUICE_OK) status = create(&c, &work, out_file);
  sluice_optimizer_work_free(&work);
  return status;
}

sluice_status_t sluice_optimizer_file_open(const sluice_optimizer_file_config_t* config,
                                           sluice_optimizer_file_t** out_file) {
  SLUICE_TRY(SLUICE_REQUIRE(out_file != NULL, "sluice_optimizer_file_open: out_file is NULL"));
  *out_file = NULL;
  sluice_optimizer_file_config_t c;
  SLUICE_TRY(read_config(config, &c));
  sluice_state_file_t* states;
  SLUICE_TRY(sluice_state_file_open(c.path, c.step, c.durable != 0, sluice_process_allocator(), &states));
  const sluice_status_t status = wrap(states, out_file);
  if (status != SLUICE_OK) sluice_state_file_close(states);
  return status;
}

void sluice_optimizer_file_close(sluice_optimizer_file_t* file) {
  if (file == NULL) return;
  sluice_state_file_close(file->states);
  sluice_free(sluice_process_allocator(), file, sizeof *file);
}

/* ---- reading ---- */

static sluice_status_t load(sluice_state_file_t* states, const sluice_optimizer_work_t* work) {
  SLUICE_TRY(sluice_optimizer_file_check(states, work));
  return sluice_states_load(states, work->groups, work->num_groups);
}

sluice_status_t sluice_optimizer_file_load(sluice_optimizer_file_t* file, const sluice_optimizer_group_t* const* groups,
                                           int64_t num_groups) {
  SLUICE_TRY(SLUICE_REQUIRE(file != NULL, "sluice_optimizer_file_load: file is NULL"));
  sluice_state_file_t* states = NULL;
  SLUICE_TRY(sluice_optimizer_file_take(file, &states));
  sluice_optimizer_work_t work;
  sluice_status_t status = sluice_optimizer_work_make(groups, num_groups, NULL, SLUICE_TENSORS_TO_COPY, &work);
  if (status == SLUICE_OK) status = load(states, &work);
  sluice_optimizer_work_free(&work);
  sluice_optimizer_file_release(file);
  return status;
}

sluice_status_t sluice_optimizer_file_info(sluice_optimizer_file_t* file, sluice_optimizer_file_info_t* out_info) {
  SLUICE_TRY(SLUICE_REQUIRE(file != NULL && out_info != NULL, "sluice_optimizer_file_info: %s is NULL",
                            file == NULL ? "file" : "out_info"));
  SLUICE_TRY(sluice_struct_check_size(out_info, "sluice_optimizer_file_info_t"));
  sluice_state_file_t* states = NULL;
  SLUICE_TRY(sluice_optimizer_file_take(file, &states));
  const sluice_state_file_info_t found = sluice_state_file_info(states);
  sluice_optimizer_file_release(file);
  const sluice_optimizer_file_info_t info = {.struct_size = out_info->struct_size,
                                             .count = found.count,
                                             .step = found.step,
                                             .other_step = found.other_step,
                                             .unfinished_step = found.unfinished_step,
                                             .bytes = found.bytes};
  sluice_struct_give(out_info, &info, sizeof info);
  return SLUICE_OK;
}
