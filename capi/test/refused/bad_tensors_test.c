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

LAYER_TEST(Forward_BadTensor_IsNamed, open_default) {
  for (int i = 0; i < COUNT(forward_tensors); ++i) {
    const tensor_case_t* t = &forward_tensors[i];
    FORWARD_REFUSED(f, forget(&f->rig.forward, t->argument), BAD, t->name);
    for (int kind = 0; kind < BEND_COUNT; ++kind) {
      FORWARD_REFUSED(f, bend(&tensor_at(&f->rig, t->tensor)->tensor, kind), BAD,
                      kind == BEND_ROWS && t->leads ? "expert_ids" : t->name);
    }
    if (!t->has_rows) continue;
    FORWARD_REFUSED(f, tensor_at(&f->rig, t->tensor)->strides[1] = 2, BAD, t->name);
    FORWARD_REFUSED(f, tensor_at(&f->rig, t->tensor)->strides[0] = -5, BAD, t->name);
  }
  FORWARD_REFUSED(f, f->rig.out.strides[0] = 4, BAD, "out_tokens"); /* rows would overlap */
  FORWARD_REFUSED(f, (f->rig.tokens.tensor.type_code = SLUICE_TYPE_BFLOAT, f->rig.tokens.tensor.type_bits = 16), BAD,
                  "tokens: dtype is bf16, want f32");
  FORWARD_REFUSED(f, f->rig.ids.tensor.type_code = SLUICE_TYPE_FLOAT, BAD, "expert_ids: dtype is f32");
  FORWARD_REFUSED(f, f->rig.weights.tensor.type_bits = 64, BAD, "route_weights: dtype is f64");
}

/* All tensors of a backward have another T, which only the step can detect. */
static void give_all_4_rows(rig_t* rig) {
  for (int i = 0; i < COUNT(backward_tensors); ++i) tensor_at(rig, backward_tensors[i].tensor)->shape[0] = 4;
}

LAYER_TEST(Backward_BadTensor_IsNamed, open_default) {
  for (int i = 0; i < COUNT(backward_tensors); ++i) {
    const tensor_case_t* t = &backward_tensors[i];
    if (!t->is_optional) BACKWARD_REFUSED(f, forget(&f->rig.backward, t->argument), BAD, t->name);
    for (int kind = 0; kind < BEND_COUNT; ++kind) {
      BACKWARD_REFUSED(f, bend(&tensor_at(&f->rig, t->tensor)->tensor, kind), BAD,
                       kind == BEND_ROWS && t->leads ? "tokens" : t->name);
    }
    if (!t->has_rows) continue;
    BACKWARD_REFUSED(f, tensor_at(&f->rig, t->tensor)->strides[1] = 3, BAD, t->name);
  }
  BACKWARD_REFUSED(f, f->rig.grad_tokens.strides[0] = 0, BAD, "grad_tokens");
  const int64_t overlapping[][2] = {{0, 1}, {2, 0}, {1, 1}, {-1, 1}}; /* for [6, 2] */
  for (int i = 0; i < COUNT(overlapping); ++i) {
    BACKWARD_REFUSED(f, memcpy(f->rig.grad_weights.strides, overlapping[i], sizeof overlapping[i]), BAD,
                     "make elements overlap");
  }
  BACKWARD_REFUSED(f, give_all_4_rows(&f->rig), BAD, "grad_out has 4 rows, but this step's forward had 6 tokens");
}

LAYER_TEST(Backward_UnwantedGradients_AreNotWritten, open_default) {
  sluice_step_t* step = fresh_step(f);
  f->rig.backward.grad_tokens = f->rig.backward.grad_route_weights = NULL;
  f->rig.backward.grad_params = NULL;
  WORKS(rig_backward(&f->rig, step));
  sluice_step_drop(step);
  assert_true(isnan(((float*)f->rig.grad_tokens.tensor.data)[0]));
  assert_true(isnan(((float*)f->rig.grads[0][0].tensor.data)[0]));
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
    close_fixture(&f);
  }
}

LAYER_TEST(Parameters_Bad_AreNamedWithTheirExpert, open_default) {
  FORWARD_REFUSED(f, f->rig.forward.params = NULL, BAD, "layer 3: params is NULL");
  for (int kind = 0; kind < RIG_NUM_PARAMS; ++kind) {
    char text[32];
    snprintf(text, sizeof text, "params.%s", names[kind]);
    FORWARD_REFUSED(f, forget(&f->rig.param_table, sizeof(size_t) + sizeof(void*) * (size_t)kind), BAD, text);
    snprintf(text, sizeof text, "params.%s[1]", names[kind]);
    for (int how = 0; how < BEND_COUNT; ++how) {
      f->rig.param_list[kind][1].shape = f->rig.params[kind][1].shape;
      FORWARD_REFUSED(f, bend(&f->rig.param_list[kind][1], how), BAD, text);
    }
    int64_t* strides = f->rig.params[kind][1].strides;
    FORWARD_REFUSED(f, strides[0] = kind < 3 ? 3 : 2, BAD, text); /* rows overlap; a bias has gaps */
    if (kind < 3) FORWARD_REFUSED(f, (strides[0] = 20, strides[1] = 2), BAD, text);
  }
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

LAYER_TEST(Parameters_OfAStack_AreCheckedOneByOne, open_default) {
  static const int own[] = {BEND_DEVICE, BEND_CODE, BEND_LANES, BEND_NDIM, BEND_SHAPE_NULL, BEND_DATA};
  share_shapes(&f->rig);
  f->rig.forward.needs_backward = 0;
  WORKS(rig_forward(&f->rig, NULL));
  rig_reset(&f->rig);
  for (int kind = 0; kind < RIG_NUM_PARAMS; ++kind) {
    char text[32];
    snprintf(text, sizeof text, "params.%s[3]", names[kind]);
    for (int how = 0; how < COUNT(own); ++how) {
      share_shapes(&f->rig);
      FORWARD_REFUSED(f, bend(&f->rig.param_list[kind][3], own[how]), BAD, text);
    }
  }
}

LAYER_TEST(Gradients_Bad_AreNamedWithTheirExpert, open_default) {
  for (int kind = 0; kind < RIG_NUM_PARAMS; ++kind) {
    char text[40];
    snprintf(text, sizeof text, "grad_params.%s[2]", names[kind]);
    BACKWARD_REFUSED(f, f->rig.grad_list[kind][2].type_bits = 64, BAD, text);
    BACKWARD_REFUSED(f, f->rig.grad_list[kind][2].type_bits = 16, BAD, text);
    BACKWARD_REFUSED(f, f->rig.grads[kind][2].strides[0] = 0, BAD, text);
  }
  BACKWARD_REFUSED(f, f->rig.backward.params = NULL, BAD, "params");
}

static void open_bf16(fixture_t* f) {
  sluice_moe_config_t config = rig_config();
  config.dtype = SLUICE_DTYPE_BF16, config.bias = 0;
  open_with(f, &config);
}

/* Gives some experts f32 gradients of a kind, with memory of their own. */
static void make_f32(rig_t* rig, int kind, int first, int last) {
  static float wide[4][64];
  for (int e = first; e <= last; ++e) {
    sluice_tensor_t* grad = &rig->grad_list[kind][e];
    grad->type_code = SLUICE_TYPE_FLOAT, grad->type_bits = 32, grad->data = wide[e];
  }
}

/* All gradients of a kind have one dtype, and so have all matrices: bf16 layers accept bf16 or f32 gradients. */
LAYER_TEST(Gradients_OfTwoDtypes_AreRefused, open_bf16) {
  BACKWARD_REFUSED(f, make_f32(&f->rig, 0, 1, 1), BAD,
                   "grad_params.w1[1]: dtype is f32, but that of grad_params.w1[0] is bf16");
  BACKWARD_REFUSED(f, make_f32(&f->rig, 2, 0, 3), BAD, "w1 is bf16 and w2 is f32");
}

LAYER_TEST(Callbacks_Missing_AreRefused, open_callbacks) {
  FORWARD_REFUSED(f, f->rig.callbacks.forward = NULL, BAD, "forward is NULL");
  FORWARD_REFUSED(f, f->rig.callbacks.backward = NULL, BAD, "backward is NULL");
  BACKWARD_REFUSED(f, f->rig.callbacks.backward = NULL, BAD, "backward is NULL");
  BACKWARD_REFUSED(f, f->rig.backward.parts = SLUICE_BACKWARD_DGRAD, SLUICE_E_UNSUPPORTED,
                   "dgrad and wgrad in one call");
  /* A callback fails: nothing leaks, and the next call works. */
  FORWARD_REFUSED(f, f->rig.callback_failure = 42, SLUICE_E_EXTERNAL,
                  "expert 0 failed in forward of chunk 0 (it returned 42)");
  BACKWARD_REFUSED(f, f->rig.callback_failure = 43, SLUICE_E_EXTERNAL,
                   "failed in backward of chunk 0 (it returned 43)");
}
