! SPDX-License-Identifier: Apache-2.0
! Trains the layer of examples/c/layer.c in Fortran, with the same numbers.
!
!   examples/fortran/build.sh /tmp/out && /tmp/out/layer_fortran
program layer
  use sluice
  implicit none
  integer, parameter :: t = 96, m = 16, h = 32, e = 4, k = 2, steps = 60
  real(c_float), parameter :: rate = 1.5
  real(c_float), target :: x(m, t), goal(m, t), y(m, t), grad_y(m, t)
  real(c_float), target :: router(e, m), logits(e, t), grad_logits(e, t), weights(k, t), grad_weights(k, t)
  integer(c_int32_t), target :: ids(k, t)
  real(c_float), target :: w1(m, h, e), b1(h, e), w2(h, m, e), b2(m, e)
  real(c_float), target :: grad_w1(m, h, e), grad_b1(h, e), grad_w2(h, m, e), grad_b2(m, e)
  integer(c_int64_t), target :: rows(2) = [t, m], scores(2) = [t, e], routes(2) = [t, k], up(2) = [h, m], down(2) = [m, h]
  type(sluice_tensor_t), target :: tx, ty, tgrad_y, tlogits, tgrad_logits, tids, tweights, tgrad_weights, lists(e, 8)
  type(sluice_expert_tensors_t), target :: params, grads
  type(sluice_context_config_t) :: context_settings
  type(sluice_moe_config_t) :: config
  type(sluice_gate_config_t) :: gate
  type(sluice_moe_forward_args_t) :: forward
  type(sluice_moe_backward_args_t) :: backward
  type(c_ptr) :: context, moe, saved
  integer(c_int64_t) :: state = 1
  integer :: i, j, n, step
  real(8) :: first, loss

  do i = 1, t
    do j = 1, m
      x(j, i) = noise(1.0)
    end do
    do j = 1, m
      goal(j, i) = sin(3 * x(mod(j, m) + 1, i))
    end do
  end do
  do i = 1, m
    do j = 1, e
      router(j, i) = noise(0.2)
    end do
  end do
  call fill_experts(w1, w2, m * h * e)
  b1 = 0
  b2 = 0

  call sluice_context_config_init(context_settings, c_sizeof(context_settings))
  call sluice_check(sluice_context_create(context_settings, c_null_ptr, context))
  call sluice_moe_config_init(config, c_sizeof(config))
  config%model_width = m
  config%hidden_width = h
  config%num_experts = e
  config%top_k = k
  config%bias = 1
  call sluice_check(sluice_moe_create(context, config, moe))
  call sluice_gate_config_init(gate, c_sizeof(gate))
  gate%num_experts = e
  gate%top_k = k
  gate%renormalize = 1

  tx = sluice_tensor(c_loc(x), rows, SLUICE_TYPE_FLOAT)
  ty = sluice_tensor(c_loc(y), rows, SLUICE_TYPE_FLOAT)
  tgrad_y = sluice_tensor(c_loc(grad_y), rows, SLUICE_TYPE_FLOAT)
  tlogits = sluice_tensor(c_loc(logits), scores, SLUICE_TYPE_FLOAT)
  tgrad_logits = sluice_tensor(c_loc(grad_logits), scores, SLUICE_TYPE_FLOAT)
  tids = sluice_tensor(c_loc(ids), routes, SLUICE_TYPE_INT)
  tweights = sluice_tensor(c_loc(weights), routes, SLUICE_TYPE_FLOAT)
  tgrad_weights = sluice_tensor(c_loc(grad_weights), routes, SLUICE_TYPE_FLOAT)
  do n = 1, e
    lists(n, 1) = sluice_tensor(c_loc(w1(1, 1, n)), up, SLUICE_TYPE_FLOAT)
    lists(n, 2) = sluice_tensor(c_loc(b1(1, n)), up(1:1), SLUICE_TYPE_FLOAT)
    lists(n, 3) = sluice_tensor(c_loc(w2(1, 1, n)), down, SLUICE_TYPE_FLOAT)
    lists(n, 4) = sluice_tensor(c_loc(b2(1, n)), down(1:1), SLUICE_TYPE_FLOAT)
    lists(n, 5) = sluice_tensor(c_loc(grad_w1(1, 1, n)), up, SLUICE_TYPE_FLOAT)
    lists(n, 6) = sluice_tensor(c_loc(grad_b1(1, n)), up(1:1), SLUICE_TYPE_FLOAT)
    lists(n, 7) = sluice_tensor(c_loc(grad_w2(1, 1, n)), down, SLUICE_TYPE_FLOAT)
    lists(n, 8) = sluice_tensor(c_loc(grad_b2(1, n)), down(1:1), SLUICE_TYPE_FLOAT)
  end do
  params%w1 = c_loc(lists(1, 1))
  params%b1 = c_loc(lists(1, 2))
  params%w2 = c_loc(lists(1, 3))
  params%b2 = c_loc(lists(1, 4))
  grads%w1 = c_loc(lists(1, 5))
  grads%b1 = c_loc(lists(1, 6))
  grads%w2 = c_loc(lists(1, 7))
  grads%b2 = c_loc(lists(1, 8))

  do step = 0, steps - 1
    logits = matmul(router, x)
    call sluice_check(sluice_gate_forward(gate, tlogits, expert_ids=tids, route_weights=tweights))
    call sluice_moe_forward_args_init(forward, c_sizeof(forward))
    forward%tokens = c_loc(tx)
    forward%expert_ids = c_loc(tids)
    forward%route_weights = c_loc(tweights)
    forward%params = c_loc(params)
    forward%out_tokens = c_loc(ty)
    forward%needs_backward = 1
    call sluice_check(sluice_moe_forward(moe, forward, c_null_ptr, saved))

    loss = sum((real(y, 8) - goal)**2) / (t * m)
    grad_y = real(2 * (real(y, 8) - goal) / (t * m), c_float)
    if (step == 0) first = loss
    if (mod(step, 10) == 0 .or. step == steps - 1) print "(a, i2, a, f8.6)", "step ", step, " loss ", loss

    call sluice_moe_backward_args_init(backward, c_sizeof(backward))
    backward%tokens = c_loc(tx)
    backward%route_weights = c_loc(tweights)
    backward%params = c_loc(params)
    backward%grad_out = c_loc(tgrad_y)
    backward%grad_route_weights = c_loc(tgrad_weights)
    backward%grad_params = c_loc(grads)
    call sluice_check(sluice_moe_backward(moe, saved, backward, c_null_ptr))
    call sluice_step_drop(saved)
    call sluice_check(sluice_gate_backward(gate, tlogits, expert_ids=tids, grad_route_weights=tgrad_weights, &
      grad_aux_loss=0.0, grad_z_loss=0.0, grad_logits=tgrad_logits))

    router = router - rate * matmul(grad_logits, transpose(x))
    w1 = w1 - rate * grad_w1
    b1 = b1 - rate * grad_b1
    w2 = w2 - rate * grad_w2
    b2 = b2 - rate * grad_b2
  end do
  call sluice_moe_destroy(moe)
  call sluice_context_destroy(context)
  print "(a, f8.6, a, f8.6)", "loss ", first, " -> ", loss
  if (loss >= 0.8 * first) error stop "the loss did not fall"

contains

  real(c_float) function noise(scale)
    real, intent(in) :: scale
    state = mod(state * 1103515245_c_int64_t + 12345_c_int64_t, 2147483648_c_int64_t)
    noise = scale * (2 * real(state, c_float) / 2147483648.0 - 1)
  end function

  ! Fills both arrays in the order of memory, alternately.
  subroutine fill_experts(a, b, count)
    integer, intent(in) :: count
    real(c_float), intent(out) :: a(count), b(count)
    integer :: at
    do at = 1, count
      a(at) = noise(0.4)
      b(at) = noise(0.3)
    end do
  end subroutine
end program
