// SPDX-License-Identifier: Apache-2.0
/* The choice of a step is one unit: the weight-gradient mode belongs to its n, even if the header of its forward has
 * brought the choice for the next step. Otherwise a race between candidates that differ in both would wait forever for
 * a candidate that never runs as chosen. */

#include "backend/moe/context/policy_hook.h"
#include "backend/moe/layer/layer.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

enum { STEPS = 10, CHOICES = 3 };

/* Alternates between one chunk, two chunks with per-chunk weight gradients, and three with deferred ones. The number of
 * choices is odd, so that the choice two steps later also differs. */
static const sluice_pass_choice_t choices[CHOICES] = {{.num_chunks = 1, .wgrad_mode = SLUICE_WGRAD_DEFERRED},
                                                      {.num_chunks = 2, .wgrad_mode = SLUICE_WGRAD_PER_CHUNK},
                                                      {.num_chunks = 3, .wgrad_mode = SLUICE_WGRAD_DEFERRED}};

typedef struct turns_s {
  sluice_policy_hook_t base;   /* first member: the engine sees the hook as this */
  int32_t next;                /* index of the present choice */
  int32_t passes[2], mixed[2]; /* by direction: per-chunk passes, and passes in another mode than that of their n */
} turns_t;

static void agree(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, sluice_decision_state_t* decision,
                  const sluice_step_report_t* const* reports, int32_t world_size) {
  turns_t* turns = (turns_t*)(void*)policy_hook;
  (void)moe, (void)world_size;
  for (int direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    const sluice_pass_report_t* pass = &reports[0]->pass[direction];
    if (pass->pass_ns == 0) continue;
    turns->passes[direction] += pass->choice.num_chunks == 2;
    turns->mixed[direction] += pass->choice.wgrad_mode != choices[pass->choice.num_chunks - 1].wgrad_mode;
  }
  turns->next = (turns->next + 1) % CHOICES;
  decision->choice = choices[turns->next];
}

static const sluice_policy_hook_vtable_t vtable = {.agree = agree};

/* Trains a layer with this hook, which begins with `first`. `repeats`: each forward is replayed, as in activation
 * checkpointing, and its backward follows. */
static void run_steps(sluice_policy_hook_t* hook, const sluice_pass_choice_t* first, int32_t reuse, int32_t repeats) {
  rig_t rig;
  const sluice_context_config_t context = own_rig_context(0, 0);
  sluice_moe_config_t config = rig_config();
  own_rig_open(&rig, &context, &config);
  sluice_policy_hook_t* own = rig.context->policy_hook;
  config.num_chunks = 0, config.reuse = reuse;
  WORKS(rig_swap_layer(&rig, &config));
  rig.moe->decision.table = hook; /* a single rank would have no open choice */
  rig.moe->decision.choice = *first;
  rig.context->policy_hook = hook;
  for (int i = 0; i < STEPS; ++i) {
    sluice_step_t* step = NULL;
    rig.forward.repeats = 0;
    WORKS(rig_forward(&rig, &step));
    if (repeats) {
      sluice_step_drop(step);
      rig.forward.repeats = 1;
      WORKS(rig_forward(&rig, &step));
    }
    WORKS(rig_backward(&rig, step));
    sluice_step_drop(step);
  }
  rig.context->policy_hook = own;
  own_rig_close(&rig);
}

static void run_turns(int32_t repeats) {
  turns_t turns = {.base.vtable = &vtable};
  run_steps(&turns.base, &choices[0], 0, repeats);
  for (int direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    assert_true(turns.passes[direction] >= 3);
    assert_int_equal(turns.mixed[direction], 0);
  }
}

TEST(Step_ChosenInTurns_RunsWithTheModeOfItsN) { run_turns(0); }

/* The replay has the choice of the original forward, although the decision state has changed twice since. */
TEST(Step_RunAgain_HasTheModeOfItsFirstTime) { run_turns(1); }

typedef struct listener_s {
  sluice_policy_hook_t base; /* first member: the engine sees the hook as this */
  sluice_pass_choice_t choice;
  int32_t trained, with_memory, with_copies; /* reports */
} listener_t;

static void listen(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, sluice_decision_state_t* decision,
                   const sluice_step_report_t* const* reports, int32_t world_size) {
  listener_t* listener = (listener_t*)(void*)policy_hook;
  (void)moe, (void)world_size;
  decision->choice = listener->choice;
  listener->trained += reports[0]->pass[SLUICE_BACKWARD].pass_ns > 0;
  listener->with_memory += reports[0]->memory_rate > 0;
  listener->with_copies += reports[0]->copy_rate > 0;
}

static const sluice_policy_hook_vtable_t listeners = {.agree = listen};

/* Each report has the rates of its passes, so the tuner learns both while a layer trains: those of copies only if rows
 * are offloaded. */
TEST(Step_Reported_TellsTheRatesOfMemoryAndOfCopies) {
  for (int32_t set = 1; set < SLUICE_NUM_RESTORE_SETS; ++set) {
    const int offloads = sluice_restore_is_offloaded(sluice_restore_sets[set].restore_input) ||
                         sluice_restore_is_offloaded(sluice_restore_sets[set].restore_pre_activation);
    listener_t listener = {.base.vtable = &listeners,
                           .choice = {.num_chunks = 2, .wgrad_mode = SLUICE_WGRAD_PER_CHUNK}};
    listener.choice.restore_set = (uint8_t)set;
    run_steps(&listener.base, &listener.choice, 1, 0);
    assert_int_equal(listener.trained, STEPS - 1);
    assert_int_equal(listener.with_memory, STEPS - 1);
    assert_int_equal(listener.with_copies, offloads ? STEPS - 1 : 0);
  }
}
