/* Every refusal of context.h, moe.h and comm.h: the status, a message that names the offender, and that nothing was
 * lost: the next correct call gives the same bits as before, and no byte stays behind. */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "capi/test/rig.h"

static void check_refusal(sluice_status_t got, sluice_status_t want, const char* text, const char* call, int line) {
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  if (got != want || (want != SLUICE_OK && (why.status != want || strstr(why.message, text) == NULL))) {
    fail_msg("line %d: %s\n gave %s (record: %s: \"%s\")\n want %s, naming \"%s\"", line, call, sluice_status_name(got),
             sluice_status_name(why.status), why.message, sluice_status_name(want), text);
  }
}

#define REFUSED(call, status, text) check_refusal((call), (status), (text), #call, __LINE__)
#define WORKS(call)                 check_refusal((call), SLUICE_OK, "", #call, __LINE__)
#define BAD                         SLUICE_E_INVALID_ARGUMENT

typedef struct fixture_s {
  rig_t rig;
  uint64_t digest; /* of a good round */
  int64_t live_bytes;
} fixture_t;

static sluice_status_t warm_backward(fixture_t* f, int32_t halves, int wanted) {
  sluice_step_t* step = NULL;
  rig_reset(&f->rig);
  sluice_status_t status = rig_forward(&f->rig, &step);
  f->rig.backward.halves = halves == SLUICE_HALF_BOTH ? halves : SLUICE_HALF_INPUT;
  if (!wanted) f->rig.backward.grad_params = NULL;
  if (status == SLUICE_OK) status = rig_backward(&f->rig, step);
  f->rig.backward.halves = SLUICE_HALF_WEIGHT;
  if (status == SLUICE_OK && halves == SLUICE_HALF_WEIGHT) status = rig_backward(&f->rig, step);
  sluice_step_drop(step);
  return status;
}

/* Every kind of pass once: what the context keeps of them (schedules, slots) is no leak. */
static void open_with(fixture_t* f, const sluice_moe_config_t* config) {
  WORKS(rig_open(&f->rig, NULL, config));
  f->rig.forward.needs_backward = 0;
  WORKS(sluice_moe_forward(f->rig.moe, &f->rig.forward, NULL, NULL));
  if (!config->callback_experts) {
    WORKS(warm_backward(f, SLUICE_HALF_WEIGHT, 1));
    WORKS(warm_backward(f, SLUICE_HALF_BOTH, 0));
  }
  WORKS(rig_round(&f->rig, &f->digest));
  f->live_bytes = atomic_load(&f->rig.heap.live_bytes);
}

static void open_default(fixture_t* f) {
  sluice_moe_config_t config = rig_config();
  open_with(f, &config);
}

/* After a refusal: nothing kept, and the same bits as ever. */
static void check_nothing_lost(fixture_t* f) {
  uint64_t digest = 0;
  assert_int_equal(atomic_load(&f->rig.heap.live_bytes), f->live_bytes);
  WORKS(rig_round(&f->rig, &digest));
  assert_true(digest == f->digest);
  assert_int_equal(atomic_load(&f->rig.heap.live_bytes), f->live_bytes);
}

static void close_fixture(fixture_t* f) {
  rig_close(&f->rig);
  assert_int_equal(atomic_load(&f->rig.heap.live_bytes), 0);
  assert_int_equal(atomic_load(&f->rig.heap.live_blocks), 0);
}

#define FORWARD_REFUSED(f, status, text)                   \
  do {                                                     \
    sluice_step_t* step_ = (sluice_step_t*)(uintptr_t)1;   \
    REFUSED(rig_forward(&(f)->rig, &step_), status, text); \
    assert_null(step_);                                    \
    check_nothing_lost(f);                                 \
  } while (0)

/* On a fresh step, which a right backward must still accept afterwards. */
#define BACKWARD_REFUSED(f, step, status, text)           \
  do {                                                    \
    REFUSED(rig_backward(&(f)->rig, step), status, text); \
    rig_reset(&(f)->rig);                                 \
    WORKS(rig_backward(&(f)->rig, step));                 \
    sluice_step_drop(step);                               \
    check_nothing_lost(f);                                \
  } while (0)

static sluice_step_t* fresh_step(fixture_t* f) {
  sluice_step_t* step = NULL;
  rig_reset(&f->rig);
  WORKS(rig_forward(&f->rig, &step));
  return step;
}

/* ---- growing structs ---- */

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

/* Too small, far too large, dirty beyond what is known: ABI naming the struct. A zero tail is accepted, and so is the
 * oldest layout, with the defaults for what it lacks. */
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
  if (call != run_with_params) REFUSED(call(f, NULL), BAD, name);
}

static const sluice_ext_header_t stranger = {.type = 4711};

static sluice_status_t make_context(fixture_t* f, const void* config) {
  (void)f;
  sluice_context_t* context = NULL;
  sluice_status_t status = sluice_context_create(config, NULL, &context);
  sluice_context_destroy(context);
  return status;
}
static sluice_status_t make_layer(fixture_t* f, const void* config) {
  sluice_moe_t* moe = NULL;
  sluice_status_t status = sluice_moe_create(f->rig.context, config, &moe);
  sluice_moe_destroy(moe);
  return status;
}
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

static void Structs_WrongSizeOrDirtyTail_IsAbiError(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  sluice_context_config_t context;
  sluice_context_config_init(&context, sizeof context);
  context.gemm = "ref";
  check_struct(&f, &context, sizeof context, offsetof(sluice_context_config_t, memory_budget),
               "sluice_context_config_t", make_context);
  check_struct(&f, &f.rig.config, sizeof f.rig.config, offsetof(sluice_moe_config_t, restore_input),
               "sluice_moe_config_t", make_layer);
  sluice_comm_config_t comm;
  sluice_comm_config_init(&comm, sizeof comm);
  check_struct(&f, &comm, sizeof comm, offsetof(sluice_comm_config_t, timeout_ns), "sluice_comm_config_t", make_comm);
  rig_reset(&f.rig);
  check_struct(&f, &f.rig.forward, sizeof f.rig.forward, offsetof(sluice_moe_forward_args_t, save_is_counted),
               "sluice_moe_forward_args_t", run_forward);
  check_struct(&f, &f.rig.backward, sizeof f.rig.backward, sizeof f.rig.backward, "sluice_moe_backward_args_t",
               run_backward);
  check_struct(&f, &f.rig.param_table, sizeof f.rig.param_table, sizeof f.rig.param_table, "sluice_expert_tensors_t",
               run_with_params);
  check_nothing_lost(&f);
  close_fixture(&f);
}

static void ExpertStructs_WrongSizeOrDirtyTail_IsAbiError(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  rig_reset(&f.rig);
  wide_t w;
  memset(&w, 0, sizeof w);
  w.experts = f.rig.grad_table;
  w.struct_size = sizeof w.experts - 1;
  REFUSED(run_with_grads(&f, &w), SLUICE_E_ABI, "sluice_expert_tensors_t");
  w.struct_size = sizeof w.experts + 8;
  WORKS(run_with_grads(&f, &w));
  w.bytes[sizeof w.experts] = 1;
  REFUSED(run_with_grads(&f, &w), SLUICE_E_ABI, "sluice_expert_tensors_t");
  check_nothing_lost(&f);
  close_fixture(&f);

  sluice_moe_config_t config = rig_config();
  config.callback_experts = 1;
  open_with(&f, &config);
  rig_reset(&f.rig);
  check_struct(&f, &f.rig.callbacks, sizeof f.rig.callbacks, sizeof f.rig.callbacks, "sluice_expert_callbacks_t",
               run_with_callbacks);
  check_nothing_lost(&f);
  close_fixture(&f);
}

static void Structs_UnknownExtension_IsNamed(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  sluice_context_config_t context;
  sluice_context_config_init(&context, sizeof context);
  context.next = &stranger;
  REFUSED(make_context(&f, &context), SLUICE_E_ABI, "4711");
  sluice_moe_config_t config = rig_config();
  config.next = &stranger;
  REFUSED(make_layer(&f, &config), SLUICE_E_ABI, "4711");
  sluice_comm_config_t comm;
  sluice_comm_config_init(&comm, sizeof comm);
  comm.next = &stranger;
  REFUSED(make_comm(&f, &comm), BAD, "4711");
  f.rig.forward.next = &stranger;
  FORWARD_REFUSED(&f, SLUICE_E_ABI, "4711");
  sluice_step_t* step = fresh_step(&f);
  f.rig.backward.next = &stranger;
  BACKWARD_REFUSED(&f, step, SLUICE_E_ABI, "4711");
  close_fixture(&f);
}

/* Shorter structs are for later versions; init itself must never write beyond what it is told. */
static void Init_ShortOrNull_WritesOnlyThatMuch(void** state) {
  (void)state;
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

static void Stats_WrongSize_IsAbiErrorAndShortIsFilled(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  wide_t w;
  memset(&w, 0, sizeof w);
  REFUSED(sluice_context_get_stats(f.rig.context, 0, &w.stats), SLUICE_E_ABI, "sluice_context_stats_t");
  w.struct_size = (size_t)0xeeeeeeeeeeeeu;
  REFUSED(sluice_context_get_stats(f.rig.context, 0, &w.stats), SLUICE_E_ABI, "sluice_context_stats_t");
  memset(&w, 0xee, sizeof w);
  w.struct_size = 24; /* up to peak_bytes */
  WORKS(sluice_context_get_stats(f.rig.context, 0, &w.stats));
  assert_int_equal(w.struct_size, 24);
  assert_true(w.stats.peak_bytes >= w.stats.current_bytes && w.stats.current_bytes > 0);
  for (size_t i = 24; i < sizeof w; ++i) assert_int_equal(w.bytes[i], 0xee);
  memset(&w, 0xee, sizeof w);
  w.struct_size = sizeof w; /* a newer header's */
  WORKS(sluice_context_get_stats(f.rig.context, 0, &w.stats));
  assert_string_equal(w.stats.gemm, "ref");
  for (size_t i = sizeof w.stats; i < sizeof w; ++i) assert_int_equal(w.bytes[i], 0);
  REFUSED(sluice_context_get_stats(NULL, 0, &w.stats), BAD, "context is NULL");
  REFUSED(sluice_context_get_stats(f.rig.context, 0, NULL), BAD, "out_stats is NULL");
  check_nothing_lost(&f);
  close_fixture(&f);
}

/* ---- context ---- */

static void ContextCreate_BadConfig_IsRefused(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  sluice_context_config_t good, c;
  sluice_context_config_init(&good, sizeof good);
  good.gemm = "ref";
  good.allocate = heap_allocate, good.release = heap_release, good.allocate_user = &f.rig.heap;
  REFUSED(sluice_context_create(&good, NULL, NULL), BAD, "out_context is NULL");
  c = good, c.device_type = 3;
  REFUSED(make_context(&f, &c), SLUICE_E_UNSUPPORTED, "device_type is 3");
  c.device_type = SLUICE_DEVICE_CUDA;
  REFUSED(make_context(&f, &c), SLUICE_E_UNSUPPORTED, "gemm is \"ref\"");
  c.gemm = NULL, c.device_id = -1;
  REFUSED(make_context(&f, &c), BAD, "device_id is -1");
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == NULL) { /* where there is one, cuda_device_test's fakes say the same */
    c.device_id = 0;
    REFUSED(make_context(&f, &c), SLUICE_E_NOT_FOUND, "no NVIDIA driver: libcuda.so.1");
  } else {
    dlclose(driver);
  }
  c = good, c.device_id = 1;
  REFUSED(make_context(&f, &c), BAD, "device_id is 1");
  c = good, c.release = NULL;
  REFUSED(make_context(&f, &c), BAD, "allocate and release");
  c = good, c.allocate = NULL;
  REFUSED(make_context(&f, &c), BAD, "allocate and release");
  c = good, c.gemm = "cleverness";
  REFUSED(make_context(&f, &c), BAD, "cleverness");
  c = good, c.gemm = "host";
  REFUSED(make_context(&f, &c), BAD, "host");
  c = good, c.gemm = "blas", c.gemm_library = "/nowhere/libblas.so";
  REFUSED(make_context(&f, &c), SLUICE_E_NOT_FOUND, "/nowhere/libblas.so");
  c = good, c.gemm = "onednn", c.gemm_library = "/nowhere/libdnnl.so";
  REFUSED(make_context(&f, &c), SLUICE_E_NOT_FOUND, "/nowhere/libdnnl.so");
  WORKS(make_context(&f, &good));
  check_nothing_lost(&f);
  close_fixture(&f);
  sluice_context_destroy(NULL);
}

static void Trace_BadArguments_AreRefused(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  sluice_trace_event_t events[4];
  int64_t count = -1;
  REFUSED(sluice_context_trace(NULL, 4), BAD, "context is NULL");
  REFUSED(sluice_context_trace(f.rig.context, -1), BAD, "capacity is -1");
  REFUSED(sluice_context_trace(f.rig.context, INT64_MAX), BAD, "capacity is 9223372036854775807");
  REFUSED(sluice_context_take_trace(NULL, events, 4, &count), BAD, "context");
  REFUSED(sluice_context_take_trace(f.rig.context, NULL, 4, &count), BAD, "out_events");
  REFUSED(sluice_context_take_trace(f.rig.context, events, 4, NULL), BAD, "out_count");
  REFUSED(sluice_context_take_trace(f.rig.context, events, -4, &count), BAD, "negative");
  WORKS(sluice_context_take_trace(f.rig.context, NULL, 0, &count));
  assert_int_equal(count, 0);
  WORKS(sluice_context_trace(f.rig.context, 3)); /* a ring smaller than a pass keeps the newest */
  WORKS(rig_round(&f.rig, NULL));
  WORKS(sluice_context_take_trace(f.rig.context, events, 4, &count));
  assert_int_equal(count, 3);
  assert_string_equal(events[2].op, "pass");
  WORKS(sluice_context_trace(f.rig.context, 0));
  check_nothing_lost(&f);
  close_fixture(&f);
}

/* ---- layer ---- */

static void MoeCreate_BadConfig_IsRefused(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  sluice_moe_t* moe = (sluice_moe_t*)(uintptr_t)1;
  sluice_moe_config_t good = rig_config(), c;
  REFUSED(sluice_moe_create(NULL, &good, &moe), BAD, "context is NULL");
  assert_null(moe);
  REFUSED(sluice_moe_create(f.rig.context, &good, NULL), BAD, "out_moe is NULL");
#define FIELD(member, value, text) \
  c = good, c.member = (value);    \
  REFUSED(make_layer(&f, &c), BAD, text)
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
  FIELD(dtype, 0, "dtype is 0");
  FIELD(dtype, SLUICE_DTYPE_I32, "dtype is 5");
  FIELD(activation, 9, "activation is 9");
  FIELD(activation, -1, "activation is -1");
  FIELD(num_chunks, -1, "num_chunks is -1");
  FIELD(num_chunks, 257, "num_chunks is 257");
  FIELD(wgrad_mode, 2, "wgrad_mode is 2");
  FIELD(gated, 3, "gated is 3; known are no (0), halves (1) and interleaved (2)");
  FIELD(bias, -1, "bias and callback_experts are 0 or 1, found -1");
  FIELD(callback_experts, 3, "found 1, 3");
  FIELD(swiglu_alpha, 0.0f, "swiglu_alpha is 0");
  FIELD(swiglu_limit, -1.0f, "swiglu_limit -1");
  FIELD(swiglu_offset, (float)NAN, "swiglu_offset nan");
  c = good, c.gated = 0, c.activation = SLUICE_ACTIVATION_SWIGLU;
  REFUSED(make_layer(&f, &c), BAD, "swiglu needs a gate");
  const int32_t beyond[] = {0, 0, 1, 0}, negative[] = {0, -1, 0, 0};
  FIELD(expert_rank, beyond, "expert_rank[2] is 1; the group has 1 ranks");
  FIELD(expert_rank, negative, "expert_rank[1] is -1");
  c = good, c.layer_id = 77, c.top_k = 0;
  REFUSED(make_layer(&f, &c), BAD, "layer 77");
#undef FIELD
  c = good, c.callback_experts = 1, c.hidden_width = 0;
  WORKS(make_layer(&f, &c));
  c = good, c.num_experts = 1 << 20; /* the largest is made at once */
  WORKS(make_layer(&f, &c));
  assert_int_equal(sluice_moe_num_local_experts(NULL), 0);
  sluice_moe_destroy(NULL);
  check_nothing_lost(&f);
  close_fixture(&f);
}

static void MoeCreate_ExpertsNotDivisibleByRanks_NeedsATable(void** state) {
  (void)state;
  sluice_local_group_t* group = NULL;
  WORKS(sluice_local_group_create(3, &group));
  sluice_comm_config_t comm_config;
  sluice_comm_config_init(&comm_config, sizeof comm_config);
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

/* ---- tensors of the calls ---- */

typedef enum bend_e {
  BEND_DEVICE,
  BEND_CODE,
  BEND_LANES,
  BEND_NDIM,
  BEND_SHAPE_NULL,
  BEND_NEGATIVE,
  BEND_ROWS,
  BEND_COLUMNS,
  BEND_DATA,
  BEND_COUNT
} bend_t;

static void bend(sluice_tensor_t* t, int kind) {
  switch (kind) {
    case BEND_DEVICE: t->device_type = SLUICE_DEVICE_CUDA; break;
    case BEND_CODE: t->type_code = SLUICE_TYPE_UINT; break;
    case BEND_LANES: t->type_lanes = 4; break;
    case BEND_NDIM: t->ndim = t->ndim == 2 ? 1 : 2; break;
    case BEND_SHAPE_NULL: t->shape = NULL; break;
    case BEND_NEGATIVE: t->shape[0] = -2; break;
    case BEND_ROWS: t->shape[0] += 1; break;
    case BEND_COLUMNS: t->shape[t->ndim - 1] += 1; break;
    case BEND_DATA: t->data = NULL; break;
    default: break;
  }
}

typedef struct tensor_case_s {
  const char* name;
  size_t argument; /* offset of the pointer in the args */
  size_t tensor;   /* offset of the tensor in the rig */
  int is_optional; /* NULL: not wanted */
  int leads;       /* the others are compared with its number of rows: then another tensor is named */
  int has_rows;    /* unit column stride is asked for */
} tensor_case_t;

#define FORWARD_CASE(member, name_, tensor_, leads_, rows_) \
  { name_, offsetof(sluice_moe_forward_args_t, member), offsetof(rig_t, tensor_), 0, leads_, rows_ }
static const tensor_case_t forward_tensors[] = {
    FORWARD_CASE(tokens, "tokens", tokens, 1, 1),
    FORWARD_CASE(expert_ids, "expert_ids", ids, 0, 0),
    FORWARD_CASE(route_weights, "route_weights", weights, 0, 0),
    FORWARD_CASE(out_tokens, "out_tokens", out, 0, 1),
};
#define BACKWARD_CASE(member, name_, tensor_, optional_, leads_, rows_) \
  { name_, offsetof(sluice_moe_backward_args_t, member), offsetof(rig_t, tensor_), optional_, leads_, rows_ }
static const tensor_case_t backward_tensors[] = {
    BACKWARD_CASE(grad_out, "grad_out", grad_out, 0, 1, 1),
    BACKWARD_CASE(tokens, "tokens", tokens, 0, 0, 1),
    BACKWARD_CASE(route_weights, "route_weights", weights, 0, 0, 0),
    BACKWARD_CASE(grad_tokens, "grad_tokens", grad_tokens, 1, 0, 1),
    BACKWARD_CASE(grad_route_weights, "grad_route_weights", grad_weights, 1, 0, 0),
};
#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static void forget(void* args, size_t argument) { memset((char*)args + argument, 0, sizeof(void*)); }
static rig_tensor_t* tensor_at(rig_t* rig, size_t at) { return (rig_tensor_t*)(void*)((char*)rig + at); }

static void Forward_BadTensor_IsNamed(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  for (int i = 0; i < COUNT(forward_tensors); ++i) {
    const tensor_case_t* t = &forward_tensors[i];
    rig_reset(&f.rig);
    forget(&f.rig.forward, t->argument);
    FORWARD_REFUSED(&f, BAD, t->name);
    for (int kind = 0; kind < BEND_COUNT; ++kind) {
      rig_reset(&f.rig);
      bend(&tensor_at(&f.rig, t->tensor)->tensor, kind);
      FORWARD_REFUSED(&f, BAD, kind == BEND_ROWS && t->leads ? "expert_ids" : t->name);
    }
    if (!t->has_rows) continue;
    rig_reset(&f.rig);
    tensor_at(&f.rig, t->tensor)->strides[1] = 2;
    FORWARD_REFUSED(&f, BAD, t->name);
    rig_reset(&f.rig);
    tensor_at(&f.rig, t->tensor)->strides[0] = -5;
    FORWARD_REFUSED(&f, BAD, t->name);
  }
  rig_reset(&f.rig);
  f.rig.out.strides[0] = 4; /* rows would overlap */
  FORWARD_REFUSED(&f, BAD, "out_tokens");
  rig_reset(&f.rig);
  f.rig.tokens.tensor.type_code = SLUICE_TYPE_BFLOAT, f.rig.tokens.tensor.type_bits = 16;
  FORWARD_REFUSED(&f, BAD, "tokens: dtype is bf16, want f32");
  rig_reset(&f.rig);
  f.rig.ids.tensor.type_code = SLUICE_TYPE_FLOAT;
  FORWARD_REFUSED(&f, BAD, "expert_ids: dtype is f32");
  rig_reset(&f.rig);
  f.rig.weights.tensor.type_bits = 64;
  FORWARD_REFUSED(&f, BAD, "route_weights: dtype is f64");
  close_fixture(&f);
}

static void Backward_BadTensor_IsNamed(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  for (int i = 0; i < COUNT(backward_tensors); ++i) {
    const tensor_case_t* t = &backward_tensors[i];
    sluice_step_t* step = fresh_step(&f);
    if (!t->is_optional) {
      forget(&f.rig.backward, t->argument);
      BACKWARD_REFUSED(&f, step, BAD, t->name);
    } else {
      sluice_step_drop(step);
    }
    for (int kind = 0; kind < BEND_COUNT; ++kind) {
      step = fresh_step(&f);
      bend(&tensor_at(&f.rig, t->tensor)->tensor, kind);
      BACKWARD_REFUSED(&f, step, BAD, kind == BEND_ROWS && t->leads ? "tokens" : t->name);
    }
    if (!t->has_rows) continue;
    step = fresh_step(&f);
    tensor_at(&f.rig, t->tensor)->strides[1] = 3;
    BACKWARD_REFUSED(&f, step, BAD, t->name);
  }
  sluice_step_t* step = fresh_step(&f);
  f.rig.grad_tokens.strides[0] = 0;
  BACKWARD_REFUSED(&f, step, BAD, "grad_tokens");
  /* All of another T: only the step knows. */
  step = fresh_step(&f);
  rig_tensor_t* all[] = {&f.rig.grad_out, &f.rig.tokens, &f.rig.weights, &f.rig.grad_tokens, &f.rig.grad_weights};
  for (int i = 0; i < COUNT(all); ++i) all[i]->shape[0] = 4;
  BACKWARD_REFUSED(&f, step, BAD, "grad_out has 4 rows, but this step's forward had 6 tokens");
  close_fixture(&f);
}

static void Backward_UnwantedGradients_AreNotWritten(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  sluice_step_t* step = fresh_step(&f);
  f.rig.backward.grad_tokens = f.rig.backward.grad_route_weights = NULL;
  f.rig.backward.grad_params = NULL;
  WORKS(rig_backward(&f.rig, step));
  sluice_step_drop(step);
  assert_true(isnan(((float*)f.rig.grad_tokens.tensor.data)[0]));
  assert_true(isnan(((float*)f.rig.grads[0][0].tensor.data)[0]));
  check_nothing_lost(&f);
  close_fixture(&f);
}

static void Parameters_Bad_AreNamedWithTheirExpert(void** state) {
  (void)state;
  static const char* const names[] = {"w1", "w3", "w2", "b1", "b3", "b2"};
  fixture_t f;
  open_default(&f);
  rig_reset(&f.rig);
  f.rig.forward.params = NULL;
  FORWARD_REFUSED(&f, BAD, "layer 3: params is NULL");
  for (int kind = 0; kind < RIG_NUM_PARAMS; ++kind) {
    char text[32];
    snprintf(text, sizeof text, "params.%s", names[kind]);
    rig_reset(&f.rig);
    memset((char*)&f.rig.param_table + sizeof(size_t) + sizeof(void*) * (size_t)kind, 0, sizeof(void*));
    FORWARD_REFUSED(&f, BAD, text);
    snprintf(text, sizeof text, "params.%s[1]", names[kind]);
    for (int how = 0; how < BEND_COUNT; ++how) {
      rig_reset(&f.rig);
      f.rig.param_list[kind][1].shape = f.rig.params[kind][1].shape;
      bend(&f.rig.param_list[kind][1], how);
      FORWARD_REFUSED(&f, BAD, text);
    }
    rig_reset(&f.rig);
    f.rig.params[kind][1].strides[0] = kind < 3 ? 3 : 2; /* overlapping rows; gaps in a bias */
    FORWARD_REFUSED(&f, BAD, text);
    if (kind >= 3) continue;
    rig_reset(&f.rig);
    f.rig.params[kind][1].strides[0] = 20, f.rig.params[kind][1].strides[1] = 2;
    FORWARD_REFUSED(&f, BAD, text);
  }
  close_fixture(&f);
}

static void Gradients_Bad_AreNamedWithTheirExpert(void** state) {
  (void)state;
  static const char* const names[] = {"w1", "w3", "w2", "b1", "b3", "b2"};
  fixture_t f;
  open_default(&f);
  for (int kind = 0; kind < RIG_NUM_PARAMS; ++kind) {
    char text[40];
    snprintf(text, sizeof text, "grad_params.%s", names[kind]);
    sluice_step_t* step = fresh_step(&f);
    memset((char*)&f.rig.grad_table + sizeof(size_t) + sizeof(void*) * (size_t)kind, 0, sizeof(void*));
    BACKWARD_REFUSED(&f, step, BAD, text);
    snprintf(text, sizeof text, "grad_params.%s[2]", names[kind]);
    step = fresh_step(&f);
    f.rig.grad_list[kind][2].type_bits = 64;
    BACKWARD_REFUSED(&f, step, BAD, text);
    step = fresh_step(&f);
    f.rig.grad_list[kind][2].type_bits = 16;
    BACKWARD_REFUSED(&f, step, BAD, text);
    step = fresh_step(&f);
    f.rig.grads[kind][2].strides[0] = 0;
    BACKWARD_REFUSED(&f, step, BAD, text);
  }
  sluice_step_t* step = fresh_step(&f);
  f.rig.backward.params = NULL;
  BACKWARD_REFUSED(&f, step, BAD, "params");
  close_fixture(&f);

  /* One dtype per kind, and one for all matrices: bf16 layers take bf16 or f32 gradients. */
  sluice_moe_config_t config = rig_config();
  config.dtype = SLUICE_DTYPE_BF16, config.bias = 0;
  open_with(&f, &config);
  step = fresh_step(&f);
  static float wide[64];
  f.rig.grad_list[0][1].type_code = SLUICE_TYPE_FLOAT, f.rig.grad_list[0][1].type_bits = 32;
  f.rig.grad_list[0][1].data = wide;
  BACKWARD_REFUSED(&f, step, BAD, "grad_params.w1[1]: dtype is f32, but that of grad_params.w1[0] is bf16");
  step = fresh_step(&f);
  static float wider[4][64];
  for (int e = 0; e < 4; ++e) {
    f.rig.grad_list[2][e].type_code = SLUICE_TYPE_FLOAT, f.rig.grad_list[2][e].type_bits = 32;
    f.rig.grad_list[2][e].data = wider[e];
  }
  BACKWARD_REFUSED(&f, step, BAD, "w1 is bf16 and w2 is f32");
  close_fixture(&f);
}

static void Callbacks_Missing_AreRefused(void** state) {
  (void)state;
  fixture_t f;
  sluice_moe_config_t config = rig_config();
  config.callback_experts = 1;
  open_with(&f, &config);
  rig_reset(&f.rig);
  f.rig.callbacks.forward = NULL;
  FORWARD_REFUSED(&f, BAD, "forward is NULL");
  rig_reset(&f.rig);
  f.rig.callbacks.backward = NULL;
  FORWARD_REFUSED(&f, BAD, "backward is NULL");
  sluice_step_t* step = fresh_step(&f);
  f.rig.callbacks.backward = NULL;
  BACKWARD_REFUSED(&f, step, BAD, "backward is NULL");
  step = fresh_step(&f);
  f.rig.backward.halves = SLUICE_HALF_INPUT;
  BACKWARD_REFUSED(&f, step, SLUICE_E_UNSUPPORTED, "halves");
  /* A failing callback: nothing kept, the next call is free. */
  rig_reset(&f.rig);
  f.rig.callback_failure = 42;
  FORWARD_REFUSED(&f, SLUICE_E_FOREIGN, "expert 0 failed in forward of chunk 0 (it returned 42)");
  step = fresh_step(&f);
  f.rig.callback_failure = 43;
  BACKWARD_REFUSED(&f, step, SLUICE_E_FOREIGN, "failed in backward of chunk 0 (it returned 43)");
  close_fixture(&f);
}

/* ---- values ---- */

static void Ids_OutOfRange_NameTheEntry(void** state) {
  (void)state;
  const int64_t wrong[] = {4, -2, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, (int64_t)1 << 32};
  fixture_t f;
  open_default(&f);
  for (int i = 0; i < COUNT(wrong); ++i) {
    char text[96];
    snprintf(text, sizeof text, "layer 3: expert_ids[4, 1] is %lld", (long long)wrong[i]);
    rig_reset(&f.rig);
    int64_t wide[12];
    for (int at = 0; at < 12; ++at) wide[at] = ((int32_t*)f.rig.ids.tensor.data)[at];
    wide[9] = wrong[i];
    void* narrow = f.rig.ids.tensor.data;
    if (wrong[i] == (int32_t)wrong[i]) {
      ((int32_t*)narrow)[9] = (int32_t)wrong[i];
      FORWARD_REFUSED(&f, BAD, text);
      rig_reset(&f.rig);
    }
    f.rig.ids.tensor.data = wide, f.rig.ids.tensor.type_bits = 64;
    sluice_step_t* step = NULL;
    REFUSED(rig_forward(&f.rig, &step), BAD, text);
    f.rig.ids.tensor.data = narrow;
    check_nothing_lost(&f);
  }
  close_fixture(&f);
}

static void RouteWeights_NaNAndInfinity_PassThrough(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  rig_reset(&f.rig);
  ((float*)f.rig.weights.tensor.data)[2 * 2] = NAN;      /* token 2 */
  ((float*)f.rig.weights.tensor.data)[4 * 2] = INFINITY; /* token 4 */
  sluice_step_t* step = NULL;
  WORKS(rig_forward(&f.rig, &step));
  const float* out = f.rig.out.tensor.data;
  for (int64_t t = 0; t < 6; ++t) {
    for (int64_t m = 0; m < 5; ++m) {
      if (t == 2) assert_true(isnan(out[t * 5 + m]));
      if (t == 4) assert_false(isfinite(out[t * 5 + m]));
      if (t != 2 && t != 4) assert_true(isfinite(out[t * 5 + m]));
    }
  }
  WORKS(rig_backward(&f.rig, step));
  for (int64_t m = 0; m < 5; ++m) assert_true(isfinite(((float*)f.rig.grad_tokens.tensor.data)[m]));
  sluice_step_drop(step);
  check_nothing_lost(&f);
  close_fixture(&f);
}

static void Calls_StreamHandlesFlags_AreChecked(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  rig_reset(&f.rig);
  sluice_step_t* step = NULL;
  int dummy;
  REFUSED(sluice_moe_forward(NULL, &f.rig.forward, NULL, &step), BAD, "moe is NULL");
  REFUSED(sluice_moe_forward(f.rig.moe, &f.rig.forward, &dummy, &step), BAD, "stream must be NULL");
  REFUSED(sluice_moe_forward(f.rig.moe, &f.rig.forward, NULL, NULL), BAD, "out_step is NULL");
  f.rig.forward.local_status = SLUICE_E_OVER_BUDGET;
  f.rig.forward.local_message = "the host's own reason";
  FORWARD_REFUSED(&f, SLUICE_E_OVER_BUDGET, "the host's own reason");
  rig_reset(&f.rig);
  f.rig.forward.local_status = 5; /* no status of ours */
  FORWARD_REFUSED(&f, SLUICE_E_FOREIGN, "no reason given");

  rig_reset(&f.rig);
  f.rig.forward.needs_backward = 0;
  WORKS(sluice_moe_forward(f.rig.moe, &f.rig.forward, NULL, NULL));
  step = (sluice_step_t*)(uintptr_t)1;
  WORKS(rig_forward(&f.rig, &step));
  assert_null(step);
  check_nothing_lost(&f);

  REFUSED(sluice_moe_backward(NULL, step, &f.rig.backward, NULL), BAD, "moe is NULL");
  REFUSED(rig_backward(&f.rig, NULL), BAD, "step is NULL");
  step = fresh_step(&f);
  REFUSED(sluice_moe_backward(f.rig.moe, step, &f.rig.backward, &dummy), BAD, "stream must be NULL");
  f.rig.backward.local_status = BAD, f.rig.backward.local_message = "changed in place";
  BACKWARD_REFUSED(&f, step, BAD, "changed in place");
  const int32_t halves[] = {0, 4, -1};
  for (int i = 0; i < COUNT(halves); ++i) {
    step = fresh_step(&f);
    f.rig.backward.halves = halves[i];
    BACKWARD_REFUSED(&f, step, BAD, "halves is");
  }
  step = fresh_step(&f);
  f.rig.backward.grad_mode = 2;
  BACKWARD_REFUSED(&f, step, BAD, "grad_mode is 2");
  step = fresh_step(&f);
  f.rig.backward.halves = SLUICE_HALF_WEIGHT, f.rig.backward.grad_params = NULL;
  BACKWARD_REFUSED(&f, step, BAD, "the weight half needs grad_params");
  close_fixture(&f);
}

/* ---- steps ---- */

static void Backward_InTheWrongOrder_IsStateError(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  sluice_step_t* step = fresh_step(&f);
  WORKS(rig_backward(&f.rig, step));
  REFUSED(rig_backward(&f.rig, step), SLUICE_E_STATE, "layer 3: this step has had its backward already");
  f.rig.backward.halves = SLUICE_HALF_WEIGHT;
  REFUSED(rig_backward(&f.rig, step), SLUICE_E_STATE, "has had its backward already");
  sluice_step_drop(step);
  check_nothing_lost(&f);

  step = fresh_step(&f);
  f.rig.backward.halves = SLUICE_HALF_WEIGHT;
  REFUSED(rig_backward(&f.rig, step), SLUICE_E_STATE, "has not had its input half yet");
  f.rig.backward.halves = SLUICE_HALF_INPUT;
  WORKS(rig_backward(&f.rig, step));
  REFUSED(rig_backward(&f.rig, step), SLUICE_E_STATE, "only the weight half is open");
  f.rig.backward.halves = SLUICE_HALF_BOTH;
  REFUSED(rig_backward(&f.rig, step), SLUICE_E_STATE, "only the weight half is open");
  /* The weight half reads none of the row tensors, garbage included. */
  sluice_tensor_t garbage;
  memset(&garbage, 0xee, sizeof garbage);
  garbage.shape = NULL;
  f.rig.backward.grad_out = f.rig.backward.tokens = &garbage;
  f.rig.backward.halves = SLUICE_HALF_WEIGHT;
  WORKS(rig_backward(&f.rig, step));
  sluice_step_drop(step);
  check_nothing_lost(&f);

  /* Dropped between the halves: the gradient rows that were kept go too. */
  step = fresh_step(&f);
  f.rig.backward.halves = SLUICE_HALF_INPUT;
  WORKS(rig_backward(&f.rig, step));
  sluice_step_drop(step);
  sluice_step_drop(NULL);
  check_nothing_lost(&f);
  close_fixture(&f);
}

static void Backward_StepOfAnotherLayer_NamesBoth(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  sluice_moe_config_t config = rig_config();
  config.layer_id = 9;
  sluice_moe_t* other = NULL;
  WORKS(sluice_moe_create(f.rig.context, &config, &other));
  sluice_step_t* step = fresh_step(&f);
  REFUSED(sluice_moe_backward(other, step, &f.rig.backward, NULL), BAD, "layer 9: this step is of layer 3");
  WORKS(rig_backward(&f.rig, step));
  /* The step keeps its layer alive. */
  sluice_moe_destroy(other);
  sluice_step_drop(step);
  check_nothing_lost(&f);
  close_fixture(&f);
}

typedef struct saved_s {
  void* data[SLUICE_SAVED_COUNT];
  uint64_t bytes[SLUICE_SAVED_COUNT];
  int32_t refuse; /* this buffer */
} saved_t;

static void* save(void* user, int32_t which, uint64_t bytes) {
  saved_t* saved = user;
  if (saved->refuse == which) return NULL;
  saved->bytes[which] = bytes;
  free(saved->data[which]);
  saved->data[which] = aligned_alloc(64, (bytes + 127) / 64 * 64);
  return saved->data[which];
}

static void free_saved(saved_t* saved) {
  for (int i = 0; i < SLUICE_SAVED_COUNT; ++i) free(saved->data[i]);
}

static void Restore_DamagedOrForeignBuffers_AreRefused(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  saved_t saved = {.refuse = -1};
  rig_reset(&f.rig);
  f.rig.forward.save = save, f.rig.forward.save_user = &saved;
  sluice_step_t* step = NULL;
  WORKS(rig_forward(&f.rig, &step));
  sluice_step_drop(step);
  sluice_moe_t* moe = f.rig.moe;
  REFUSED(sluice_step_restore(moe, saved.data, saved.bytes, NULL), BAD, "out_step is NULL");
  step = (sluice_step_t*)(uintptr_t)1;
  REFUSED(sluice_step_restore(NULL, saved.data, saved.bytes, &step), BAD, "moe is NULL");
  assert_null(step);
  REFUSED(sluice_step_restore(moe, NULL, saved.bytes, &step), BAD, "saved is NULL");
  REFUSED(sluice_step_restore(moe, saved.data, NULL, &step), BAD, "saved_bytes is NULL");

  unsigned char* meta = saved.data[SLUICE_SAVED_META];
  for (uint64_t at = 0; at < saved.bytes[SLUICE_SAVED_META]; ++at) {
    for (int bit = 0; bit < 8; bit += 7) {
      meta[at] ^= (unsigned char)(1 << bit);
      REFUSED(sluice_step_restore(moe, saved.data, saved.bytes, &step), BAD, "layer 3: the saved buffer META");
      meta[at] ^= (unsigned char)(1 << bit);
    }
  }
  for (int i = 0; i < SLUICE_SAVED_HOST_INPUT; ++i) { /* nothing is offloaded */
    saved_t bent = saved;
    bent.bytes[i] -= 1;
    REFUSED(sluice_step_restore(moe, bent.data, bent.bytes, &step), BAD,
            i == 0   ? "META"
            : i == 1 ? "buffer INPUT"
                     : "buffer MIDDLE");
    bent = saved, bent.data[i] = NULL;
    REFUSED(sluice_step_restore(moe, bent.data, bent.bytes, &step), BAD,
            i == 0   ? "META"
            : i == 1 ? "buffer INPUT"
                     : "buffer MIDDLE");
    bent = saved, bent.bytes[i] = 0;
    REFUSED(sluice_step_restore(moe, bent.data, bent.bytes, &step), BAD,
            i == 0   ? "META"
            : i == 1 ? "buffer INPUT"
                     : "buffer MIDDLE");
  }
  sluice_moe_config_t config = rig_config();
  config.hidden_width = 8, config.layer_id = 9;
  sluice_moe_t* other = NULL;
  WORKS(sluice_moe_create(f.rig.context, &config, &other));
  REFUSED(sluice_step_restore(other, saved.data, saved.bytes, &step), BAD, "layer 9");
  sluice_moe_destroy(other);

  /* Damaged between restore and backward: found again, and mended it works. */
  WORKS(sluice_step_restore(moe, saved.data, saved.bytes, &step));
  meta[saved.bytes[SLUICE_SAVED_META] - 1] ^= 0x40;
  REFUSED(rig_backward(&f.rig, step), BAD, "META is damaged");
  REFUSED(sluice_step_info(step, NULL, NULL), BAD, "META is damaged");
  meta[saved.bytes[SLUICE_SAVED_META] - 1] ^= 0x40;
  int32_t chunks = 0;
  int64_t rows[4] = {-1, -1, -1, -1};
  WORKS(sluice_step_info(step, &chunks, rows));
  assert_int_equal(chunks, 2);
  assert_int_equal(rows[0] + rows[1] + rows[2] + rows[3], 12);
  REFUSED(sluice_step_info(NULL, &chunks, rows), BAD, "step is NULL");
  WORKS(rig_backward(&f.rig, step));
  sluice_step_drop(step);
  check_nothing_lost(&f);
  free_saved(&saved);
  close_fixture(&f);
}

static void Forward_HostRefusesASavedBuffer_IsNoMemory(void** state) {
  (void)state;
  static const char* const names[] = {"META", "INPUT", "MIDDLE"};
  fixture_t f;
  open_default(&f);
  for (int32_t which = 0; which < SLUICE_SAVED_HOST_INPUT; ++which) { /* nothing is offloaded */
    saved_t saved = {.refuse = which};
    rig_reset(&f.rig);
    f.rig.forward.save = save, f.rig.forward.save_user = &saved;
    FORWARD_REFUSED(&f, SLUICE_E_NO_MEMORY, names[which]);
    free_saved(&saved);
  }
  close_fixture(&f);
}

/* ---- threads, processes ---- */

typedef struct busy_s {
  fixture_t* f;
  sluice_step_t* step; /* an older one */
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

static void Context_SecondThreadInside_IsBusy(void** state) {
  (void)state;
  static const char* const names[] = {"sluice_moe_forward", "sluice_moe_backward", "sluice_moe_create",
                                      "sluice_context_get_stats", "sluice_context_take_trace"};
  fixture_t f;
  sluice_moe_config_t config = rig_config();
  config.callback_experts = 1;
  open_with(&f, &config);
  busy_t busy = {.f = &f, .step = fresh_step(&f)};
  rig_reset(&f.rig);
  sluice_expert_callbacks_t callbacks = f.rig.callbacks;
  callbacks.user = &busy, callbacks.forward = call_from_inside;
  f.rig.forward.callbacks = &callbacks;
  sluice_step_t* step = NULL;
  WORKS(rig_forward(&f.rig, &step));
  for (int i = 0; i < 5; ++i) {
    assert_int_equal(busy.status[i], SLUICE_E_BUSY);
    assert_non_null(strstr(busy.message[i], names[i]));
  }
  rig_reset(&f.rig);
  WORKS(rig_backward(&f.rig, step));
  WORKS(rig_backward(&f.rig, busy.step)); /* the step that was refused is as it was */
  sluice_step_drop(step);
  sluice_step_drop(busy.step);
  check_nothing_lost(&f);
  close_fixture(&f);
}

#define CHILD_WANTS(condition) \
  if (!(condition)) _exit(__LINE__ % 200 + 1)
#define CHILD_STATE(call) CHILD_WANTS((call) == SLUICE_E_STATE && strstr(last_message(), "fork") != NULL)

static void child_main(fixture_t* f, sluice_step_t* step, sluice_local_group_t* group, sluice_comm_t* comm,
                       saved_t* saved) {
  alarm(20); /* a hang ends as a signal */
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
  sluice_comm_config_t comm_config;
  sluice_comm_config_init(&comm_config, sizeof comm_config);
  comm_config.rank = 1, comm_config.world_size = 2;
  CHILD_STATE(sluice_comm_create_local(group, &comm_config, &made));
  sluice_comm_abort(comm);
  sluice_comm_destroy(comm);
  sluice_local_group_destroy(group);
  sluice_step_drop(step);
  int64_t live = atomic_load(&rig->heap.live_bytes);
  sluice_moe_destroy(rig->moe);
  sluice_context_destroy(rig->context);
  CHILD_WANTS(atomic_load(&rig->heap.live_bytes) == live); /* the parent's memory is left alone */
  /* A context of the child's own works. */
  fixture_t own;
  sluice_moe_config_t config = rig_config();
  CHILD_WANTS(rig_open(&own.rig, NULL, &config) == SLUICE_OK);
  CHILD_WANTS(rig_round(&own.rig, &own.digest) == SLUICE_OK && own.digest == f->digest);
  rig_close(&own.rig);
  _exit(0);
}

static void Fork_HandlesInTheChild_AreInert(void** state) {
  (void)state;
  fixture_t f;
  open_default(&f);
  sluice_local_group_t* group = NULL;
  sluice_comm_t* comm = NULL;
  sluice_comm_config_t comm_config;
  sluice_comm_config_init(&comm_config, sizeof comm_config);
  comm_config.world_size = 2;
  WORKS(sluice_local_group_create(2, &group));
  WORKS(sluice_comm_create_local(group, &comm_config, &comm));
  saved_t saved = {.refuse = -1};
  rig_reset(&f.rig);
  f.rig.forward.save = save, f.rig.forward.save_user = &saved;
  sluice_step_t* step = NULL;
  WORKS(rig_forward(&f.rig, &step));
  fflush(NULL);
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) child_main(&f, step, group, comm, &saved);
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    fail_msg("child: %s %d (line %% 200 + 1)", WIFEXITED(status) ? "exit" : "signal",
             WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
  }
  WORKS(rig_backward(&f.rig, step));
  sluice_step_drop(step);
  check_nothing_lost(&f);
  sluice_comm_destroy(comm);
  sluice_local_group_destroy(group);
  free_saved(&saved);
  close_fixture(&f);
}

/* ---- communicators ---- */

static sluice_status_t no_start(void* user, const sluice_exchange_t* exchange, void** out_request,
                                sluice_host_failure_t* out_failure) {
  (void)user, (void)exchange, (void)out_request, (void)out_failure;
  return SLUICE_E_FOREIGN;
}
static sluice_status_t no_wait(void* user, void* request, uint64_t timeout_ns, sluice_host_failure_t* out_failure) {
  (void)user, (void)request, (void)timeout_ns, (void)out_failure;
  return SLUICE_E_FOREIGN;
}
static void count_destroy(void* user) { ++*(int*)user; }

static void CommCreate_BadArguments_AreRefused(void** state) {
  (void)state;
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
  c = good, c.rank = 2;
  REFUSED(sluice_comm_create_local(group, &c, &comm), BAD, "rank 2 of world_size 2");
  c = good, c.rank = -1;
  REFUSED(sluice_comm_create_local(group, &c, &comm), BAD, "rank -1");
  c = good, c.world_size = 0;
  REFUSED(sluice_comm_create_local(group, &c, &comm), BAD, "world_size 0");
  c = good, c.world_size = 3;
  REFUSED(sluice_comm_create_local(group, &c, &comm), BAD, "world_size is 3 in the config, 2 in the group");
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
  assert_int_equal(destroyed, 0); /* refused: `user` stays the caller's */
  WORKS(sluice_comm_create_host(&good, &vtable, &destroyed, &comm));
  assert_string_equal(sluice_comm_name(comm), "host");
  sluice_comm_destroy(comm);
  assert_int_equal(destroyed, 1);

  REFUSED(sluice_comm_create_mpi(&good, -1, NULL, NULL), BAD, "out_comm is NULL");
  REFUSED(sluice_comm_create_mpi(&good, -1, "/nowhere/libsluice_mpi.so", &comm), SLUICE_E_NOT_FOUND,
          "/nowhere/libsluice_mpi.so");
  assert_int_equal(sluice_comm_rank(NULL), -1);
  assert_int_equal(sluice_comm_world_size(NULL), 0);
  assert_string_equal(sluice_comm_name(NULL), "");
  sluice_comm_abort(NULL);
  sluice_comm_destroy(NULL);
  sluice_local_group_destroy(NULL);
}

static void Errors_CopiedOut_AreBoundedAndNamed(void** state) {
  (void)state;
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
  assert_int_equal(small.rest[32 - 8 - 1], 0); /* the text is terminated within what the caller has */
  assert_int_equal(small.rest[32 - 8], 0xee);
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Structs_WrongSizeOrDirtyTail_IsAbiError),
      cmocka_unit_test(ExpertStructs_WrongSizeOrDirtyTail_IsAbiError),
      cmocka_unit_test(Structs_UnknownExtension_IsNamed),
      cmocka_unit_test(Init_ShortOrNull_WritesOnlyThatMuch),
      cmocka_unit_test(Stats_WrongSize_IsAbiErrorAndShortIsFilled),
      cmocka_unit_test(ContextCreate_BadConfig_IsRefused),
      cmocka_unit_test(Trace_BadArguments_AreRefused),
      cmocka_unit_test(MoeCreate_BadConfig_IsRefused),
      cmocka_unit_test(MoeCreate_ExpertsNotDivisibleByRanks_NeedsATable),
      cmocka_unit_test(Forward_BadTensor_IsNamed),
      cmocka_unit_test(Backward_BadTensor_IsNamed),
      cmocka_unit_test(Backward_UnwantedGradients_AreNotWritten),
      cmocka_unit_test(Parameters_Bad_AreNamedWithTheirExpert),
      cmocka_unit_test(Gradients_Bad_AreNamedWithTheirExpert),
      cmocka_unit_test(Callbacks_Missing_AreRefused),
      cmocka_unit_test(Ids_OutOfRange_NameTheEntry),
      cmocka_unit_test(RouteWeights_NaNAndInfinity_PassThrough),
      cmocka_unit_test(Calls_StreamHandlesFlags_AreChecked),
      cmocka_unit_test(Backward_InTheWrongOrder_IsStateError),
      cmocka_unit_test(Backward_StepOfAnotherLayer_NamesBoth),
      cmocka_unit_test(Restore_DamagedOrForeignBuffers_AreRefused),
      cmocka_unit_test(Forward_HostRefusesASavedBuffer_IsNoMemory),
      cmocka_unit_test(Context_SecondThreadInside_IsBusy),
      cmocka_unit_test(Fork_HandlesInTheChild_AreInert),
      cmocka_unit_test(CommCreate_BadArguments_AreRefused),
      cmocka_unit_test(Errors_CopiedOut_AreBoundedAndNamed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
