// SPDX-License-Identifier: Apache-2.0
/* Refused arguments of split calls: each is reported by name, nothing is written, and the dispatch can continue. */

#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

enum { ROWS = 12, WIDTH = 5, HIDDEN = 7 }; /* the rig's layer: every route is kept */

typedef struct rows_s {
  void* received;
  int64_t num;
  int64_t counts[RIG_MAX_EXPERTS];
  float pre[ROWS * 2 * HIDDEN], out[ROWS * WIDTH], grad[ROWS * WIDTH], grad_in[ROWS * WIDTH], grad_weight[ROWS];
} rows_t;

static rows_t rows; /* of the current dispatch */

static sluice_dispatch_t* open_dispatch(fixture_t* f) {
  sluice_dispatch_t* dispatch = NULL;
  rig_reset(&f->rig);
  WORKS(sluice_dispatch_forward(f->rig.moe, &f->rig.tokens.tensor, &f->rig.ids.tensor, NULL, &dispatch));
  WORKS(sluice_dispatch_rows(dispatch, &rows.received, &rows.num, rows.counts));
  assert_int_equal(rows.num, ROWS);
  return dispatch;
}

#define EXPERTS_FORWARD(f) \
  sluice_experts_forward((f)->rig.moe, rows.received, rows.counts, &(f)->rig.param_table, rows.pre, rows.out, NULL)
#define COMBINE(f, d) sluice_dispatch_combine(d, rows.out, &(f)->rig.weights.tensor, &(f)->rig.out.tensor, NULL)
#define COMBINE_BACKWARD(f, d)                                                                                  \
  sluice_dispatch_combine_backward(d, rows.out, &(f)->rig.weights.tensor, &(f)->rig.grad_out.tensor, rows.grad, \
                                   rows.grad_weight, NULL)
#define EXPERTS_BACKWARD(f, mode)                                                                               \
  sluice_experts_backward((f)->rig.moe, rows.received, rows.pre, rows.counts, &(f)->rig.param_table, rows.grad, \
                          rows.grad_in, &(f)->rig.grad_table, mode, NULL)
#define DISPATCH_BACKWARD(f, d)                                                             \
  sluice_dispatch_backward(d, rows.grad_in, rows.grad_weight, &(f)->rig.grad_tokens.tensor, \
                           &(f)->rig.grad_weights.tensor, NULL)

/* Makes all split calls with valid arguments. */
static void finish(fixture_t* f, sluice_dispatch_t* dispatch) {
  rig_reset(&f->rig);
  WORKS(EXPERTS_FORWARD(f));
  WORKS(COMBINE(f, dispatch));
  WORKS(COMBINE_BACKWARD(f, dispatch));
  WORKS(EXPERTS_BACKWARD(f, SLUICE_GRAD_OVERWRITE));
  WORKS(DISPATCH_BACKWARD(f, dispatch));
  sluice_dispatch_destroy(dispatch);
}

/* Opens a layer. Memory that the context keeps after split calls does not count as a leak. */
static void open_parts(fixture_t* f) {
  open_default(f);
  finish(f, open_dispatch(f));
  f->live_bytes = atomic_load(&f->rig.heap.live_bytes);
  check_nothing_lost(f);
}

LAYER_TEST(Dispatch_Bad_IsNamed, open_parts) {
  rig_t* rig = &f->rig;
  sluice_dispatch_t* dispatch = (sluice_dispatch_t*)(uintptr_t)1;
  int dummy;
#define DISPATCH(moe, stream, out) sluice_dispatch_forward(moe, &rig->tokens.tensor, &rig->ids.tensor, stream, out)
  REFUSED(DISPATCH(rig->moe, NULL, NULL), BAD, "out_dispatch is NULL");
  REFUSED(DISPATCH(NULL, NULL, &dispatch), BAD, "moe is NULL");
  assert_null(dispatch);
  REFUSED(DISPATCH(rig->moe, &dummy, &dispatch), BAD, "stream must be NULL");
  REFUSED(sluice_dispatch_forward(rig->moe, NULL, &rig->ids.tensor, NULL, &dispatch), BAD, "tokens");
  REFUSED(sluice_dispatch_forward(rig->moe, &rig->tokens.tensor, NULL, NULL, &dispatch), BAD, "expert_ids");
  rig_reset(rig);
  rig->tokens.shape[1] = 4;
  REFUSED(DISPATCH(rig->moe, NULL, &dispatch), BAD, "tokens");
  rig_reset(rig);
  ((int32_t*)rig->ids.tensor.data)[3] = 4;
  REFUSED(DISPATCH(rig->moe, NULL, &dispatch), BAD, "expert_ids[1, 1] is 4");
  assert_null(dispatch);
  REFUSED(sluice_dispatch_rows(NULL, NULL, NULL, NULL), BAD, "dispatch is NULL");
  REFUSED(sluice_dispatch_combine(NULL, NULL, NULL, NULL, NULL), BAD, "dispatch is NULL");
  REFUSED(sluice_dispatch_combine_backward(NULL, NULL, NULL, NULL, NULL, NULL, NULL), BAD, "dispatch is NULL");
  REFUSED(sluice_dispatch_backward(NULL, NULL, NULL, NULL, NULL, NULL), BAD, "dispatch is NULL");
  sluice_dispatch_destroy(NULL);
  finish(f, open_dispatch(f));
}

LAYER_TEST(Combine_Bad_IsNamed, open_parts) {
  rig_t* rig = &f->rig;
  sluice_dispatch_t* dispatch = open_dispatch(f);
  int dummy;
  REFUSED(sluice_dispatch_combine(dispatch, NULL, &rig->weights.tensor, &rig->out.tensor, NULL), BAD, "rows is NULL");
  REFUSED(sluice_dispatch_combine(dispatch, rows.out, NULL, &rig->out.tensor, NULL), BAD, "route_weights");
  REFUSED(sluice_dispatch_combine(dispatch, rows.out, &rig->weights.tensor, NULL, NULL), BAD, "out_tokens");
  REFUSED(sluice_dispatch_combine(dispatch, rows.out, &rig->weights.tensor, &rig->out.tensor, &dummy), BAD, "stream");
  rig->out.strides[0] = WIDTH - 1;
  REFUSED(COMBINE(f, dispatch), BAD, "out_tokens: the stride of dim 0 is 4; rows that are written");
  rig_reset(rig);
  rig->out.shape[0] = rig->weights.shape[0] = 5;
  REFUSED(COMBINE(f, dispatch), BAD, "a tensor has 5 rows, but the dispatch had 6 tokens");

  rig_reset(rig);
  const sluice_tensor_t *w = &rig->weights.tensor, *g = &rig->grad_out.tensor;
  REFUSED(sluice_dispatch_combine_backward(dispatch, NULL, w, g, rows.grad, rows.grad_weight, NULL), BAD,
          "rows is NULL");
  REFUSED(sluice_dispatch_combine_backward(dispatch, rows.out, w, g, NULL, rows.grad_weight, NULL), BAD, "grad_rows");
  REFUSED(sluice_dispatch_combine_backward(dispatch, rows.out, NULL, g, rows.grad, NULL, NULL), BAD, "route_weights");
  REFUSED(sluice_dispatch_combine_backward(dispatch, rows.out, w, NULL, rows.grad, NULL, NULL), BAD, "grad_out");
  rig->grad_out.tensor.type_bits = 64;
  REFUSED(COMBINE_BACKWARD(f, dispatch), BAD, "grad_out: dtype is f64");
  rig_reset(rig);
  rig->grad_out.strides[0] = 0; /* the same gradient for every token; valid, since it is only read */
  WORKS(COMBINE_BACKWARD(f, dispatch));
  finish(f, dispatch);
}

LAYER_TEST(DispatchBackward_Bad_IsNamed, open_parts) {
  rig_t* rig = &f->rig;
  sluice_dispatch_t* dispatch = open_dispatch(f);
  const sluice_tensor_t *x = &rig->grad_tokens.tensor, *w = &rig->grad_weights.tensor;
  REFUSED(sluice_dispatch_backward(dispatch, NULL, rows.grad_weight, x, w, NULL), BAD, "grad_input_rows is NULL");
  REFUSED(sluice_dispatch_backward(dispatch, rows.grad_in, NULL, x, w, NULL), BAD, "grad_weight_rows is NULL");
  REFUSED(sluice_dispatch_backward(dispatch, rows.grad_in, rows.grad_weight, NULL, w, NULL), BAD, "grad_tokens");
  rig->grad_tokens.strides[0] = 0;
  REFUSED(DISPATCH_BACKWARD(f, dispatch), BAD, "grad_tokens: the stride of dim 0 is 0; rows that are written");
  rig_reset(rig);
  rig->grad_weights.strides[0] = 1;
  REFUSED(DISPATCH_BACKWARD(f, dispatch), BAD, "grad_route_weights: strides 1, 1 of [6, 2] make elements overlap");
  rig_reset(rig);
  rig->grad_weights.shape[1] = 3;
  REFUSED(DISPATCH_BACKWARD(f, dispatch), BAD, "grad_route_weights");
  finish(f, dispatch);
}

LAYER_TEST(Experts_Bad_AreNamed, open_parts) {
  rig_t* rig = &f->rig;
  sluice_dispatch_t* dispatch = open_dispatch(f);
  const sluice_expert_tensors_t* params = &rig->param_table;
  int dummy;
  REFUSED(sluice_experts_forward(NULL, rows.received, rows.counts, params, NULL, rows.out, NULL), BAD, "moe is NULL");
  REFUSED(sluice_experts_forward(rig->moe, rows.received, NULL, params, NULL, rows.out, NULL), BAD, "rows_per_expert");
  REFUSED(sluice_experts_forward(rig->moe, NULL, rows.counts, params, NULL, rows.out, NULL), BAD, "rows is NULL");
  REFUSED(sluice_experts_forward(rig->moe, rows.received, rows.counts, params, NULL, NULL, NULL), BAD,
          "out_rows is NULL");
  REFUSED(sluice_experts_forward(rig->moe, rows.received, rows.counts, NULL, NULL, rows.out, NULL), BAD, "params");
  REFUSED(sluice_experts_forward(rig->moe, rows.received, rows.counts, params, NULL, rows.out, &dummy), BAD, "stream");
  const int64_t wrong[][4] = {{-1, 5, 4, 4}, {-12, 12, 0, 0}, {INT64_MAX, 1, 0, 0}, {INT64_MIN, 0, 0, 0}};
  for (int i = 0; i < COUNT(wrong); ++i) {
    REFUSED(sluice_experts_forward(rig->moe, rows.received, wrong[i], params, NULL, rows.out, NULL), BAD,
            "rows_per_expert[0] is");
    REFUSED(sluice_experts_backward(rig->moe, rows.received, rows.pre, wrong[i], params, rows.grad, rows.grad_in,
                                    &rig->grad_table, SLUICE_GRAD_OVERWRITE, NULL),
            BAD, "rows_per_expert[0] is");
  }
  REFUSED(EXPERTS_BACKWARD(f, 2), BAD, "grad_mode is 2");
  REFUSED(sluice_experts_backward(rig->moe, rows.received, NULL, rows.counts, params, rows.grad, rows.grad_in, NULL, 0,
                                  NULL),
          BAD, "pre is NULL");
  rig->grad_list[0][1].type_bits = 64;
  REFUSED(EXPERTS_BACKWARD(f, SLUICE_GRAD_OVERWRITE), BAD, "grad_params.w1[1]");
  finish(f, dispatch);
}

LAYER_TEST(Experts_OfTheHost_AreNotCalled, open_callbacks) {
  const int64_t counts[4] = {3, 3, 3, 3};
  REFUSED(sluice_experts_forward(f->rig.moe, NULL, counts, NULL, NULL, NULL, NULL), SLUICE_E_UNSUPPORTED,
          "call them directly");
}
