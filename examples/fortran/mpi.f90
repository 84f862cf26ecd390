! SPDX-License-Identifier: Apache-2.0
! Expert parallelism over MPI, as examples/c/mpi.c: each process is a rank; there are 1, 2, 4 or 8.
!
!   examples/fortran/build.sh /tmp/out && mpirun -n 2 /tmp/out/mpi_fortran
program mpi_layer
  use mpi_f08
  use sluice
  implicit none
  integer, parameter :: tokens = 192, m = 16, h = 32, e = 8, k = 2, steps = 40
  real(c_float), parameter :: rate = 1.5
  type(sluice_comm_config_t) :: comm_settings
  type(c_ptr) :: comm
  real(c_double) :: mine(0:steps - 1), loss(0:steps - 1)
  integer :: provided, rank, ranks, step

  call MPI_Init_thread(MPI_THREAD_MULTIPLE, provided) ! because the communication lane is another thread
  call sluice_comm_config_init(comm_settings, c_sizeof(comm_settings))
  call sluice_check(sluice_comm_create_mpi(comm_settings, int(MPI_COMM_WORLD%mpi_val, c_int64_t), out_comm=comm))
  rank = sluice_comm_rank(comm)
  ranks = sluice_comm_world_size(comm)
  call train(tokens * rank / ranks, tokens * (rank + 1) / ranks - tokens * rank / ranks, e / ranks)
  call MPI_Reduce(mine, loss, steps, MPI_DOUBLE_PRECISION, MPI_SUM, 0, MPI_COMM_WORLD)
  do step = 0, steps - 1
    if (rank /= 0 .or. (mod(step, 10) /= 0 .and. step /= steps - 1)) cycle
    print "(a, i2, a, f8.6, a, i0, a)", "step ", step, " loss ", loss(step), " (", ranks, " ranks)"
  end do
  call sluice_comm_destroy(comm)
  call MPI_Finalize()

contains

  ! Trains this rank's n experts with the tokens begin .. begin + t - 1.
  subroutine train(begin, t, n)
    integer, intent(in) :: begin, t, n
    real(c_float), target :: x(m, t), goal(m, t), y(m, t), grad_y(m, t), weights(k, t)
    integer(c_int32_t), target :: ids(k, t)
    real(c_float), target :: w1(m, h, n), w2(h, m, n), grad_w1(m, h, n), grad_w2(h, m, n)
    integer(c_int64_t), target :: rows(2), routes(2), up(2), down(2)
    type(sluice_tensor_t), target :: tx, ty, tgrad_y, tids, tweights, lists(n, 4)
    type(sluice_expert_tensors_t), target :: params, grads
    type(sluice_context_config_t) :: context_settings
    type(sluice_moe_config_t) :: config
    type(sluice_moe_forward_args_t) :: forward
    type(sluice_moe_backward_args_t) :: backward
    type(c_ptr) :: context, moe, saved
    integer :: i, j

    call sluice_context_config_init(context_settings, c_sizeof(context_settings))
    call sluice_check(sluice_context_create(context_settings, comm, context))
    call sluice_moe_config_init(config, c_sizeof(config))
    config%model_width = m
    config%hidden_width = h
    config%num_experts = e
    config%top_k = k
    config%num_chunks = 2 ! one half is sent while the other is computed
    call sluice_check(sluice_moe_create(context, config, moe))
    if (sluice_moe_num_local_experts(moe) /= n) error stop "this many ranks cannot share the experts"

    do i = 1, t
      do j = 1, m
        x(j, i) = noise(1, (begin + i - 1) * m + j - 1)
      end do
      do j = 1, m
        goal(j, i) = sin(3 * x(mod(j, m) + 1, i))
      end do
      do j = 1, k ! a fixed router, by the signs of coordinates of x
        ids(j, i) = mod(merge(1, 0, x(1, i) > 0) + 2 * merge(1, 0, x(2, i) > 0) + 4 * (j - 1), e)
      end do
    end do
    weights = 0.5
    call fill(w1, 2, 0.4)
    call fill(w2, 3, 0.3)

    rows = [t, m]
    routes = [t, k]
    up = [h, m]
    down = [m, h]
    tx = sluice_tensor(c_loc(x), rows, SLUICE_TYPE_FLOAT)
    ty = sluice_tensor(c_loc(y), rows, SLUICE_TYPE_FLOAT)
    tgrad_y = sluice_tensor(c_loc(grad_y), rows, SLUICE_TYPE_FLOAT)
    tids = sluice_tensor(c_loc(ids), routes, SLUICE_TYPE_INT)
    tweights = sluice_tensor(c_loc(weights), routes, SLUICE_TYPE_FLOAT)
    do i = 1, n
      lists(i, 1) = sluice_tensor(c_loc(w1(1, 1, i)), up, SLUICE_TYPE_FLOAT)
      lists(i, 2) = sluice_tensor(c_loc(w2(1, 1, i)), down, SLUICE_TYPE_FLOAT)
      lists(i, 3) = sluice_tensor(c_loc(grad_w1(1, 1, i)), up, SLUICE_TYPE_FLOAT)
      lists(i, 4) = sluice_tensor(c_loc(grad_w2(1, 1, i)), down, SLUICE_TYPE_FLOAT)
    end do
    params%w1 = c_loc(lists(1, 1))
    params%w2 = c_loc(lists(1, 2))
    grads%w1 = c_loc(lists(1, 3))
    grads%w2 = c_loc(lists(1, 4))

    do step = 0, steps - 1
      call sluice_moe_forward_args_init(forward, c_sizeof(forward))
      forward%tokens = c_loc(tx)
      forward%expert_ids = c_loc(tids)
      forward%route_weights = c_loc(tweights)
      forward%params = c_loc(params)
      forward%out_tokens = c_loc(ty)
      forward%needs_backward = 1
      call sluice_check(sluice_moe_forward(moe, forward, c_null_ptr, saved))
      mine(step) = sum((real(y, c_double) - goal)**2) / (tokens * m)
      grad_y = real(2 * (real(y, c_double) - goal) / (tokens * m), c_float)
      call sluice_moe_backward_args_init(backward, c_sizeof(backward))
      backward%tokens = c_loc(tx)
      backward%route_weights = c_loc(tweights)
      backward%params = c_loc(params)
      backward%grad_out = c_loc(tgrad_y)
      backward%grad_params = c_loc(grads)
      call sluice_check(sluice_moe_backward(moe, saved, backward, c_null_ptr))
      call sluice_step_drop(saved)
      w1 = w1 - rate * grad_w1 ! an expert's gradient is a sum over the tokens of all ranks
      w2 = w2 - rate * grad_w2
    end do
    call sluice_moe_destroy(moe)
    call sluice_context_destroy(context)
  end subroutine

  ! Fills the matrices of this rank's experts, in the order of memory.
  subroutine fill(weight, kind, scale)
    real(c_float), intent(out), target, contiguous :: weight(:, :, :)
    integer, intent(in) :: kind
    real, intent(in) :: scale
    real(c_float), pointer :: flat(:)
    integer :: at
    flat(1:size(weight)) => weight
    do at = 1, size(flat)
      flat(at) = scale * noise(kind, rank * size(flat) + at - 1)
    end do
  end subroutine

  ! A number in [-1, 1) that depends only on the arguments, not on the rank. The mask emulates 32-bit integers.
  real(c_float) function noise(kind, at)
    integer, intent(in) :: kind, at
    integer(c_int64_t), parameter :: mask = int(z"ffffffff", c_int64_t)
    integer(c_int64_t) :: x
    x = iand(times(int(kind, c_int64_t), int(z"9e3779b9", c_int64_t)) &
      + times(int(at, c_int64_t), int(z"85ebca6b", c_int64_t)), mask)
    x = ieor(x, ishft(x, -16))
    x = times(x, int(z"7feb352d", c_int64_t))
    x = ieor(x, ishft(x, -15))
    x = times(x, int(z"846ca68b", c_int64_t))
    x = ieor(x, ishft(x, -16))
    noise = real(ishft(x, -8), c_float) / 8388608.0 - 1
  end function

  ! The low 32 bits of the product of two 32-bit numbers, computed without overflow.
  integer(c_int64_t) function times(a, b)
    integer(c_int64_t), intent(in) :: a, b
    integer(c_int64_t), parameter :: half = 65536, mask = int(z"ffffffff", c_int64_t)
    times = iand(a * mod(b, half) + ishft(iand(a * (b / half), half - 1), 16), mask)
  end function
end program
