// SPDX-License-Identifier: Apache-2.0
/* Refused configurations of contexts, layers and communicators, and error texts that are copied out. */
#include <dlfcn.h>
#include <math.h>

#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

/* The call refuses `c`, a copy of `good` with a change. */
#define REFUSES(change, call, status, text) \
  c = good, change;                         \
  REFUSED(call, status, text)

LAYER_TEST(ContextCreate_BadConfig_IsRefused, open_default) {
  sluice_context_config_t good, c;
  sluice_context_config_init(&good, sizeof good);
  good.gemm = "ref";
  good.allocate = heap_allocate, good.release = heap_release, good.allocate_user = &f->rig.heap;
  REFUSED(sluice_context_create(&good, NULL, NULL), BAD, "out_context is NULL");
#define CONTEXT(change, status, text) REFUSES(change, make_context(f, &c), status, text)
  CONTEXT(c.device_type = 3, SLUICE_E_UNSUPPORTED, "device_type is 3");
  CONTEXT(c.device_type = SLUICE_DEVICE_CUDA, SLUICE_E_UNSUPPORTED, "gemm is \"ref\"");
  c.gemm = NULL, c.device_id = -1;
  REFUSED(make_context(f, &c), BAD, "device_id is -1");
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == NULL) { /* otherwise cuda_device_test covers this case on fakes */
    c.device_id = 0;
    REFUSED(make_context(f, &c), SLUICE_E_NOT_FOUND, "no NVIDIA driver: libcuda.so.1");
  } else {
    dlclose(driver);
  }
  CONTEXT(c.device_id = 1, BAD, "device_id is 1");
  CONTEXT(c.release = NULL, BAD, "allocate and release");
  CONTEXT(c.allocate = NULL, BAD, "allocate and release");
  CONTEXT(c.ranks_per_node = 2, BAD, "ranks_per_node is 2, which does not divide the 1 ranks");
  CONTEXT(c.ranks_per_node = -1, BAD, "ranks_per_node is -1");
  CONTEXT(c.shared_memory_budget = 1000, BAD, "shared_memory_budget is 1000, of which this context's share is 0");
  CONTEXT((c.shared_memory_budget = 1000, c.memory_budget = 1001), BAD, "share is 1001");
  c.memory_budget = 1000, c.shared_host_memory_budget = 5;
  REFUSED(make_context(f, &c), BAD, "shared_host_memory_budget is 5, of which this context's share is 0");
  CONTEXT(c.num_layers = -1, BAD, "num_layers is -1");
  CONTEXT(c.gemm = "cleverness", BAD, "cleverness");
  CONTEXT(c.gemm = "host", BAD, "host");
  CONTEXT((c.gemm = "blas", c.gemm_library = "/nowhere/libblas.so"), SLUICE_E_NOT_FOUND, "/nowhere/libblas.so");
  CONTEXT((c.gemm = "onednn", c.gemm_library = "/nowhere/libdnnl.so"), SLUICE_E_NOT_FOUND, "/nowhere/libdnnl.so");
  WORKS(make_context(f, &good));
  sluice_context_destroy(NULL);
}

LAYER_TEST(Trace_BadArguments_AreRefused, open_default) {
  sluice_trace_event_t events[4];
  int64_t count = -1;
  REFUSED(sluice_context_trace(NULL, 4), BAD, "context is NULL");
  REFUSED(sluice_context_trace(f->rig.context, -1), BAD, "capacity is -1");
  REFUSED(sluice_context_trace(f->rig.context, INT64_MAX), BAD, "capacity is 9223372036854775807");
  REFUSED(sluice_context_take_trace(NULL, events, 4, &count), BAD, "context");
  REFUSED(sluice_context_take_trace(f->rig.context, NULL, 4, &count), BAD, "out_events");
  REFUSED(sluice_context_take_trace(f->rig.context, events, 4, NULL), BAD, "out_count");
  REFUSED(sluice_context_take_trace(f->rig.context, events, -4, &count), BAD, "negative");
  WORKS(sluice_context_take_trace(f->rig.context, NULL, 0, &count));
  assert_int_equal(count, 0);
  WORKS(sluice_context_trace(f->rig.context, 3)); /* a ring smaller than a pass keeps the newest events */
  WORKS(rig_round(&f->rig, NULL));
  WORKS(sluice_context_take_trace(f->rig.context, events, 4, &count));
  assert_int_equal(count, 3);
  assert_string_equal(events[2].op, "pass");
  WORKS(sluice_context_trace(f->rig.context, 0));
}

/* ---- layer ---- */

LAYER_TEST(MoeCreate_BadConfig_IsRefused, open_default) {
  sluice_moe_t* moe = (sluice_moe_t*)(uintptr_t)1;
  sluice_moe_config_t good = rig_config(), c;
  REFUSED(sluice_moe_create(NULL, &good, &moe), BAD, "context is NULL");
  assert_null(moe);
  REFUSED(sluice_moe_create(f->rig.context, &good, NULL), BAD, "out_moe is NULL");
#define LAYER(change, status, text) REFUSES(change, make_layer(f, &c), status, text)
#define FIELD(member, value, text)  LAYER(c.member = (value), BAD, text)
  FIELD(model_width, 0, "model_width is 0");
  FIELD(model_width, -5, "model_width is -5");
  FIELD(model_width, (int64_t)1 << 40, "model_width is 1099511627776");
  FIELD(hidden_width, 0, "hidden_width is 0");
  FIELD(hidden_width, (int64_t)1 << 40, "hidden_width is 1099511627776");
  FIELD(num_experts, 0, "num_experts is 0");
  FIELD(num_experts, -1, "num_experts is -1");
  FIELD(num_experts, INT32_MAX, "num_experts is 2147483647");
  FIELD(top_k, 0, "top_k is 0");
  FIELD(top_k, 5, "top_k is 5; it must be in [1, num_experts = 4]");
  FIELD(dtype, 0, "dtype is unknown (0)");
  FIELD(dtype, SLUICE_DTYPE_I32, "dtype is i32 (5)");
  FIELD(activation, 9, "activation is 9");
  FIELD(activation, -1, "activation is -1");
  FIELD(num_chunks, -1, "num_chunks is -1");
  FIELD(num_chunks, 257, "num_chunks is 257");
  FIELD(wgrad_mode, 2, "wgrad_mode is 2");
  FIELD(restore_input, 3, "restore_input is 3; known are adaptive (-1), keep (0), offload (1) and re-dispatch (2)");
  FIELD(restore_input, -2, "restore_input is -2");
  FIELD(restore_pre_activation, 2,
        "restore_pre_activation is 2; known are adaptive (-1), keep (0), offload (1) and recompute (3)");
  FIELD(restore_pre_activation, 4, "restore_pre_activation is 4");
  const int32_t inputs[] = {SLUICE_RESTORE_KEEP, 3}, open[] = {SLUICE_RESTORE_ADAPTIVE, 0}, mixed[] = {0, 2};
  FIELD(restore_input_of, inputs,
        "layer 3: restore_input_of[1] is 3; known are keep (0), offload (1) and re-dispatch (2)");
  FIELD(restore_input_of, open, "restore_input_of[0] is -1");
  FIELD(restore_pre_activation_of, mixed,
        "restore_pre_activation_of[1] is 2; known are keep (0), offload (1) and recompute (3)");
  LAYER((c.restore_pre_activation_of = inputs, c.num_chunks = 0), BAD,
        "restore_pre_activation_of names a policy for each chunk, but num_chunks is 0");
  const int32_t offload[] = {SLUICE_RESTORE_RECOMPUTE, SLUICE_RESTORE_OFFLOAD};
  LAYER((c.callback_experts = 1, c.restore_pre_activation_of = offload), SLUICE_E_UNSUPPORTED,
        "chunk 1 has restore_input keep, restore_pre_activation offload");
  FIELD(gated, 3, "gated is 3; known are no (0), halves (1) and interleaved (2)");
  FIELD(bias, -1, "bias and callback_experts are 0 or 1, found -1");
  FIELD(callback_experts, 3, "found 1, 3");
  FIELD(swiglu_alpha, 0.0f, "swiglu_alpha is 0");
  FIELD(swiglu_limit, -1.0f, "swiglu_limit -1");
  FIELD(swiglu_offset, (float)NAN, "swiglu_offset nan");
  LAYER((c.gated = 0, c.activation = SLUICE_ACTIVATION_SWIGLU), BAD, "swiglu needs a gate");
  FIELD(reuse, 2, "reuse is 2; it must be 0 or 1");
  FIELD(grouping, 3, "layer 3: grouping is 3; known are adaptive (0), off (1) and on (2)");
  FIELD(lora_rank, -1, "lora_rank is -1; it must be in [0, 65535]");
  FIELD(lora_rank, 65536, "lora_rank is 65536");
  LAYER((c.lora_rank = 4, c.callback_experts = 1, c.hidden_width = 0), BAD,
        "lora_rank is 4, but its experts are the host's own (callback_experts)");
  LAYER((c.reuse = 1, c.restore_input = SLUICE_RESTORE_KEEP), BAD, "reuse is 1, and a policy keeps rows");
  LAYER((c.reuse = 1, c.restore_pre_activation = SLUICE_RESTORE_KEEP), BAD,
        "leave the policies open (-1), or set reuse to 0");
  LAYER((c.reuse = 1, c.callback_experts = 1, c.hidden_width = 0), SLUICE_E_UNSUPPORTED,
        "or restore_pre_activation recompute (3)");
  const int32_t beyond[] = {0, 0, 1, 0}, negative[] = {0, -1, 0, 0};
  FIELD(expert_rank, beyond, "expert_rank[2] is 1; the group has 1 ranks");
  FIELD(expert_rank, negative, "expert_rank[1] is -1");
  const int32_t hole[] = {0, 1, 4, 2}, below[] = {0, -1, 1, 2}, shared[] = {3, 1, 2, 1}, turned[] = {3, 2, 1, 0};
  FIELD(expert_slot, hole, "expert_slot[2] is 4, and rank 0 owns 4 experts: its slots are 0 to 3, without gaps");
  FIELD(expert_slot, below, "expert_slot[1] is -1");
  FIELD(expert_slot, shared, "expert_slot puts experts 1 and 3 into slot 1 of rank 0");
  c = good, c.expert_slot = turned;
  WORKS(make_layer(f, &c));
  LAYER((c.layer_id = 77, c.top_k = 0), BAD, "layer 77");
  c = good, c.callback_experts = 1, c.hidden_width = 0;
  WORKS(make_layer(f, &c));
  for (int i = 0; i < 12; ++i) { /* callback experts refuse options that they do not support */
    static const int32_t pre_activation[] = {SLUICE_RESTORE_ADAPTIVE, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD,
                                             SLUICE_RESTORE_RECOMPUTE};
    static const char* const input_words[] = {"keep", "offload", "redispatch"};
    static const char* const pre_activation_words[] = {"adaptive", "keep", "offload", "recompute"};
    c.restore_input = i % 3, c.restore_pre_activation = pre_activation[i / 3];
    if (c.restore_pre_activation == SLUICE_RESTORE_RECOMPUTE ||
        (c.restore_input == SLUICE_RESTORE_KEEP && c.restore_pre_activation <= SLUICE_RESTORE_KEEP)) {
      WORKS(make_layer(f, &c));
      continue;
    }
    char text[96];
    snprintf(text, sizeof text,
             "or restore_pre_activation recompute (3); found restore_input %s, restore_pre_activation %s",
             input_words[i % 3], pre_activation_words[i / 3]);
    REFUSED(make_layer(f, &c), SLUICE_E_UNSUPPORTED, text);
  }
  c = good, c.num_experts = 1 << 20; /* the largest number is created at once */
  WORKS(make_layer(f, &c));
  assert_int_equal(sluice_moe_num_local_experts(NULL), 0);
  sluice_moe_destroy(NULL);
}

TEST(MoeCreate_ExpertsNotDivisibleByRanks_NeedsATable) {
  sluice_local_group_t* group = NULL;
  WORKS(sluice_local_group_create(3, &group));
  DEFAULTS(sluice_comm_config, comm_config);
  comm_config.rank = 1, comm_config.world_size = 3;
  sluice_comm_t* comm = NULL;
  WORKS(sluice_comm_create_local(group, &comm_config, &comm));
  rig_t rig;
  WORKS(rig_open_context(&rig, comm));
  sluice_moe_config_t c = rig_config();
  sluice_moe_t* moe = NULL;
  REFUSED(sluice_moe_create(rig.context, &c, &moe), BAD, "4 experts do not divide over 3 ranks");
  const int32_t owners[] = {2, 1, 1, 0};
  c.expert_rank = owners;
  WORKS(sluice_moe_create(rig.context, &c, &moe));
  assert_int_equal(sluice_moe_num_local_experts(moe), 2);
  sluice_moe_destroy(moe);
  rig_close(&rig);
  assert_int_equal(atomic_load(&rig.heap.live_bytes), 0);
  sluice_comm_destroy(comm);
  sluice_local_group_destroy(group);
}

static sluice_status_t no_start(void* user, const sluice_exchange_t* exchange, void** out_request,
                                sluice_host_failure_t* out_failure) {
  (void)user, (void)exchange, (void)out_request, (void)out_failure;
  return SLUICE_E_EXTERNAL;
}
static sluice_status_t no_wait(void* user, void* request, uint64_t timeout_ns, sluice_host_failure_t* out_failure) {
  (void)user, (void)request, (void)timeout_ns, (void)out_failure;
  return SLUICE_E_EXTERNAL;
}
static void count_destroy(void* user) { ++*(int*)user; }

TEST(CommCreate_BadArguments_AreRefused) {
  sluice_local_group_t* group = (sluice_local_group_t*)(uintptr_t)1;
  REFUSED(sluice_local_group_create(2, NULL), BAD, "out_group is NULL");
  REFUSED(sluice_local_group_create(0, &group), BAD, "world_size is 0");
  assert_null(group);
  REFUSED(sluice_local_group_create(-3, &group), BAD, "world_size is -3");
  WORKS(sluice_local_group_create(2, &group));
  sluice_comm_config_t good, c;
  sluice_comm_config_init(&good, sizeof good);
  assert_int_equal(good.world_size, 1);
  good.world_size = 2;
  sluice_comm_t *comm = NULL, *second = NULL;
  REFUSED(sluice_comm_create_local(NULL, &good, &comm), BAD, "group");
  REFUSED(sluice_comm_create_local(group, &good, NULL), BAD, "out_comm");
  REFUSED(sluice_comm_create_local(group, NULL, &comm), BAD, "sluice_comm_config_t");
  REFUSES(c.rank = 2, sluice_comm_create_local(group, &c, &comm), BAD, "rank 2 of world_size 2");
  REFUSES(c.rank = -1, sluice_comm_create_local(group, &c, &comm), BAD, "rank -1");
  REFUSES(c.world_size = 0, sluice_comm_create_local(group, &c, &comm), BAD, "world_size 0");
  REFUSES(c.world_size = 3, sluice_comm_create_local(group, &c, &comm), BAD,
          "world_size is 3 in the config, 2 in the group");
  WORKS(sluice_comm_create_local(group, &good, &comm));
  REFUSED(sluice_comm_create_local(group, &good, &second), BAD, "rank 0 of this local group is taken");
  assert_null(second);
  assert_int_equal(sluice_comm_rank(comm), 0);
  assert_int_equal(sluice_comm_world_size(comm), 2);
  assert_string_equal(sluice_comm_name(comm), "local");
  sluice_comm_destroy(comm);
  REFUSED(sluice_comm_create_local(group, &good, &comm), BAD, "was destroyed");
  sluice_local_group_destroy(group);

  int destroyed = 0;
  sluice_host_comm_vtable_t vtable, v;
  memset(&vtable, 0, sizeof vtable);
  vtable.struct_size = sizeof vtable;
  vtable.exchange_start = no_start, vtable.exchange_wait = no_wait, vtable.destroy = count_destroy;
  REFUSED(sluice_comm_create_host(&good, &vtable, &destroyed, NULL), BAD, "out_comm is NULL");
  REFUSED(sluice_comm_create_host(NULL, &vtable, &destroyed, &comm), BAD, "sluice_comm_config_t");
  REFUSED(sluice_comm_create_host(&good, NULL, &destroyed, &comm), BAD, "sluice_host_comm_vtable_t");
  v = vtable, v.struct_size = 8;
  REFUSED(sluice_comm_create_host(&good, &v, &destroyed, &comm), SLUICE_E_ABI, "sluice_host_comm_vtable_t");
  v = vtable, v.exchange_start = NULL;
  REFUSED(sluice_comm_create_host(&good, &v, &destroyed, &comm), BAD, "exchange_start");
  v = vtable, v.exchange_wait = NULL;
  REFUSED(sluice_comm_create_host(&good, &v, &destroyed, &comm), BAD, "exchange_wait");
  assert_int_equal(destroyed, 0); /* the caller still owns `user` */
  WORKS(sluice_comm_create_host(&good, &vtable, &destroyed, &comm));
  assert_string_equal(sluice_comm_name(comm), "host");
  sluice_comm_destroy(comm);
  assert_int_equal(destroyed, 1);

  REFUSED(sluice_comm_create_mpi(&good, -1, NULL, NULL), BAD, "out_comm is NULL");
  REFUSED(sluice_comm_create_mpi(NULL, -1, NULL, &comm), BAD, "sluice_comm_config_t");
  REFUSED(sluice_comm_create_mpi(&good, -1, "/nowhere/libsluice_mpi.so", &comm), SLUICE_E_NOT_FOUND,
          "/nowhere/libsluice_mpi.so");
  assert_int_equal(sluice_comm_rank(NULL), -1);
  assert_int_equal(sluice_comm_world_size(NULL), 0);
  assert_string_equal(sluice_comm_name(NULL), "");
  sluice_comm_abort(NULL);
  sluice_comm_destroy(NULL);
  sluice_local_group_destroy(NULL);
}

TEST(Errors_CopiedOut_AreBoundedAndNamed) {
  assert_string_equal(sluice_status_name(SLUICE_OK), "OK");
  assert_string_equal(sluice_status_name(SLUICE_E_INTERNAL), "INTERNAL");
  assert_string_equal(sluice_status_name(1), "UNKNOWN");
  assert_string_equal(sluice_status_name(SLUICE_E_CAPACITY), "CAPACITY");
  assert_string_equal(sluice_status_name(-17), "UNKNOWN");
  assert_string_equal(sluice_status_name(INT32_MIN), "UNKNOWN");
  REFUSED(sluice_local_group_create(0, NULL), BAD, "out_group");
  sluice_error_last(NULL);
  struct {
    size_t size;
    unsigned char rest[64];
  } small = {.size = 32};
  memset(small.rest, 0xee, sizeof small.rest);
  sluice_error_last((sluice_error_info_t*)(void*)&small);
  assert_int_equal(small.size, 32);
  assert_int_equal(small.rest[32 - 8 - 1], 0); /* the text is terminated within the caller's size */
  assert_int_equal(small.rest[32 - 8], 0xee);
}
