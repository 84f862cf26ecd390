// SPDX-License-Identifier: Apache-2.0
/* Structs of the wrong size, with unknown bytes or unknown extensions: ABI errors that name the struct. */

#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

typedef union wide_s {
  unsigned char bytes[1024];
  size_t struct_size;
  sluice_context_config_t context;
  sluice_moe_config_t moe;
  sluice_comm_config_t comm;
  sluice_moe_forward_args_t forward;
  sluice_moe_backward_args_t backward;
  sluice_expert_tensors_t experts;
  sluice_expert_callbacks_t callbacks;
  sluice_context_stats_t stats;
} wide_t;

typedef sluice_status_t (*wide_call_t)(fixture_t* f, const void* argument);

static sluice_status_t run_with_params(fixture_t* f, const void* params);
static sluice_status_t run_with_grads(fixture_t* f, const void* grads);

/* Sizes that are too small or far too large, and nonzero bytes beyond the known part, are ABI errors that name the
 * struct. A tail of zeros is accepted, and so is the oldest layout, with defaults for the missing fields. */
static void check_struct(fixture_t* f, const void* good, size_t size, size_t oldest, const char* name,
                         wide_call_t call) {
  wide_t w;
  memset(&w, 0, sizeof w);
  memcpy(&w, good, size);
  const size_t wrong[] = {0, 7, sizeof(size_t), oldest - 1, 65537, (size_t)-1};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; ++i) {
    w.struct_size = wrong[i];
    REFUSED(call(f, &w), SLUICE_E_ABI, name);
  }
  w.struct_size = oldest;
  memset(w.bytes + oldest, 0xee, size - oldest);
  WORKS(call(f, &w));
  memcpy(&w, good, size);
  w.struct_size = size + 16;
  WORKS(call(f, &w));
  w.bytes[size + 9] = 1;
  REFUSED(call(f, &w), SLUICE_E_ABI, name);
  w.bytes[size + 9] = 0;
  WORKS(call(f, &w));
  if (call != run_with_params && call != run_with_grads) REFUSED(call(f, NULL), BAD, name);
}

static const sluice_ext_header_t stranger = {.type = 4711};

static sluice_status_t make_comm(fixture_t* f, const void* config) {
  (void)f;
  sluice_local_group_t* group = NULL;
  sluice_comm_t* comm = NULL;
  sluice_status_t status = sluice_local_group_create(1, &group);
  if (status == SLUICE_OK) status = sluice_comm_create_local(group, config, &comm);
  sluice_comm_destroy(comm);
  sluice_local_group_destroy(group);
  return status;
}
static sluice_status_t run_forward(fixture_t* f, const void* args) {
  sluice_step_t* step = NULL;
  sluice_status_t status = sluice_moe_forward(f->rig.moe, args, NULL, &step);
  sluice_step_drop(step);
  return status;
}
static sluice_status_t run_backward(fixture_t* f, const void* args) {
  sluice_step_t* step = fresh_step(f);
  sluice_status_t status = sluice_moe_backward(f->rig.moe, step, args, NULL);
  sluice_step_drop(step);
  return status;
}
static sluice_status_t run_with_params(fixture_t* f, const void* params) {
  sluice_moe_forward_args_t args = f->rig.forward;
  args.params = params;
  return run_forward(f, &args);
}
static sluice_status_t run_with_grads(fixture_t* f, const void* grads) {
  sluice_moe_backward_args_t args = f->rig.backward;
  args.grad_params = grads;
  return run_backward(f, &args);
}
static sluice_status_t run_with_callbacks(fixture_t* f, const void* callbacks) {
  sluice_moe_forward_args_t args = f->rig.forward;
  args.callbacks = callbacks;
  return run_forward(f, &args);
}

#define CHECK_STRUCT(good, type, oldest, call) check_struct(f, good, sizeof(type), oldest, #type, call)

LAYER_TEST(Structs_WrongSizeOrDirtyTail_IsAbiError, open_default) {
  DEFAULTS(sluice_context_config, context);
  context.gemm = "ref";
  CHECK_STRUCT(&context, sluice_context_config_t, offsetof(sluice_context_config_t, memory_budget), make_context);
  CHECK_STRUCT(&f->rig.config, sluice_moe_config_t, offsetof(sluice_moe_config_t, restore_input), make_layer);
  DEFAULTS(sluice_comm_config, comm);
  CHECK_STRUCT(&comm, sluice_comm_config_t, offsetof(sluice_comm_config_t, timeout_ns), make_comm);
  CHECK_STRUCT(&f->rig.forward, sluice_moe_forward_args_t, offsetof(sluice_moe_forward_args_t, save_is_counted),
               run_forward);
  CHECK_STRUCT(&f->rig.backward, sluice_moe_backward_args_t, sizeof f->rig.backward, run_backward);
  const size_t adapters = offsetof(sluice_expert_tensors_t, la1);
  CHECK_STRUCT(&f->rig.param_table, sluice_expert_tensors_t, adapters, run_with_params);
  CHECK_STRUCT(&f->rig.grad_table, sluice_expert_tensors_t, adapters, run_with_grads);
}

LAYER_TEST(ExpertStructs_WrongSizeOrDirtyTail_IsAbiError, open_callbacks) {
  CHECK_STRUCT(&f->rig.callbacks, sluice_expert_callbacks_t, sizeof f->rig.callbacks, run_with_callbacks);
}

LAYER_TEST(Structs_UnknownExtension_IsNamed, open_default) {
  DEFAULTS(sluice_context_config, context);
  context.next = &stranger;
  REFUSED(make_context(f, &context), SLUICE_E_ABI, "4711");
  sluice_moe_config_t config = rig_config();
  config.next = &stranger;
  REFUSED(make_layer(f, &config), SLUICE_E_ABI, "4711");
  DEFAULTS(sluice_comm_config, comm);
  comm.next = &stranger;
  REFUSED(make_comm(f, &comm), BAD, "4711");
  FORWARD_REFUSED(f, f->rig.forward.next = &stranger, SLUICE_E_ABI, "4711");
  BACKWARD_REFUSED(f, f->rig.backward.next = &stranger, SLUICE_E_ABI, "4711");
}

/* init must never write beyond the given size. */
TEST(Init_ShortOrNull_WritesOnlyThatMuch) {
  unsigned char block[64];
  void (*const inits[])(void*, size_t) = {(void (*)(void*, size_t))(void (*)(void))sluice_context_config_init,
                                          (void (*)(void*, size_t))(void (*)(void))sluice_moe_config_init,
                                          (void (*)(void*, size_t))(void (*)(void))sluice_comm_config_init,
                                          (void (*)(void*, size_t))(void (*)(void))sluice_moe_forward_args_init,
                                          (void (*)(void*, size_t))(void (*)(void))sluice_moe_backward_args_init,
                                          (void (*)(void*, size_t))(void (*)(void))sluice_error_info_init};
  for (size_t i = 0; i < sizeof inits / sizeof inits[0]; ++i) {
    for (size_t size = 0; size <= 40; ++size) {
      memset(block, 0xee, sizeof block);
      inits[i](block, size);
      for (size_t at = size < sizeof(size_t) ? 0 : size; at < sizeof block; ++at) assert_int_equal(block[at], 0xee);
    }
    inits[i](NULL, 100);
  }
}

LAYER_TEST(Stats_WrongSize_IsAbiErrorAndShortIsFilled, open_default) {
  wide_t w;
  memset(&w, 0, sizeof w);
  REFUSED(sluice_context_get_stats(f->rig.context, 0, &w.stats), SLUICE_E_ABI, "sluice_context_stats_t");
  w.struct_size = (size_t)0xeeeeeeeeeeeeu;
  REFUSED(sluice_context_get_stats(f->rig.context, 0, &w.stats), SLUICE_E_ABI, "sluice_context_stats_t");
  memset(&w, 0xee, sizeof w);
  w.struct_size = 24; /* ends after peak_bytes */
  WORKS(sluice_context_get_stats(f->rig.context, 0, &w.stats));
  assert_int_equal(w.struct_size, 24);
  assert_true(w.stats.peak_bytes >= w.stats.current_bytes && w.stats.current_bytes > 0);
  for (size_t i = 24; i < sizeof w; ++i) assert_int_equal(w.bytes[i], 0xee);
  memset(&w, 0xee, sizeof w);
  w.struct_size = sizeof w; /* as from a newer header */
  WORKS(sluice_context_get_stats(f->rig.context, 0, &w.stats));
  assert_string_equal(w.stats.gemm, "ref");
  for (size_t i = sizeof w.stats; i < sizeof w; ++i) assert_int_equal(w.bytes[i], 0);
  REFUSED(sluice_context_get_stats(NULL, 0, &w.stats), BAD, "context is NULL");
  REFUSED(sluice_context_get_stats(f->rig.context, 0, NULL), BAD, "out_stats is NULL");
}
