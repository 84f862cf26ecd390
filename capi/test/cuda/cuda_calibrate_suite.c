// SPDX-License-Identifier: Apache-2.0
#include "capi/test/cuda/cuda_calibrate_suite.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/test/last_error.h"
#include "sluice/sluice.h"

enum { MOST_TEXT = 32768 };

typedef struct rank_s {
  int32_t rank;
  const calibrate_case_t* c;
  const world_machine_t* world;
  sluice_local_group_t* group; /* used if the machine makes no communicator of its own */
  sluice_status_t status;
  char why[512];
  char text[MOST_TEXT];
} rank_t;

static void note(rank_t* r, sluice_status_t status) {
  if (r->status != SLUICE_OK || status == SLUICE_OK) return;
  r->status = status;
  snprintf(r->why, sizeof r->why, "%.500s", last_message());
}

static void predict(rank_t* r, const sluice_planner_t* planner) {
  const calibrate_case_t* c = r->c;
  sluice_planner_workload_t work;
  sluice_planner_workload_init(&work, sizeof work);
  work.model_width = c->model_width, work.hidden_width = c->hidden_width, work.dtype = c->dtype;
  work.num_tokens = 512, work.num_experts = 2 * c->world_size, work.world_size = c->world_size;
  const sluice_planner_choice_t choice = {2, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD, 0};
  sluice_planner_prediction_t p = {.struct_size = sizeof p};
  note(r, sluice_planner_predict(planner, &work, &choice, &p, NULL, 0));
  if (r->status != SLUICE_OK) return;
  int has_comm = p.forward_busy[SLUICE_LANE_COMM] > 0;
  if (p.forward_busy[SLUICE_LANE_COMPUTE] > 0 && p.backward_busy[SLUICE_LANE_COPY_IN] > 0 &&
      has_comm == (c->world_size > 1) && p.machine_error_median > 0) {
    return;
  }
  r->status = SLUICE_E_INTERNAL;
  snprintf(r->why, sizeof r->why, "predicted: compute %g, copy in %g, comm %g s, error %g",
           p.forward_busy[SLUICE_LANE_COMPUTE], p.backward_busy[SLUICE_LANE_COPY_IN], p.forward_busy[SLUICE_LANE_COMM],
           p.machine_error_median);
}

static void* rank_main(void* argument) {
  rank_t* r = argument;
  const calibrate_case_t* c = r->c;
  sluice_comm_t* comm = NULL;
  sluice_context_t* context = NULL;
  sluice_planner_t* planner = NULL;
  sluice_comm_config_t comm_config;
  sluice_comm_config_init(&comm_config, sizeof comm_config);
  comm_config.rank = r->rank, comm_config.world_size = c->world_size, comm_config.timeout_ns = 60000000000u;
  if (c->world_size > 1) {
    note(r, r->group != NULL ? sluice_comm_create_local(r->group, &comm_config, &comm)
                             : r->world->make_comm(r->rank, &comm_config, &comm));
  }
  sluice_context_config_t config;
  sluice_context_config_init(&config, sizeof config);
  config.device_type = r->world->device_type, config.device_id = r->world->device_id(r->rank);
  if (r->status == SLUICE_OK) note(r, r->world->make_context(r->rank, &config, comm, &context));
  sluice_calibration_config_t wanted;
  sluice_calibration_config_init(&wanted, sizeof wanted);
  wanted.model_width = c->model_width, wanted.hidden_width = c->hidden_width, wanted.dtype = c->dtype;
  wanted.seconds = c->seconds, wanted.cache_dir = c->folder;
  if (r->status == SLUICE_OK) note(r, sluice_planner_calibrate(context, &wanted, &planner));
  if (r->status == SLUICE_OK) predict(r, planner);
  uint64_t bytes = sizeof r->text;
  if (r->status == SLUICE_OK) note(r, sluice_planner_write_machine(planner, r->text, &bytes));
  sluice_planner_destroy(planner);
  sluice_context_destroy(context);
  sluice_comm_destroy(comm);
  return NULL;
}

static const char* check(const rank_t* ranks, const calibrate_case_t* c) {
  static char problem[640];
  for (int32_t r = 0; r < c->world_size; ++r) {
    if (ranks[r].status == SLUICE_OK && strcmp(ranks[r].text, ranks[0].text) == 0) continue;
    snprintf(problem, sizeof problem, "rank %d: %d: %s", r, ranks[r].status,
             ranks[r].status == SLUICE_OK ? "another machine than rank 0" : ranks[r].why);
    return problem;
  }
  const char* const wanted[] = {"\"provenance\": \"calibrated\"",
                                "\"forward\"",
                                "\"input_grad\"",
                                "\"weight_grad\"",
                                "\"host_copy\"",
                                c->world_size > 1 ? "\"beside\": [\"compute\"]" : "\"rows\""};
  for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; ++i) {
    if (strstr(ranks[0].text, wanted[i]) != NULL) continue;
    snprintf(problem, sizeof problem, "the machine has no %s", wanted[i]);
    return problem;
  }
  return NULL;
}

const char* calibrate_run(const layer_machine_t* machine, const calibrate_case_t* c, char* out_text,
                          uint64_t out_bytes) {
  static rank_t ranks[WORLD_MAX_RANKS];
  pthread_t threads[WORLD_MAX_RANKS];
  sluice_local_group_t* group = NULL;
  machine->open(c->world_size, 1);
  const world_machine_t* world = machine->world();
  if (world->make_comm == NULL && sluice_local_group_create(c->world_size, &group) != SLUICE_OK) return "no group";
  memset(ranks, 0, sizeof ranks);
  for (int32_t r = 0; r < c->world_size; ++r) {
    ranks[r].rank = r, ranks[r].c = c, ranks[r].world = world, ranks[r].group = group;
    if (pthread_create(&threads[r], NULL, rank_main, &ranks[r]) != 0) return "no thread";
  }
  for (int32_t r = 0; r < c->world_size; ++r) pthread_join(threads[r], NULL);
  sluice_local_group_destroy(group);
  const char *problem = check(ranks, c), *left = machine->close();
  if (out_text != NULL) snprintf(out_text, out_bytes, "%s", ranks[0].text);
  return problem != NULL ? problem : left;
}
