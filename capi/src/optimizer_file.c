// SPDX-License-Identifier: Apache-2.0
/* The public calls for masters and moments in a file. */
#include <stdatomic.h>

#include "backend/base/alloc.h"
#include "backend/base/log.h"
#include "backend/base/math.h"
#include "backend/base/structs.h"
#include "backend/comm/comm.h"
#include "backend/optim/bucketed/handshake.h"
#include "backend/optim/file/state_file.h"
#include "capi/src/optimizer_groups.h"

struct sluice_optimizer_file_s {
  sluice_state_file_t* states;
  atomic_flag is_busy;
};

/* ---- structs ---- */

SLUICE_DEFINE_INIT(sluice_optimizer_file_config, .step = SLUICE_NO_STEP, .world_size = 1)
SLUICE_DEFINE_INIT(sluice_optimizer_file_info, 0)

/* The copied members are valid after errors too, because the ranks of `comm` must be told of the error. */
static sluice_status_t check_config(const sluice_optimizer_file_config_t* c) {
  SLUICE_TRY(sluice_struct_check_next(c->next, "sluice_optimizer_file_config_t"));
  SLUICE_TRY(SLUICE_REQUIRE(c->path != NULL, "sluice_optimizer_file_config_t: path is NULL"));
  SLUICE_TRY(SLUICE_REQUIRE(c->reserved == 0 && c->reserved2 == 0,
                            "sluice_optimizer_file_config_t: reserved is %d; set it to 0",
                            c->reserved != 0 ? c->reserved : c->reserved2));
  SLUICE_TRY(SLUICE_REQUIRE(c->world_size >= 1 && c->rank >= 0 && c->rank < c->world_size,
                            "sluice_optimizer_file_config_t: rank is %d of %d ranks; give a rank in [0, world_size)",
                            c->rank, c->world_size));
  SLUICE_TRY(
      SLUICE_REQUIRE((c->num_dims == NULL) == (c->dims == NULL),
                     "sluice_optimizer_file_config_t: only one of num_dims and dims is NULL; give both or neither"));
  return SLUICE_REQUIRE(c->step >= SLUICE_NO_STEP, "sluice_optimizer_file_config_t: step is %lld; give a step, or -1",
                        (long long)c->step);
}

static sluice_status_t read_config(const sluice_optimizer_file_config_t* config, sluice_optimizer_file_config_t* c) {
  sluice_optimizer_file_config_init(c, sizeof *c);
  SLUICE_TRY(sluice_struct_copy(c, sizeof *c, config, sizeof *c, "sluice_optimizer_file_config_t"));
  if (c->comm == NULL) return SLUICE_OK;
  c->rank = sluice_comm_rank(c->comm);
  c->world_size = sluice_comm_world_size(c->comm);
  return SLUICE_OK;
}

static sluice_state_place_t place_of(const sluice_optimizer_file_config_t* c) {
  return (sluice_state_place_t){
      .path = c->path, .is_durable = c->durable != 0, .rank = c->rank, .world_size = c->world_size};
}

static sluice_state_shapes_t shapes_of(const sluice_optimizer_file_config_t* c) {
  return (sluice_state_shapes_t){.num_dims = c->num_dims, .dims = c->dims};
}

/* ---- calls of steps ---- */

sluice_status_t sluice_optimizer_file_take(sluice_optimizer_file_t* file, sluice_state_file_t** out_states) {
  SLUICE_TRY(sluice_state_file_check_process(file->states));
  if (atomic_flag_test_and_set(&file->is_busy)) {
    return SLUICE_FAIL(SLUICE_E_BUSY, "optimizer: another thread is in a call with this file");
  }
  *out_states = file->states;
  return SLUICE_OK;
}

void sluice_optimizer_file_release(sluice_optimizer_file_t* file) { atomic_flag_clear(&file->is_busy); }

sluice_status_t sluice_optimizer_file_check(const sluice_state_file_t* states, const sluice_optimizer_work_t* work) {
  return sluice_state_model_compare_tensors(sluice_state_file_model(states), work->groups, work->num_groups,
                                            sluice_state_file_path(states));
}

sluice_status_t sluice_optimizer_file_check_step(const sluice_state_file_t* states,
                                                 const sluice_optimizer_work_t* work) {
  const int64_t next = sluice_state_file_info(states).step + 1;
  SLUICE_TRY(sluice_state_file_check_mixed(states));
  SLUICE_TRY(sluice_optimizer_file_check(states, work));
  for (int64_t g = 0; g < work->num_groups; ++g) {
    for (int64_t t = 0; t < work->groups[g].num_tensors; ++t) {
      const int64_t step = work->groups[g].tensors[t].step;
      SLUICE_TRY(SLUICE_REQUIRE(
          step == next,
          "optimizer: tensor %lld of group %lld is at step %lld, but the next step of the file is %lld; pass that step",
          (long long)t, (long long)g, (long long)step, (long long)next));
    }
  }
  return SLUICE_OK;
}

/* ---- create, open and close ---- */

static sluice_status_t wrap(sluice_state_file_t* states, sluice_optimizer_file_t** out_file) {
  sluice_optimizer_file_t* file = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *file, "optimizer: a file");
  if (file == NULL) return sluice_alloc_status();
  file->states = states;
  atomic_flag_clear(&file->is_busy);
  *out_file = file;
  return SLUICE_OK;
}

static sluice_status_t fill(const sluice_optimizer_file_config_t* c, const sluice_optimizer_group_t* const* groups,
                            int64_t num_groups, sluice_state_file_t** out_states) {
  sluice_allocator_t* allocator = sluice_process_allocator();
  sluice_optimizer_work_t work = {.bytes = 0};
  sluice_state_model_t model = {.words = NULL};
  const sluice_state_place_t place = place_of(c);
  sluice_status_t status = check_config(c);
  if (status == SLUICE_OK)
    status = sluice_optimizer_work_make(groups, num_groups, NULL, SLUICE_TENSORS_TO_STORE, &work);
  if (status == SLUICE_OK)
    status = sluice_state_model_make(work.groups, work.num_groups, shapes_of(c), allocator, &model);
  if (status == SLUICE_OK) status = sluice_state_file_create(&place, &model, c->replaces, allocator, out_states);
  if (status == SLUICE_OK) {
    status = sluice_states_store(*out_states, sluice_max(c->step, 0), work.groups, work.num_groups);
  }
  sluice_state_model_free(&model, allocator);
  sluice_optimizer_work_free(&work);
  return status;
}

/* Creates a file. Until it is published, closing it removes it. */
static sluice_status_t create(const sluice_optimizer_file_config_t* c, const sluice_optimizer_group_t* const* groups,
                              int64_t num_groups, sluice_optimizer_file_t** out_file) {
  sluice_state_file_t* states = NULL;
  sluice_optimizer_file_t* file = NULL;
  sluice_status_t status = fill(c, groups, num_groups, &states);
  if (status == SLUICE_OK) status = wrap(states, &file);
  const sluice_files_t mine = {.makes = 1, .step = sluice_max(c->step, 0), .other_step = SLUICE_NO_STEP};
  int64_t agreed;
  status = sluice_handshake_on_files(c->comm, status, &mine, &agreed);
  if (status == SLUICE_OK) status = sluice_state_file_publish(states);
  if (status == SLUICE_OK) {
    *out_file = file;
    return SLUICE_OK;
  }
  sluice_state_file_close(states);
  if (file != NULL) sluice_free(sluice_process_allocator(), file, sizeof *file);
  return status;
}

sluice_status_t sluice_optimizer_file_create(const sluice_optimizer_file_config_t* config,
                                             const sluice_optimizer_group_t* const* groups, int64_t num_groups,
                                             sluice_optimizer_file_t** out_file) {
  SLUICE_TRY(SLUICE_REQUIRE(out_file != NULL, "sluice_optimizer_file_create: out_file is NULL"));
  *out_file = NULL;
  sluice_optimizer_file_config_t c;
  SLUICE_TRY(read_config(config, &c));
  return create(&c, groups, num_groups, out_file);
}

static sluice_status_t compare_model(const sluice_optimizer_file_config_t* c, const sluice_state_file_t* states) {
  sluice_allocator_t* allocator = sluice_process_allocator();
  sluice_optimizer_work_t work;
  sluice_state_model_t model = {.words = NULL};
  if (c->groups == NULL) return SLUICE_OK;
  sluice_status_t status = sluice_optimizer_work_make(c->groups, c->num_groups, NULL, SLUICE_TENSORS_TO_LOAD, &work);
  if (status == SLUICE_OK)
    status = sluice_state_model_make(work.groups, work.num_groups, shapes_of(c), allocator, &model);
  if (status == SLUICE_OK) {
    status = sluice_state_model_compare(sluice_state_file_model(states), &model, sluice_state_file_path(states));
  }
  sluice_state_model_free(&model, allocator);
  sluice_optimizer_work_free(&work);
  return status;
}

static sluice_status_t open_own(const sluice_optimizer_file_config_t* c, sluice_state_file_t** out_states,
                                sluice_optimizer_file_t** out_file) {
  SLUICE_TRY(check_config(c));
  const sluice_state_place_t place = place_of(c);
  SLUICE_TRY(sluice_state_file_open(&place, c->step, sluice_process_allocator(), out_states));
  SLUICE_TRY(compare_model(c, *out_states));
  return wrap(*out_states, out_file);
}

/* If one rank has ended a step that another has not, brings them to the same step again. */
static sluice_status_t agree_on_step(const sluice_optimizer_file_config_t* c, sluice_status_t opened,
                                     sluice_state_file_t* states) {
  sluice_files_t mine = {.step = SLUICE_NO_STEP, .other_step = SLUICE_NO_STEP};
  if (opened == SLUICE_OK) {
    const sluice_state_file_info_t info = sluice_state_file_info(states);
    mine.step = info.step;
    if (c->step == SLUICE_NO_STEP) mine.other_step = info.other_step;
  }
  int64_t agreed;
  SLUICE_TRY(sluice_handshake_on_files(c->comm, opened, &mine, &agreed));
  if (agreed == mine.step) return SLUICE_OK;
  sluice_log(
      SLUICE_LOG_WARN,
      "optimizer: %s: continues from step %lld, the last step that all ranks have; the file also holds step %lld",
      sluice_state_file_path(states), (long long)agreed, (long long)mine.step);
  return sluice_state_file_go_to(states, agreed);
}

sluice_status_t sluice_optimizer_file_open(const sluice_optimizer_file_config_t* config,
                                           sluice_optimizer_file_t** out_file) {
  SLUICE_TRY(SLUICE_REQUIRE(out_file != NULL, "sluice_optimizer_file_open: out_file is NULL"));
  *out_file = NULL;
  sluice_optimizer_file_config_t c;
  SLUICE_TRY(read_config(config, &c));
  sluice_state_file_t* states = NULL;
  sluice_optimizer_file_t* file = NULL;
  const sluice_status_t opened = open_own(&c, &states, &file);
  const sluice_status_t status = agree_on_step(&c, opened, states);
  if (status == SLUICE_OK) {
    *out_file = file;
    return SLUICE_OK;
  }
  sluice_state_file_close(states);
  if (file != NULL) sluice_free(sluice_process_allocator(), file, sizeof *file);
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
  SLUICE_TRY(sluice_states_load(states, work->groups, work->num_groups));
  if (sluice_optimizer_work_has_params(work)) sluice_state_file_set_mixed(states, 0);
  return SLUICE_OK;
}

sluice_status_t sluice_optimizer_file_load(sluice_optimizer_file_t* file, const sluice_optimizer_group_t* const* groups,
                                           int64_t num_groups) {
  SLUICE_TRY(SLUICE_REQUIRE(file != NULL, "sluice_optimizer_file_load: file is NULL"));
  sluice_state_file_t* states = NULL;
  SLUICE_TRY(sluice_optimizer_file_take(file, &states));
  sluice_optimizer_work_t work;
  sluice_status_t status = sluice_optimizer_work_make(groups, num_groups, NULL, SLUICE_TENSORS_TO_LOAD, &work);
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
