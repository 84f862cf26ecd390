// SPDX-License-Identifier: Apache-2.0
/* Split calls when some ranks have no rows: they still receive the values of the other ranks. */

#include "capi/test/ranks/play.h"
#include "third_party/bazel/test.h"

enum { MAX_ROWS = 24, WIDTH = 5, HIDDEN = 7, ROUTES = 12 };

typedef struct rows_s {
  float pre[MAX_ROWS * 2 * HIDDEN], out[MAX_ROWS * WIDTH], grad[MAX_ROWS * WIDTH], grad_in[MAX_ROWS * WIDTH];
  float grad_weight[MAX_ROWS];
} rows_t;

/* Makes all split calls. A rank without rows passes an empty buffer or NULL. out_grads: those of the route weights. */
static void run_parts(part_t* me, int gives_null, float* out_grads) {
  rig_t* rig = &me->rig;
  rig_reset(rig);
  for (int i = 0; i < ROUTES; ++i) ((int32_t*)rig->ids.tensor.data)[i] = i % 2; /* all routes go to rank 0 */
  static _Thread_local rows_t memory;
  sluice_dispatch_t* dispatch = NULL;
  void* received = NULL;
  int64_t num = -1, counts[RIG_MAX_EXPERTS];
  WORKS(sluice_dispatch_forward(rig->moe, &rig->tokens.tensor, &rig->ids.tensor, NULL, &dispatch));
  if (dispatch == NULL) return;
  WORKS(sluice_dispatch_rows(dispatch, &received, &num, counts));
  EXPECT(num == (me->rank == 0 ? MAX_ROWS : 0));
  rows_t* r = num == 0 && gives_null ? NULL : &memory;
#define AT(member) (r == NULL ? NULL : r->member)
  WORKS(sluice_experts_forward(rig->moe, received, counts, &rig->param_table, AT(pre), AT(out), NULL));
  WORKS(sluice_dispatch_combine(dispatch, AT(out), &rig->weights.tensor, &rig->out.tensor, NULL));
  WORKS(sluice_dispatch_combine_backward(dispatch, AT(out), &rig->weights.tensor, &rig->grad_out.tensor, AT(grad),
                                         AT(grad_weight), NULL));
  WORKS(sluice_experts_backward(rig->moe, received, AT(pre), counts, &rig->param_table, AT(grad), AT(grad_in),
                                &rig->grad_table, SLUICE_GRAD_OVERWRITE, NULL));
  WORKS(sluice_dispatch_backward(dispatch, AT(grad_in), AT(grad_weight), &rig->grad_tokens.tensor,
                                 &rig->grad_weights.tensor, NULL));
  sluice_dispatch_destroy(dispatch);
  memcpy(out_grads, rig->grad_weights.tensor.data, ROUTES * sizeof(float));
}

static void nothing_received_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  float with_room[ROUTES], with_null[ROUTES];
  run_parts(me, 0, with_room);
  run_parts(me, 1, with_null);
  EXPECT(memcmp(with_room, with_null, sizeof with_room) == 0);
  for (int i = 0; i < ROUTES; ++i) EXPECT(with_null[i] == with_null[i]); /* written, since outputs begin as NaN */
}

TEST(Parts_RankWithoutRows_GetsItsRouteGradients) {
  play_t play = {.run = nothing_received_run, .world_size = 2};
  perform(&play);
}

/* The documented way to skip gradients of route weights: all ranks pass NULL in both calls. */
static void unwanted_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  rig_t* rig = &me->rig;
  static _Thread_local float rows[MAX_ROWS * WIDTH];
  sluice_dispatch_t* dispatch = NULL;
  WORKS(sluice_dispatch_forward(rig->moe, &rig->tokens.tensor, &rig->ids.tensor, NULL, &dispatch));
  WORKS(
      sluice_dispatch_combine_backward(dispatch, NULL, &rig->weights.tensor, &rig->grad_out.tensor, rows, NULL, NULL));
  WORKS(sluice_dispatch_backward(dispatch, rows, NULL, &rig->grad_tokens.tensor, NULL, NULL));
  sluice_dispatch_destroy(dispatch);
  const float* grads = rig->grad_tokens.tensor.data;
  for (int i = 0; i < 6 * WIDTH; ++i) EXPECT(grads[i] == grads[i]);
  EXPECT(((float*)rig->grad_weights.tensor.data)[0] != ((float*)rig->grad_weights.tensor.data)[0]); /* not written */
}

TEST(Parts_RouteGradientsUnwanted_AreLeftAlone) {
  play_t play = {.run = unwanted_run, .world_size = 2};
  perform(&play);
}
