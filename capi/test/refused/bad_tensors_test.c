// SPDX-License-Identifier: Apache-2.0
/* Refused tensors of a call: tokens, routes, outputs, parameters and gradients, each reported by name. */
#include <math.h>

#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

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

static const char* const names[] = {"w1", "w3", "w2", "b1", "b3", "b2"};

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
  int is_optional; /* NULL is valid: the tensor is not wanted */
  int leads;       /* other tensors are compared with its number of rows, so the error names another tensor */
  int has_rows;    /* a column stride of 1 is required */
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

static void forget(void* args, size_t argument) { memset((char*)args + argument, 0, sizeof(void*)); }
static rig_tensor_t* tensor_at(rig_t* rig, size_t at) { return (rig_tensor_t*)(void*)((char*)rig + at); }

TEST(Forward_BadTensor_IsNamed) {
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

TEST(Backward_BadTensor_IsNamed) {
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
  const int64_t overlapping[][2] = {{0, 1}, {2, 0}, {1, 1}, {-1, 1}}; /* for [6, 2] */
  for (int i = 0; i < COUNT(overlapping); ++i) {
    step = fresh_step(&f);
    f.rig.grad_weights.strides[0] = overlapping[i][0], f.rig.grad_weights.strides[1] = overlapping[i][1];
    BACKWARD_REFUSED(&f, step, BAD, "make elements overlap");
  }
  /* All tensors have another T, which only the step can detect. */
  step = fresh_step(&f);
  rig_tensor_t* all[] = {&f.rig.grad_out, &f.rig.tokens, &f.rig.weights, &f.rig.grad_tokens, &f.rig.grad_weights};
  for (int i = 0; i < COUNT(all); ++i) all[i]->shape[0] = 4;
  BACKWARD_REFUSED(&f, step, BAD, "grad_out has 4 rows, but this step's forward had 6 tokens");
  close_fixture(&f);
}

TEST(Backward_UnwantedGradients_AreNotWritten) {
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

/* Copies the gradients of a kind, expert by expert, and returns their bytes. */
static uint64_t take_gradients(const rig_t* rig, int kind, char* out) {
  uint64_t bytes = 0;
  for (int32_t e = 0; e < rig->num_local; ++e) {
    const rig_tensor_t* grad = &rig->grads[kind][e];
    memcpy(out + bytes, grad->memory, grad->bytes);
    bytes += grad->bytes;
  }
  return bytes;
}

/* Runs a layer without gradients of `absent` kinds: these keep their bytes, the others are those of a run with all. */
static void check_members(fixture_t* f, int32_t grad_mode) {
  enum { ROOM = 4096 };
  static char all[RIG_NUM_PARAMS][ROOM], before[ROOM], after[ROOM];
  f->rig.backward.grad_mode = grad_mode;
  for (int absent = 0; absent < 1 << RIG_NUM_PARAMS; ++absent) {
    sluice_step_t* step = fresh_step(f);
    f->rig.backward.grad_mode = grad_mode;
    const sluice_tensor_t** members[] = {&f->rig.grad_table.w1, &f->rig.grad_table.w3, &f->rig.grad_table.w2,
                                         &f->rig.grad_table.b1, &f->rig.grad_table.b3, &f->rig.grad_table.b2};
    for (int kind = 0; kind < RIG_NUM_PARAMS; ++kind) {
      for (int32_t e = 0; e < f->rig.num_local; ++e)
        memset(f->rig.grads[kind][e].memory, 0, f->rig.grads[kind][e].bytes);
      if (absent >> kind & 1) *members[kind] = NULL;
    }
    memset(before, 0, sizeof before);
    WORKS(rig_backward(&f->rig, step));
    sluice_step_drop(step);
    for (int kind = 0; kind < RIG_NUM_PARAMS; ++kind) {
      uint64_t bytes = take_gradients(&f->rig, kind, absent == 0 ? all[kind] : after);
      assert_true(bytes > 0 && bytes <= ROOM);
      if (absent == 0) {
        assert_memory_not_equal(all[kind], before, bytes);
      } else {
        assert_memory_equal(after, absent >> kind & 1 ? before : all[kind], bytes);
      }
    }
  }
}

TEST(Backward_UnwantedMembers_AreNotWrittenAndTheOthersKeepTheirBits) {
  for (int bits = 0; bits < 16; ++bits) {
    sluice_moe_config_t config = rig_config();
    config.dtype = bits & 1 ? SLUICE_DTYPE_BF16 : SLUICE_DTYPE_F32;
    config.wgrad_mode = bits & 2 ? SLUICE_WGRAD_PER_CHUNK : SLUICE_WGRAD_DEFERRED;
    config.num_chunks = bits & 4 ? 3 : 1;
    fixture_t f;
    open_with(&f, &config);
    check_members(&f, bits & 8 ? SLUICE_GRAD_ACCUMULATE : SLUICE_GRAD_OVERWRITE);
    check_nothing_lost(&f);
    close_fixture(&f);
  }
}

TEST(Parameters_Bad_AreNamedWithTheirExpert) {
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
    f.rig.params[kind][1].strides[0] = kind < 3 ? 3 : 2; /* rows overlap; a bias has gaps */
    FORWARD_REFUSED(&f, BAD, text);
    if (kind >= 3) continue;
    rig_reset(&f.rig);
    f.rig.params[kind][1].strides[0] = 20, f.rig.params[kind][1].strides[1] = 2;
    FORWARD_REFUSED(&f, BAD, text);
  }
  close_fixture(&f);
}

/* Lets all descriptors of a kind point to the shape and strides of the first. */
static void share_shapes(rig_t* rig) {
  for (int kind = 0; kind < RIG_NUM_PARAMS; ++kind) {
    for (int32_t e = 1; e < rig->num_local; ++e) {
      rig->param_list[kind][e].shape = rig->param_list[kind][0].shape;
      rig->param_list[kind][e].strides = rig->param_list[kind][0].strides;
    }
  }
}

TEST(Parameters_OfAStack_AreCheckedOneByOne) {
  static const int own[] = {BEND_DEVICE, BEND_CODE, BEND_LANES, BEND_NDIM, BEND_SHAPE_NULL, BEND_DATA};
  fixture_t f;
  open_default(&f);
  rig_reset(&f.rig);
  share_shapes(&f.rig);
  f.rig.forward.needs_backward = 0;
  WORKS(rig_forward(&f.rig, NULL));
  for (int kind = 0; kind < RIG_NUM_PARAMS; ++kind) {
    char text[32];
    snprintf(text, sizeof text, "params.%s[3]", names[kind]);
    for (int how = 0; how < COUNT(own); ++how) {
      rig_reset(&f.rig);
      share_shapes(&f.rig);
      bend(&f.rig.param_list[kind][3], own[how]);
      FORWARD_REFUSED(&f, BAD, text);
    }
  }
  close_fixture(&f);
}

TEST(Gradients_Bad_AreNamedWithTheirExpert) {
  fixture_t f;
  open_default(&f);
  for (int kind = 0; kind < RIG_NUM_PARAMS; ++kind) {
    char text[40];
    snprintf(text, sizeof text, "grad_params.%s[2]", names[kind]);
    sluice_step_t* step = fresh_step(&f);
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

  /* All gradients of a kind have one dtype, and so have all matrices: bf16 layers accept bf16 or f32 gradients. */
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

TEST(Callbacks_Missing_AreRefused) {
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
  f.rig.backward.parts = SLUICE_BACKWARD_DGRAD;
  BACKWARD_REFUSED(&f, step, SLUICE_E_UNSUPPORTED, "dgrad and wgrad in one call");
  /* A callback fails: nothing leaks, and the next call works. */
  rig_reset(&f.rig);
  f.rig.callback_failure = 42;
  FORWARD_REFUSED(&f, SLUICE_E_EXTERNAL, "expert 0 failed in forward of chunk 0 (it returned 42)");
  step = fresh_step(&f);
  f.rig.callback_failure = 43;
  BACKWARD_REFUSED(&f, step, SLUICE_E_EXTERNAL, "failed in backward of chunk 0 (it returned 43)");
  close_fixture(&f);
}
