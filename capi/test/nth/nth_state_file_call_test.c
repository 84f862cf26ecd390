// SPDX-License-Identifier: Apache-2.0
/* An optimizer keeps its states in a file while each file call and each allocation fails in turn. Parameters belong to
 * a whole step, the file opens at this step or does not exist, no descriptor stays open, and the next attempt works. */
#include <unistd.h>

#include "capi/test/nth/failing_calls.h"
#include "sluice/optimizer.h"
#include "third_party/bazel/test.h"

enum { COUNT = 70, BUCKET = 32, STEPS = 2 };

static char folder[] = "/tmp/sluice_states_XXXXXX", path[64];
static float wanted[STEPS + 1][COUNT]; /* parameters after each step */

typedef struct model_s {
  float param[COUNT], grad[COUNT];
  sluice_optimizer_tensor_t tensor;
  sluice_optimizer_group_t group;
  const sluice_optimizer_group_t* list[1];
} model_t;

static void prepare(model_t* m) {
  *m = (model_t){.tensor = {.count = COUNT, .param_dtype = SLUICE_DTYPE_F32, .grad_dtype = SLUICE_DTYPE_F32}};
  for (int i = 0; i < COUNT; ++i) m->param[i] = (float)i, m->grad[i] = 0.01F * (float)(i - 30);
  m->tensor.param = m->param, m->tensor.grad = m->grad;
  sluice_optimizer_group_init(&m->group, sizeof m->group);
  m->group.tensors = &m->tensor, m->group.num_tensors = 1;
  m->list[0] = &m->group;
}

static sluice_optimizer_file_config_t config_of(void) {
  DEFAULTS(sluice_optimizer_file_config, config);
  config.path = path, config.durable = 1;
  return config;
}

static sluice_status_t step(sluice_optimizer_t* optimizer, model_t* m, sluice_optimizer_file_t* file, int number) {
  DEFAULTS(sluice_optimizer_step_args, args);
  args.groups = m->list, args.num_groups = 1, args.bucket = BUCKET, args.file = file;
  m->tensor.step = number;
  return sluice_optimizer_step(optimizer, &args, NULL);
}

/* Creates a file and takes a step, then opens the file and takes another step. Returns the number of steps taken, or -1
 * if there is no file. */
static int make_steps(sluice_optimizer_t* optimizer, model_t* m) {
  const sluice_optimizer_file_config_t config = config_of();
  sluice_optimizer_file_t* file = NULL;
  if (sluice_optimizer_file_create(&config, m->list, 1, &file) != SLUICE_OK) return -1;
  if (step(optimizer, m, file, 1) != SLUICE_OK) {
    sluice_optimizer_file_close(file);
    return 0;
  }
  sluice_optimizer_file_close(file);
  if (sluice_optimizer_file_open(&config, &file) != SLUICE_OK) return 1;
  const int steps =
      sluice_optimizer_file_load(file, m->list, 1) == SLUICE_OK && step(optimizer, m, file, 2) == SLUICE_OK;
  sluice_optimizer_file_close(file);
  return 1 + steps;
}

/* out: the number of steps taken, or -2 if the parameters are not those after this number of steps. */
static void run(void* out) {
  model_t m;
  DEFAULTS(sluice_optimizer_config, config);
  sluice_optimizer_t* optimizer = NULL;
  prepare(&m);
  int steps = -1;
  if (sluice_optimizer_create(&config, &optimizer) == SLUICE_OK) steps = make_steps(optimizer, &m);
  sluice_optimizer_destroy(optimizer);
  *(int*)out = memcmp(m.param, wanted[steps < 0 ? 0 : steps], sizeof m.param) == 0 ? steps : -2;
}

static void check(const call_place_t* place, int64_t nth, int steps, int32_t num_descriptors) {
  const sluice_optimizer_file_config_t config = config_of();
  sluice_optimizer_file_t* file = NULL;
  model_t m;
  prepare(&m);
  const int is_there = access(path, F_OK) == 0;
  int64_t found = -1;
  if (is_there && sluice_optimizer_file_open(&config, &file) == SLUICE_OK &&
      sluice_optimizer_file_load(file, m.list, 1) == SLUICE_OK) {
    DEFAULTS(sluice_optimizer_file_info, info);
    if (sluice_optimizer_file_info(file, &info) == SLUICE_OK) found = info.step;
  }
  sluice_optimizer_file_close(file);
  const int is_as_told = steps >= -1 && found == steps && is_there == (steps >= 0);
  if (is_as_told && (found < 0 || memcmp(m.param, wanted[found], sizeof m.param) == 0) &&
      calls_count_entries("/proc/self/fd") == num_descriptors) {
    return;
  }
  fail_msg("%s at 0x%lx, hit %lld fails: %d steps told, the file there %d at step %lld, descriptors %d of %d",
           place->name, (unsigned long)place->address, (long long)nth, steps, is_there, (long long)found,
           calls_count_entries("/proc/self/fd"), num_descriptors);
}

static int32_t attempt(const call_place_t* place, int64_t nth, int32_t num_descriptors) {
  if (place != NULL && strcmp(place->name, "close") == 0) return 0; /* a close that fails still closes the descriptor */
  int steps = 0, next = 0;
  const int32_t has_failed = calls_run(run, &steps, place, nth);
  /* If no call failed (because only an earlier failure leads to this call), all steps must be taken. */
  if (!has_failed) assert_int_equal(steps, STEPS);
  if (place != NULL) check(place, nth, steps, num_descriptors);
  (void)unlink(path);
  run(&next);
  assert_int_equal(next, STEPS);
  (void)unlink(path);
  return has_failed;
}

static int set_up(void** state) {
  (void)state;
  model_t m;
  sluice_optimizer_t* optimizer = NULL;
  DEFAULTS(sluice_optimizer_config, config);
  float moments[2][COUNT] = {{0}};
  if (mkdtemp(folder) == NULL) return 1;
  (void)snprintf(path, sizeof path, "%s/states", folder);
  prepare(&m);
  m.tensor.exp_avg = moments[0], m.tensor.exp_avg_sq = moments[1];
  if (sluice_optimizer_create(&config, &optimizer) != SLUICE_OK) return 1;
  for (int number = 0; number <= STEPS; ++number) {
    if (number > 0 && step(optimizer, &m, NULL, number) != SLUICE_OK) return 1;
    memcpy(wanted[number], m.param, sizeof m.param);
  }
  sluice_optimizer_destroy(optimizer);
  return 0;
}

static int tear_down(void** state) {
  (void)state;
  return rmdir(folder);
}

TEST(States_NthCallFails_AreThoseOfAWholeStep) { calls_fail_each(attempt, 16, 61); }

int main(void) { return run_cases(set_up, tear_down); }
