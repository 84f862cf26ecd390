! Hand-written bindings: what one MoE layer with Sluice's own gate needs of the C ABI (capi/include/sluice).
! Arrays are column-major here, so a row-major [T, M] of the ABI is an array (M, T).
module sluice
  use, intrinsic :: iso_c_binding
  implicit none
  integer(c_int8_t), parameter :: type_int = 0, type_float = 2

  type, bind(c) :: tensor
    type(c_ptr) :: data = c_null_ptr
    integer(c_int32_t) :: device_type = 1, device_id = 0, ndim = 0
    integer(c_int8_t) :: type_code = 2, type_bits = 32
    integer(c_int16_t) :: type_lanes = 1
    type(c_ptr) :: shape = c_null_ptr, strides = c_null_ptr
    integer(c_int64_t) :: byte_offset = 0
  end type
  type, bind(c) :: error_info
    integer(c_size_t) :: struct_size
    integer(c_int32_t) :: status, rank, peer, native_code
    character(kind=c_char) :: message(1024)
  end type
  type, bind(c) :: context_config
    integer(c_size_t) :: struct_size
    type(c_ptr) :: next
    integer(c_int32_t) :: device_type, device_id
    type(c_ptr) :: gemm, gemm_library, host_gemm, host_gemm_user, allocate, release, allocate_user
  end type
  type, bind(c) :: gate_config
    integer(c_size_t) :: struct_size
    type(c_ptr) :: next
    integer(c_int32_t) :: num_experts, top_k, score, renormalize, num_groups, top_groups, group_score_top, drop_policy
    integer(c_int64_t) :: capacity
    real(c_float) :: capacity_factor, scaling
    integer(c_int64_t) :: min_capacity
  end type
  type, bind(c) :: moe_config
    integer(c_size_t) :: struct_size
    type(c_ptr) :: next
    integer(c_int64_t) :: model_width, hidden_width
    integer(c_int32_t) :: num_experts, top_k, dtype, activation, gated, bias, num_chunks, wgrad_mode, callback_experts, layer_id
    type(c_ptr) :: expert_rank
  end type
  type, bind(c) :: expert_tensors
    integer(c_size_t) :: struct_size = 56
    type(c_ptr) :: w1 = c_null_ptr, w3 = c_null_ptr, w2 = c_null_ptr, b1 = c_null_ptr, b3 = c_null_ptr, b2 = c_null_ptr
  end type
  type, bind(c) :: forward_args
    integer(c_size_t) :: struct_size
    type(c_ptr) :: next, tokens, expert_ids, route_weights, params, callbacks, out_tokens, save, save_user
    integer(c_int32_t) :: needs_backward, local_status
    type(c_ptr) :: local_message
  end type
  type, bind(c) :: backward_args
    integer(c_size_t) :: struct_size
    type(c_ptr) :: next, tokens, route_weights, params, callbacks, grad_out, grad_tokens, grad_route_weights, grad_params
    integer(c_int32_t) :: grad_mode, halves
    type(c_ptr) :: expert_ready, expert_ready_user
    integer(c_int32_t) :: local_status, may_reuse_saved
    type(c_ptr) :: local_message
  end type

  interface
    subroutine error_info_init(info, bytes) bind(c, name="sluice_error_info_init")
      import; type(error_info) :: info; integer(c_size_t), value :: bytes
    end subroutine
    subroutine error_last(info) bind(c, name="sluice_error_last")
      import; type(error_info) :: info
    end subroutine
    subroutine context_config_init(config, bytes) bind(c, name="sluice_context_config_init")
      import; type(context_config) :: config; integer(c_size_t), value :: bytes
    end subroutine
    subroutine gate_config_init(config, bytes) bind(c, name="sluice_gate_config_init")
      import; type(gate_config) :: config; integer(c_size_t), value :: bytes
    end subroutine
    subroutine moe_config_init(config, bytes) bind(c, name="sluice_moe_config_init")
      import; type(moe_config) :: config; integer(c_size_t), value :: bytes
    end subroutine
    subroutine forward_args_init(args, bytes) bind(c, name="sluice_moe_forward_args_init")
      import; type(forward_args) :: args; integer(c_size_t), value :: bytes
    end subroutine
    subroutine backward_args_init(args, bytes) bind(c, name="sluice_moe_backward_args_init")
      import; type(backward_args) :: args; integer(c_size_t), value :: bytes
    end subroutine
    integer(c_int32_t) function context_create(config, comm, context) bind(c, name="sluice_context_create")
      import; type(context_config) :: config; type(c_ptr), value :: comm; type(c_ptr) :: context
    end function
    subroutine context_destroy(context) bind(c, name="sluice_context_destroy")
      import; type(c_ptr), value :: context
    end subroutine
    integer(c_int32_t) function moe_create(context, config, moe) bind(c, name="sluice_moe_create")
      import; type(c_ptr), value :: context; type(moe_config) :: config; type(c_ptr) :: moe
    end function
    subroutine moe_destroy(moe) bind(c, name="sluice_moe_destroy")
      import; type(c_ptr), value :: moe
    end subroutine
    integer(c_int32_t) function moe_forward(moe, args, stream, step) bind(c, name="sluice_moe_forward")
      import; type(c_ptr), value :: moe, stream; type(forward_args) :: args; type(c_ptr) :: step
    end function
    integer(c_int32_t) function moe_backward(moe, step, args, stream) bind(c, name="sluice_moe_backward")
      import; type(c_ptr), value :: moe, step, stream; type(backward_args) :: args
    end function
    subroutine step_drop(step) bind(c, name="sluice_step_drop")
      import; type(c_ptr), value :: step
    end subroutine
    integer(c_int32_t) function gate_forward(config, logits, bias, ids, weights, counts, aux, z) &
        bind(c, name="sluice_gate_forward")
      import; type(gate_config) :: config; type(tensor) :: logits, ids, weights; type(c_ptr), value :: bias, counts, aux, z
    end function
    integer(c_int32_t) function gate_backward(config, logits, bias, ids, grad_weights, grad_aux, grad_z, grad_logits) &
        bind(c, name="sluice_gate_backward")
      import; type(gate_config) :: config; type(tensor) :: logits, ids, grad_weights, grad_logits
      type(c_ptr), value :: bias; real(c_float), value :: grad_aux, grad_z
    end function
  end interface

contains

  ! data and shape need the target attribute and outlive the calls; shape is in the ABI's (row-major) order.
  type(tensor) function describe(data, shape, type_code) result(t)
    type(c_ptr), intent(in) :: data
    integer(c_int64_t), intent(in), target :: shape(:)
    integer(c_int8_t), intent(in) :: type_code
    t = tensor(data=data, ndim=size(shape, kind=c_int32_t), type_code=type_code, shape=c_loc(shape))
  end function

  subroutine must(status)
    integer(c_int32_t), intent(in) :: status
    type(error_info) :: why
    if (status == 0) return
    call error_info_init(why, c_sizeof(why))
    call error_last(why)
    print "(a, i0, 1025a)", "status ", status, ": ", why%message(1:findloc(why%message, c_null_char, dim=1) - 1)
    error stop 1
  end subroutine
end module
