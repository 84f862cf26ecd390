// SPDX-License-Identifier: Apache-2.0
/* Runs the cases of the suite on a transport, with one group of ranks for each case, and counts failures. */
#include "backend/cts/comm/comm_suite.h"

#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/cts/comm/comm_suite_case.h"
#include "third_party/bazel/test.h"

#define SUITE_SECONDS 880
#define MAX_CASES     80

typedef struct instance_s {
  const cts_transport_t* transport;
  const cts_case_t* c;
  int32_t world_size;
  char name[160];
} instance_t;

static void count_warnings(void* user, int32_t level, const char* message) {
  cts_world_t* world = user;
  if (level != SLUICE_LOG_WARN) return;
  pthread_mutex_lock(&world->mutex);
  ++world->num_warnings;
  size_t used = strlen(world->warnings);
  snprintf(world->warnings + used, sizeof world->warnings - used, "%s\n", message);
  pthread_mutex_unlock(&world->mutex);
}

static void* run_rank(void* arg) {
  cts_rank_t* me = arg;
  cts_world_t* world = me->world;
  if (cts_create_end(world, world->shared, me->rank, world->world_size, PATIENT_NS, &me->comm) != SLUICE_OK) {
    cts_fail_check(me, __FILE__, __LINE__, "the communicator is created");
  } else {
    world->c->run(me);
  }
  sluice_comm_destroy(me->comm);
  return NULL;
}

/* Runs a case. out_failure: the first failure of a rank of this process, or "". */
static void run_world(const instance_t* instance, char* out_failure, size_t failure_bytes) {
  cts_world_t world = {.transport = instance->transport, .c = instance->c, .world_size = instance->world_size};
  cts_rank_t ranks[MAX_WORLD_SIZE];
  pthread_t threads[MAX_WORLD_SIZE];
  uint64_t num_before = sluice_process_allocator()->num_live;
  memset(ranks, 0, sizeof ranks);
  pthread_mutex_init(&world.mutex, NULL);
  sluice_cond_init(&world.met);
  sluice_set_log(count_warnings, &world, SLUICE_LOG_WARN);
  world.shared = instance->transport->open(instance->world_size);
  assert_non_null(world.shared);

  int is_process = instance->transport->meeting != NULL;
  world.num_here = is_process ? 1 : instance->world_size;
  for (int32_t i = 0; i < world.num_here; ++i) {
    ranks[i].world = &world;
    ranks[i].rank = is_process ? sluice_comm_rank(instance->transport->meeting) : i;
    assert_int_equal(pthread_create(&threads[i], NULL, run_rank, &ranks[i]), 0);
  }
  for (int32_t i = 0; i < world.num_here; ++i) pthread_join(threads[i], NULL);
  instance->transport->close(world.shared);
  sluice_set_log(NULL, NULL, SLUICE_LOG_WARN);

  out_failure[0] = '\0';
  for (int32_t i = 0; i < world.num_here && out_failure[0] == '\0'; ++i) {
    snprintf(out_failure, failure_bytes, "%s", ranks[i].failure);
  }
  if (out_failure[0] == '\0' && !instance->c->expects_warnings && world.num_warnings > 0) {
    snprintf(out_failure, failure_bytes, "unexpected warnings: %.400s", world.warnings);
  }
  if (out_failure[0] == '\0' && sluice_process_allocator()->num_live != num_before) {
    snprintf(out_failure, failure_bytes, "%lld allocations leaked",
             (long long)(sluice_process_allocator()->num_live - num_before));
  }
  pthread_cond_destroy(&world.met);
  pthread_mutex_destroy(&world.mutex);
}

static void run_instance(void** state) {
  const instance_t* instance = *state;
  const cts_exception_t* exception = cts_exception_of(instance->transport, instance->c);
  int is_expected_to_fail = exception != NULL;
  char failure[512];
  run_world(instance, failure, sizeof failure);
  int failed = failure[0] != '\0';
  if (instance->transport->meeting != NULL) {
    /* A case fails or passes on all ranks together. */
    int64_t any = failed;
    assert_int_equal(sluice_comm_all_reduce_i64(instance->transport->meeting, &any, 1, SLUICE_REDUCE_MAX, "verdict"),
                     0);
    if (any && !failed) snprintf(failure, sizeof failure, "failed on another rank");
    failed = any != 0;
  }
  if (failed && is_expected_to_fail) {
    print_message("             cannot: %s\n", exception->reason);
  } else if (failed) {
    fail_msg("%s", failure);
  } else if (is_expected_to_fail) {
    fail_msg("passes although listed as impossible (%s): strike it off the list", exception->reason);
  }
}

int cts_comm_suite_run(const cts_transport_t* transport, int32_t world_size) {
  const cts_case_t* const tables[] = {cts_data_cases,
                                      cts_waits_cases,
                                      cts_losses_cases,
                                      cts_resources_cases,
                                      cts_reduce_cases,
                                      cts_messages_data_cases,
                                      cts_messages_requests_cases,
                                      cts_messages_losses_cases};
  static instance_t instances[MAX_CASES];
  static struct CMUnitTest tests[MAX_CASES];
  size_t n = 0;
  alarm(SUITE_SECONDS); /* a hang ends with the name of its case on the last line */
  assert_in_range(world_size, 1, MAX_WORLD_SIZE);
  for (size_t t = 0; t < sizeof tables / sizeof tables[0]; ++t) {
    for (const cts_case_t* c = tables[t]; c->name != NULL; ++c) {
      if (c->min_world_size == 0 ? world_size != 1 : world_size < c->min_world_size) continue;
      assert_true(n < sizeof tests / sizeof tests[0]);
      instance_t* instance = &instances[n];
      instance->transport = transport;
      instance->c = c;
      instance->world_size = world_size;
      snprintf(instance->name, sizeof instance->name, "%s/W=%d/%s", transport->name, world_size, c->name);
      tests[n] = (struct CMUnitTest){.name = instance->name, .test_func = run_instance, .initial_state = instance};
      ++n;
    }
  }
  return _cmocka_run_group_tests(transport->name, tests, n, NULL, NULL);
}

int cts_comm_suite_main(const cts_transport_t* transport, int argc, char** argv) {
  return cts_comm_suite_run(transport, argc > 1 ? (int32_t)strtol(argv[1], NULL, 10) : 2);
}
