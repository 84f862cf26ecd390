// SPDX-License-Identifier: Apache-2.0
/* The layer of moving.c: its data, a forward and backward, and an update of its experts. */
#include "moving_layer.h"

/* Three of four tokens go to the two experts of rank 0. */
void layer_fill(rank_t* me) {
  for (int t = 0; t < T; ++t) {
    for (int m = 0; m < M; ++m) me->x[t][m] = noise(me->rank * T + t + 1, m);
    me->ids[t][0] = t % 4 < 3 ? t % 2 : 2 + t / 4 % (E - 2), me->weights[t][0] = 1;
  }
  for (int e = 0; e < E; ++e) {
    me->owner[e] = e / SLOTS, me->slot[e] = e % SLOTS;
    float *up = &me->experts[e % SLOTS].up[0][0], *down = &me->experts[e % SLOTS].down[0][0];
    for (int i = 0; i < H * M && me->owner[e] == me->rank; ++i)
      up[i] = 0.4f * noise(1000 + e, i), down[i] = 0.3f * noise(2000 + e, i);
  }
}

int layer_pass(rank_t* me, sluice_moe_t* moe, int step) {
  int64_t tokens[] = {T, M}, routes[] = {T, 1}, up[] = {H, M}, down[] = {M, H};
  sluice_tensor_t x = describe(me->x, SLUICE_TYPE_FLOAT, tokens), y = describe(me->y, SLUICE_TYPE_FLOAT, tokens);
  sluice_tensor_t grad_y = describe(me->grad_y, SLUICE_TYPE_FLOAT, tokens);
  sluice_tensor_t ids = describe(me->ids, SLUICE_TYPE_INT, routes);
  sluice_tensor_t weights = describe(me->weights, SLUICE_TYPE_FLOAT, routes), lists[4][SLOTS];
  for (int s = 0; s < SLOTS; ++s) {
    expert_t* e = &me->experts[s];
    lists[0][s] = describe(e->up, SLUICE_TYPE_FLOAT, up), lists[1][s] = describe(e->down, SLUICE_TYPE_FLOAT, down);
    lists[2][s] = describe(e->up_grad, SLUICE_TYPE_FLOAT, up);
    lists[3][s] = describe(e->down_grad, SLUICE_TYPE_FLOAT, down);
  }
  sluice_expert_tensors_t params = {.struct_size = sizeof params, .w1 = lists[0], .w2 = lists[1]};
  sluice_expert_tensors_t grads = {.struct_size = sizeof grads, .w1 = lists[2], .w2 = lists[3]};
  sluice_moe_forward_args_t forward;
  sluice_moe_backward_args_t backward;
  sluice_step_t* saved = NULL;
  sluice_moe_forward_args_init(&forward, sizeof forward);
  forward.tokens = &x, forward.expert_ids = &ids, forward.route_weights = &weights, forward.out_tokens = &y;
  forward.params = &params, forward.needs_backward = 1;
  if (failed(me->rank, sluice_moe_forward(moe, &forward, NULL, &saved))) return 1;
  for (int i = 0; i < T * M; ++i) {
    const float error = (&me->y[0][0])[i] - (&me->x[0][0])[(i + 1) % (T * M)];
    me->losses[step] += (double)error * error / (W * T * M), (&me->grad_y[0][0])[i] = 2 * error / (W * T * M);
  }
  sluice_moe_backward_args_init(&backward, sizeof backward);
  backward.tokens = &x, backward.route_weights = &weights, backward.params = &params;
  backward.grad_out = &grad_y, backward.grad_params = &grads;
  const sluice_status_t status = sluice_moe_backward(moe, saved, &backward, NULL);
  sluice_step_drop(saved);
  return failed(me->rank, status);
}

void layer_update(expert_t* e) {
  const float keep = ++e->updates < 5 ? 0.5f : 0.9f; /* the number of updates is state, which must move as well */
  for (int i = 0; i < H * M; ++i) {
    (&e->up[0][0])[i] -= (&e->up_speed[0][0])[i] = keep * (&e->up_speed[0][0])[i] + 0.3f * (&e->up_grad[0][0])[i];
    (&e->down[0][0])[i] -= (&e->down_speed[0][0])[i] =
        keep * (&e->down_speed[0][0])[i] + 0.3f * (&e->down_grad[0][0])[i];
  }
}
