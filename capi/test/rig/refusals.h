// SPDX-License-Identifier: Apache-2.0
/* Shared by the bad_*_test.c. A layer must refuse wrong input by name and stay intact: the next correct call has the
 * same bits as before, and nothing leaks. */
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

/* Opens a layer and runs every kind of pass once, since memory that the context keeps (schedules, slots) is no leak. */
void open_with(fixture_t* f, const sluice_moe_config_t* config);
void open_default(fixture_t* f);
/* Checks after an error that nothing leaked and that a valid step has the same bits as before. */
void check_nothing_lost(fixture_t* f);
void close_fixture(fixture_t* f);
/* Runs a forward and returns its step. */
sluice_step_t* fresh_step(fixture_t* f);

#define FORWARD_REFUSED(f, status, text)                   \
  do {                                                     \
    sluice_step_t* step_ = (sluice_step_t*)(uintptr_t)1;   \
    REFUSED(rig_forward(&(f)->rig, &step_), status, text); \
    assert_null(step_);                                    \
    check_nothing_lost(f);                                 \
  } while (0)

/* Takes a fresh step; a correct backward must still accept it after the error. */
#define BACKWARD_REFUSED(f, step, status, text)           \
  do {                                                    \
    REFUSED(rig_backward(&(f)->rig, step), status, text); \
    rig_reset(&(f)->rig);                                 \
    WORKS(rig_backward(&(f)->rig, step));                 \
    sluice_step_drop(step);                               \
    check_nothing_lost(f);                                \
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
