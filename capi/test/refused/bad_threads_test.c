// SPDX-License-Identifier: Apache-2.0
/* A second thread in a context gets BUSY. In a forked child all handles of the parent are inert. */
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

typedef struct busy_s {
  fixture_t* f;
  sluice_step_t* step; /* an older step */
  sluice_status_t status[5];
  char message[5][256];
  int32_t calls;
} busy_t;

static void* second_thread(void* argument) {
  busy_t* b = argument;
  rig_t* rig = &b->f->rig;
  sluice_step_t* step = NULL;
  sluice_moe_t* moe = NULL;
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  int64_t count = 0;
  for (int i = 0; i < 5; ++i) {
    switch (i) {
      case 0: b->status[i] = rig_forward(rig, &step); break;
      case 1: b->status[i] = rig_backward(rig, b->step); break;
      case 2: b->status[i] = sluice_moe_create(rig->context, &rig->config, &moe); break;
      case 3: b->status[i] = sluice_context_get_stats(rig->context, 0, &stats); break;
      default: b->status[i] = sluice_context_take_trace(rig->context, NULL, 0, &count); break;
    }
    snprintf(b->message[i], sizeof b->message[i], "%s", last_message());
  }
  return NULL;
}

static int32_t call_from_inside(void* user, int32_t chunk, int32_t expert, int64_t rows, const void* x, void* y) {
  busy_t* b = user;
  (void)chunk, (void)expert;
  for (int64_t i = 0; i < rows * 5; ++i) ((float*)y)[i] = 2 * ((const float*)x)[i];
  if (b->calls++ > 0) return 0;
  pthread_t thread;
  if (pthread_create(&thread, NULL, second_thread, b) != 0) return 1;
  pthread_join(thread, NULL);
  return 0;
}

LAYER_TEST(Context_SecondThreadInside_IsBusy, open_callbacks) {
  static const char* const names[] = {"sluice_moe_forward", "sluice_moe_backward", "sluice_moe_create",
                                      "sluice_context_get_stats", "sluice_context_take_trace"};
  busy_t busy = {.f = f, .step = fresh_step(f)};
  rig_reset(&f->rig);
  sluice_expert_callbacks_t callbacks = f->rig.callbacks;
  callbacks.user = &busy, callbacks.forward = call_from_inside;
  f->rig.forward.callbacks = &callbacks;
  sluice_step_t* step = NULL;
  WORKS(rig_forward(&f->rig, &step));
  for (int i = 0; i < 5; ++i) {
    assert_int_equal(busy.status[i], SLUICE_E_BUSY);
    assert_non_null(strstr(busy.message[i], names[i]));
  }
  rig_reset(&f->rig);
  WORKS(rig_backward(&f->rig, step));
  WORKS(rig_backward(&f->rig, busy.step)); /* the refused step is unchanged */
  sluice_step_drop(step);
  sluice_step_drop(busy.step);
}

#define CHILD_WANTS(condition) \
  if (!(condition)) _exit(__LINE__ % 200 + 1)
#define CHILD_STATE(call) CHILD_WANTS((call) == SLUICE_E_STATE && strstr(last_message(), "fork") != NULL)

static void child_main(fixture_t* f, sluice_step_t* step, sluice_local_group_t* group, sluice_comm_t* comm,
                       saved_t* saved) {
  alarm(200); /* a hang ends the child with a signal */
  rig_t* rig = &f->rig;
  sluice_step_t* other = NULL;
  sluice_moe_t* moe = NULL;
  sluice_comm_t* made = NULL;
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  int64_t count = 0;
  CHILD_STATE(rig_forward(rig, &other));
  CHILD_STATE(rig_backward(rig, step));
  CHILD_STATE(sluice_step_restore(rig->moe, saved->data, saved->bytes, &other));
  CHILD_STATE(sluice_step_info(step, NULL, NULL));
  CHILD_STATE(sluice_moe_create(rig->context, &rig->config, &moe));
  CHILD_STATE(sluice_context_get_stats(rig->context, 0, &stats));
  CHILD_STATE(sluice_context_trace(rig->context, 8));
  CHILD_STATE(sluice_context_take_trace(rig->context, NULL, 0, &count));
  DEFAULTS(sluice_comm_config, comm_config);
  comm_config.rank = 1, comm_config.world_size = 2;
  CHILD_STATE(sluice_comm_create_local(group, &comm_config, &made));
  sluice_comm_abort(comm);
  sluice_comm_destroy(comm);
  sluice_local_group_destroy(group);
  sluice_step_drop(step);
  int64_t live = atomic_load(&rig->heap.live_bytes);
  sluice_moe_destroy(rig->moe);
  sluice_context_destroy(rig->context);
  CHILD_WANTS(atomic_load(&rig->heap.live_bytes) == live); /* the parent's memory is untouched */
  /* A context created in the child works. */
  fixture_t own;
  sluice_moe_config_t config = rig_config();
  CHILD_WANTS(rig_open(&own.rig, NULL, &config) == SLUICE_OK);
  CHILD_WANTS(rig_round(&own.rig, &own.digest) == SLUICE_OK && own.digest == f->digest);
  rig_close(&own.rig);
  _exit(0);
}

LAYER_TEST(Fork_HandlesInTheChild_AreInert, open_default) {
  sluice_local_group_t* group = NULL;
  sluice_comm_t* comm = NULL;
  DEFAULTS(sluice_comm_config, comm_config);
  comm_config.world_size = 2;
  WORKS(sluice_local_group_create(2, &group));
  WORKS(sluice_comm_create_local(group, &comm_config, &comm));
  saved_t saved = {.refuse = -1};
  f->rig.forward.save = save, f->rig.forward.save_user = &saved;
  sluice_step_t* step = NULL;
  WORKS(rig_forward(&f->rig, &step));
  fflush(NULL);
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) child_main(f, step, group, comm, &saved);
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    fail_msg("child: %s %d (line %% 200 + 1)", WIFEXITED(status) ? "exit" : "signal",
             WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
  }
  WORKS(rig_backward(&f->rig, step));
  sluice_step_drop(step);
  sluice_comm_destroy(comm);
  sluice_local_group_destroy(group);
  free_saved(&saved);
}
