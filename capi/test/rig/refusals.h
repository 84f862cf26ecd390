// SPDX-License-Identifier: Apache-2.0
/* Rigs under cmocka. A layer must refuse wrong input by name and stay intact: the next correct call has the same bits
 * as before, and nothing leaks. Also rigs with a context that the test configures, such as one with a budget, and a rig
 * of two ranks for plans only. */
#pragma once

#include <stdint.h>

#include "backend/base/test/refused.h"
#include "capi/test/rig/rig.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

typedef struct fixture_s {
  rig_t rig;
  uint64_t digest; /* digest of a valid step */
  int64_t live_bytes;
} fixture_t;

/* Opens a layer and runs every kind of pass once, since memory that the context keeps (schedules, slots) is no leak.
 * Leaves the rig reset, as check_nothing_lost and the macros below do. */
void open_with(fixture_t* f, const sluice_moe_config_t* config);
void open_default(fixture_t* f);
void open_callbacks(fixture_t* f);
/* Checks after an error that nothing leaked and that a valid step has the same bits as before. */
void check_nothing_lost(fixture_t* f);
/* Also checks that nothing was lost. */
void close_fixture(fixture_t* f);
/* Resets the rig, runs a forward and returns its step. */
sluice_step_t* fresh_step(fixture_t* f);

/* A case with a fixture `f`, which `open` opens. */
#define LAYER_TEST(name, open)         \
  static void name##_of(fixture_t* f); \
  TEST(name) {                         \
    fixture_t f;                       \
    open(&f);                          \
    name##_of(&f);                     \
    close_fixture(&f);                 \
  }                                    \
  static void name##_of(fixture_t* f)

/* A forward is refused after a change, which is an expression. */
#define FORWARD_REFUSED(f, change, status, text)           \
  do {                                                     \
    sluice_step_t* step_ = (sluice_step_t*)(uintptr_t)1;   \
    change;                                                \
    REFUSED(rig_forward(&(f)->rig, &step_), status, text); \
    assert_null(step_);                                    \
    check_nothing_lost(f);                                 \
  } while (0)

/* The backward of a fresh step is refused after a change; a correct backward must still accept the step. */
#define BACKWARD_REFUSED(f, change, status, text)          \
  do {                                                     \
    sluice_step_t* step_ = fresh_step(f);                  \
    change;                                                \
    REFUSED(rig_backward(&(f)->rig, step_), status, text); \
    rig_reset(&(f)->rig);                                  \
    WORKS(rig_backward(&(f)->rig, step_));                 \
    sluice_step_drop(step_);                               \
    check_nothing_lost(f);                                 \
  } while (0)

/* Creates a context from this config and destroys it; make_layer does the same with a layer. */
sluice_status_t make_context(fixture_t* f, const void* config);
sluice_status_t make_layer(fixture_t* f, const void* config);
/* Checks that no layer can be created from this config in the rig's context. */
void refuses_layer(rig_t* rig, const sluice_moe_config_t* config, sluice_status_t status, const char* text);

/* The host's saved buffers, which its callback `save` returns. */
typedef struct saved_s {
  void* data[SLUICE_SAVED_COUNT];
  uint64_t bytes[SLUICE_SAVED_COUNT];
  int32_t refuse; /* the buffer that `save` refuses; -1: none */
} saved_t;
void* save(void* user, int32_t which, uint64_t bytes);
void free_saved(saved_t* saved);

/* ---- rigs with a context of the test's choice ---- */

/* A config with gemm "ref"; budget 0 means no budget. */
sluice_context_config_t own_rig_context(uint64_t budget, int32_t max_outstanding);
/* Opens a rig of one rank, whose context uses the rig's heap. All functions here fail the test if a call fails. */
void own_rig_open(rig_t* rig, const sluice_context_config_t* context, const sluice_moe_config_t* layer);
/* Also checks that the heap is empty. */
void own_rig_close(rig_t* rig);
sluice_context_stats_t own_rig_stats(const rig_t* rig);

/* The smallest budget for the rig's layer and number of tokens. The context needs a budget. */
uint64_t own_rig_smallest_budget(const rig_t* rig);

/* Creates a plan of the rig's layer. */
sluice_plan_t* own_rig_plan(const rig_t* rig, const sluice_plan_config_t* config, sluice_plan_info_t* out_info);

/* Saved buffers that the host keeps, from a context or (context NULL) from the test's memory. `live` and `most` count
 * offloaded rows. */
typedef struct held_saved_s {
  sluice_context_t* context;
  void* data[16];
  uint64_t bytes[16], live, most;
  int32_t count;
} held_saved_t;

/* The callback `save` with a held_saved_t, which hold_saved sets for the rig's next forwards. */
void* save_held(void* held, int32_t which, uint64_t bytes);
void hold_saved(rig_t* rig, held_saved_t* held);
void give_saved_back(held_saved_t* held, sluice_context_t* context);

typedef struct pair_s {
  sluice_local_group_t* group;
  sluice_comm_t* comm;
  rig_t rig; /* rank 0; the other rank does not exist */
} pair_t;

void pair_open(pair_t* pair, const sluice_moe_config_t* layer);
void pair_close(pair_t* pair);
