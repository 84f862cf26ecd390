// SPDX-License-Identifier: Apache-2.0
/* A calibration is cached, an optimizer keeps its states in a file, and layers are swapped to a file, while each file
 * call and each allocation fails in turn. A file is complete or does not exist, results are those of whole steps or a
 * call reports the failure, no descriptor stays open, no other file remains, and the next attempt works. */
#include <pthread.h>
#include <unistd.h>

#include "backend/calibrate/cache.h"
#include "capi/test/nth/failing_calls.h"
#include "sluice/optimizer.h"
#include "sluice/swap.h"
#include "third_party/bazel/test.h"

static char folder[] = "/tmp/sluice_nth_XXXXXX", inner[64], path[96], plain[64];

/* A close that fails still closes the descriptor. */
static int is_close(const call_place_t* place) { return place != NULL && strcmp(place->name, "close") == 0; }

typedef struct run_s {
  void (*run)(void* user);
  void* user;
  const call_place_t* place;
  int64_t nth;
  int32_t has_failed;
} run_t;

static void* run_main(void* argument) {
  run_t* r = argument;
  if (r->place == NULL) calls_count();
  if (r->place != NULL) calls_fail(r->place, r->nth);
  r->run(r->user);
  r->has_failed = calls_end();
  return NULL;
}

/* Calls `run` on a new thread, so that the call stacks of allocations begin the same. place NULL: no call fails.
 * Returns whether the planned failure has occurred. */
static int32_t calls_run(void (*run)(void* user), void* user, const call_place_t* place, int64_t nth) {
  pthread_t thread;
  run_t r = {run, user, place, nth, 0};
  if (pthread_create(&thread, NULL, run_main, &r) != 0) abort();
  pthread_join(thread, NULL);
  return r.has_failed;
}

/* Calls `attempt` without a failure, then once for each hit of each place that this call has found. `attempt` returns
 * whether the planned failure has occurred; num_descriptors were open before. Fails the test if there are fewer than
 * `fewest` places, or if fewer than `fewest_failures` have occurred. */
static void calls_fail_each(int32_t (*attempt)(const call_place_t* place, int64_t nth, int32_t num_descriptors),
                            int32_t fewest, int32_t fewest_failures) {
  const int32_t num_descriptors = calls_count_entries("/proc/self/fd");
  int32_t num_failed = 0, count = 0;
  calls_forget();
  attempt(NULL, 0, num_descriptors);
  const call_place_t* places = calls_places(&count); /* a failure may lead to calls that other runs do not make */
  assert_in_range(count, fewest, 128);
  for (int32_t p = 0; p < count; ++p) {
    const call_place_t place = places[p];
    for (int64_t nth = 0; nth < place.num_hits; ++nth) num_failed += attempt(&place, nth, num_descriptors) != 0;
  }
  assert_in_range(num_failed, fewest_failures, 100000);
  print_message("%d places, %d calls have failed\n", count, num_failed);
}

/* ---- a calibration ---- */

static sluice_machine_t machine;

static void clean(void) {
  unlink(path);
  rmdir(inner);
}

/* Writes and reads, like two consecutive processes. Bits of the outcome: 1 written, 2 read. */
static void write_and_read(void* outcome) {
  sluice_machine_t read;
  *(int*)outcome = sluice_cache_write(path, "a key", &machine);
  *(int*)outcome |= sluice_cache_read(path, "a key", 0, &read) << 1;
}

static void check_cache(const call_place_t* place, int64_t nth, int outcome, int32_t num_descriptors) {
  sluice_machine_t read;
  const int is_there = access(path, F_OK) == 0;
  const int is_whole = is_there && sluice_cache_read(path, "a key", 0, &read) && read.op_seconds == machine.op_seconds;
  const int32_t others = calls_count_entries(inner) > 0 ? calls_count_entries(inner) - 2 - is_there : 0;
  if (is_there == is_whole && is_there == (outcome & 1) && others == 0 &&
      calls_count_entries("/proc/self/fd") == num_descriptors) {
    return;
  }
  fail_msg("%s at 0x%lx, hit %lld fails: written %d, there %d, whole %d, other files %d, descriptors %d of %d",
           place->name, (unsigned long)place->address, (long long)nth, outcome & 1, is_there, is_whole, others,
           calls_count_entries("/proc/self/fd"), num_descriptors);
}

/* place NULL: no call fails. */
static int32_t attempt_cache(const call_place_t* place, int64_t nth, int32_t num_descriptors) {
  int outcome = 0, next = 0;
  assert_int_equal(calls_run(write_and_read, &outcome, place, nth), place != NULL);
  if (place == NULL) assert_int_equal(outcome, 3);
  if (place != NULL) check_cache(place, nth, outcome, num_descriptors);
  write_and_read(&next);
  assert_int_equal(next, 3);
  clean();
  return place != NULL;
}

TEST(Cache_NthCallFails_IsWholeOrNotThere) { calls_fail_each(attempt_cache, 8, 8); }

/* ---- states of an optimizer ---- */

enum { COUNT = 70, BUCKET = 32, STEPS = 2 };

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
  config.path = plain, config.durable = 1;
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
static void run_steps(void* out) {
  model_t m;
  DEFAULTS(sluice_optimizer_config, config);
  sluice_optimizer_t* optimizer = NULL;
  prepare(&m);
  int steps = -1;
  if (sluice_optimizer_create(&config, &optimizer) == SLUICE_OK) steps = make_steps(optimizer, &m);
  sluice_optimizer_destroy(optimizer);
  *(int*)out = memcmp(m.param, wanted[steps < 0 ? 0 : steps], sizeof m.param) == 0 ? steps : -2;
}

static void check_states(const call_place_t* place, int64_t nth, int steps, int32_t num_descriptors) {
  const sluice_optimizer_file_config_t config = config_of();
  sluice_optimizer_file_t* file = NULL;
  model_t m;
  prepare(&m);
  const int is_there = access(plain, F_OK) == 0;
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

static int32_t attempt_states(const call_place_t* place, int64_t nth, int32_t num_descriptors) {
  if (is_close(place)) return 0;
  int steps = 0, next = 0;
  const int32_t has_failed = calls_run(run_steps, &steps, place, nth);
  /* If no call failed (because only an earlier failure leads to this call), all steps must be taken. */
  if (!has_failed) assert_int_equal(steps, STEPS);
  if (place != NULL) check_states(place, nth, steps, num_descriptors);
  (void)unlink(plain);
  run_steps(&next);
  assert_int_equal(next, STEPS);
  (void)unlink(plain);
  return has_failed;
}

/* Without a file, and without failures. */
static int find_wanted(void) {
  model_t m;
  sluice_optimizer_t* optimizer = NULL;
  DEFAULTS(sluice_optimizer_config, config);
  float moments[2][COUNT] = {{0}};
  prepare(&m);
  m.tensor.exp_avg = moments[0], m.tensor.exp_avg_sq = moments[1];
  if (sluice_optimizer_create(&config, &optimizer) != SLUICE_OK) return 0;
  for (int number = 0; number <= STEPS; ++number) {
    if (number > 0 && step(optimizer, &m, NULL, number) != SLUICE_OK) return 0;
    memcpy(wanted[number], m.param, sizeof m.param);
  }
  sluice_optimizer_destroy(optimizer);
  return 1;
}

TEST(States_NthCallFails_AreThoseOfAWholeStep) {
  assert_true(find_wanted());
  calls_fail_each(attempt_states, 16, 61);
}

/* ---- a swap ---- */

enum { LAYERS = 10, BYTES = 5000 };

typedef struct host_s {
  sluice_swap_t* swap;
  char data[LAYERS][BYTES];
  int64_t tickets[LAYERS];
} host_t;

static sluice_status_t run_op(host_t* h, const sluice_swap_op_t* op) {
  char* data = h->data[op->layer];
  int64_t* ticket = &h->tickets[op->layer];
  switch (op->kind) {
    case SLUICE_SWAP_OP_PUT: return sluice_swap_put(h->swap, data, BYTES, ticket);
    case SLUICE_SWAP_OP_SETTLE: {
      const sluice_status_t status = sluice_swap_settle(h->swap, *ticket);
      memset(data, 0, BYTES);
      return status;
    }
    case SLUICE_SWAP_OP_PREFETCH: return sluice_swap_prefetch(h->swap, *ticket, data);
    case SLUICE_SWAP_OP_TAKE: return sluice_swap_take(h->swap, *ticket);
    default: sluice_swap_release(h->swap, *ticket); return SLUICE_OK;
  }
}

static sluice_status_t reach(host_t* h, int32_t event, int32_t layer) {
  sluice_swap_op_t ops[LAYERS + 1];
  int32_t count = 0;
  sluice_status_t status = sluice_swap_reach(h->swap, event, 0, layer, ops, LAYERS + 1, &count);
  for (int32_t i = 0; i < count && status == SLUICE_OK; ++i) status = run_op(h, ops + i);
  return status;
}

/* Returns 1 if a forward and backward ran, 0 if a call failed, -1 if bytes are wrong. */
static int run_batch(host_t* h) {
  sluice_status_t status = SLUICE_OK;
  int is_right = 1;
  for (int32_t layer = 0; layer < LAYERS && status == SLUICE_OK; ++layer) {
    memset(h->data[layer], 'a' + layer, BYTES);
    status = reach(h, SLUICE_SWAP_FORWARD_ENDS, layer);
  }
  for (int32_t layer = LAYERS; layer-- > 0 && status == SLUICE_OK;) {
    status = reach(h, SLUICE_SWAP_BACKWARD_BEGINS, layer);
    for (int32_t at = 0; at < BYTES && status == SLUICE_OK; ++at) is_right &= h->data[layer][at] == 'a' + layer;
  }
  if (status == SLUICE_OK) status = reach(h, SLUICE_SWAP_BACKWARD_ENDS, 0);
  if (!is_right) return -1;
  return status == SLUICE_OK;
}

typedef struct outcome_s {
  host_t host;
  int ran; /* result of run_batch */
} outcome_t;

static void run_swap(void* user) {
  static const int32_t swapped[LAYERS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  outcome_t* out = user;
  DEFAULTS(sluice_swap_config, config);
  config.swapped = swapped, config.num_layers = LAYERS, config.path = plain, config.budget_bytes = LAYERS * BYTES;
  if (sluice_swap_create(&config, &out->host.swap) == SLUICE_OK) out->ran = run_batch(&out->host);
}

static int32_t attempt_swap(const call_place_t* place, int64_t nth, int32_t num_descriptors) {
  if (is_close(place)) return 0;
  outcome_t* out = calloc(1, sizeof *out);
  assert_non_null(out);
  const int32_t has_failed = calls_run(run_swap, out, place, nth);
  const int is_made = out->host.swap != NULL, ran = out->ran;
  sluice_swap_reset(out->host.swap);
  const int ran_again = is_made ? run_batch(&out->host) : 1;
  sluice_swap_destroy(out->host.swap);
  free(out);
  if (unlink(plain) == 0 && (place == NULL || strcmp(place->name, "unlink") != 0)) fail_msg("the file is still there");
  const int32_t now = calls_count_entries("/proc/self/fd");
  if (ran == !has_failed && (is_made || has_failed) && ran_again == 1 && now == num_descriptors) return has_failed;
  fail_msg("%s, hit %lld fails (%d): made %d, ran %d, then %d; descriptors %d of %d", place ? place->name : "none",
           (long long)nth, has_failed, is_made, ran, ran_again, now, num_descriptors);
  return has_failed;
}

TEST(Swap_NthCallFails_SaysSoAndTheNextBatchWorks) { calls_fail_each(attempt_swap, 8, 31); }

static int set_up(void** state) {
  (void)state;
  static const char text[] = "{\"sluice_machine\": 2, \"name\": \"a test\", \"op_seconds\": 3e-6}";
  if (mkdtemp(folder) == NULL) return 1;
  snprintf(inner, sizeof inner, "%s/inner", folder);
  snprintf(path, sizeof path, "%s/machine.json", inner);
  snprintf(plain, sizeof plain, "%s/file", folder);
  return sluice_machine_read(text, sizeof text - 1, &machine) != SLUICE_OK;
}

static int tear_down(void** state) {
  (void)state;
  clean();
  return rmdir(folder);
}

int main(void) { return run_cases(set_up, tear_down); }
