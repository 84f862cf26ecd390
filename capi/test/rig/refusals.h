// SPDX-License-Identifier: Apache-2.0
/* Shared by the bad_*_test.c: a layer that gets wrong input must reject it by name and lose nothing: the next correct
 * call gives the same bits as before, and no byte leaks. */
#ifndef SLUICE_CAPI_TEST_RIG_REFUSALS_H_
#define SLUICE_CAPI_TEST_RIG_REFUSALS_H_

#include <stdint.h>

#include "backend/base/test/refused.h"
#include "backend/base/test/refused.h"
#include "capi/test/rig/rig.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

typedef struct fixture_s {
  rig_t rig;
  uint64_t digest; /* of a good round */
  int64_t live_bytes;
} fixture_t;

/* Every kind of pass once: memory that the context keeps of them (schedules, slots) is no leak. */
void open_with(fixture_t* f, const sluice_moe_config_t* config);
void open_default(fixture_t* f);
/* After an error: no leak, and the same bits as before. */
void check_nothing_lost(fixture_t* f);
void close_fixture(fixture_t* f);
/* A forward whose backward has not run yet. */
sluice_step_t* fresh_step(fixture_t* f);

#define FORWARD_REFUSED(f, status, text)                   \
  do {                                                     \
    sluice_step_t* step_ = (sluice_step_t*)(uintptr_t)1;   \
    REFUSED(rig_forward(&(f)->rig, &step_), status, text); \
    assert_null(step_);                                    \
    check_nothing_lost(f);                                 \
  } while (0)

/* On a fresh step, which a correct backward must still accept afterwards. */
#define BACKWARD_REFUSED(f, step, status, text)           \
  do {                                                    \
    REFUSED(rig_backward(&(f)->rig, step), status, text); \
    rig_reset(&(f)->rig);                                 \
    WORKS(rig_backward(&(f)->rig, step));                 \
    sluice_step_drop(step);                               \
    check_nothing_lost(f);                                \
  } while (0)

/* Created from this config and destroyed again. */
sluice_status_t make_context(fixture_t* f, const void* config);
sluice_status_t make_layer(fixture_t* f, const void* config);
/* No layer is made of this config in the rig's context. */
void refuses_layer(rig_t* rig, const sluice_moe_config_t* config, sluice_status_t status, const char* text);

/* The host's saved buffers, as returned by its callback `save`. */
typedef struct saved_s {
  void* data[SLUICE_SAVED_COUNT];
  uint64_t bytes[SLUICE_SAVED_COUNT];
  int32_t refuse; /* this buffer */
} saved_t;
void* save(void* user, int32_t which, uint64_t bytes);
void free_saved(saved_t* saved);

#endif /* SLUICE_CAPI_TEST_RIG_REFUSALS_H_ */
