/* The layouts and values that callers compile into themselves: asserted here one by one, and written out to
 * capi/abi/layout.txt, which this test compares. Append only; capi/abi/ABI.md says how.
 *
 *   bazel run //capi/test:layout_test -- --print > layout.txt */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sluice/sluice.h"

/* clang-format off */
#define LAYOUT \
  STRUCT(sluice_error_info_t, 1048) \
  MEMBER(sluice_error_info_t, struct_size, 0, 8) \
  MEMBER(sluice_error_info_t, status, 8, 4) \
  MEMBER(sluice_error_info_t, rank, 12, 4) \
  MEMBER(sluice_error_info_t, peer, 16, 4) \
  MEMBER(sluice_error_info_t, native_code, 20, 4) \
  MEMBER(sluice_error_info_t, message, 24, 1024) \
  STRUCT(sluice_tensor_t, 48) \
  MEMBER(sluice_tensor_t, data, 0, 8) \
  MEMBER(sluice_tensor_t, device_type, 8, 4) \
  MEMBER(sluice_tensor_t, device_id, 12, 4) \
  MEMBER(sluice_tensor_t, ndim, 16, 4) \
  MEMBER(sluice_tensor_t, type_code, 20, 1) \
  MEMBER(sluice_tensor_t, type_bits, 21, 1) \
  MEMBER(sluice_tensor_t, type_lanes, 22, 2) \
  MEMBER(sluice_tensor_t, shape, 24, 8) \
  MEMBER(sluice_tensor_t, strides, 32, 8) \
  MEMBER(sluice_tensor_t, byte_offset, 40, 8) \
  STRUCT(sluice_ext_header_t, 16) \
  MEMBER(sluice_ext_header_t, type, 0, 4) \
  MEMBER(sluice_ext_header_t, reserved, 4, 4) \
  MEMBER(sluice_ext_header_t, next, 8, 8) \
  STRUCT(sluice_comm_config_t, 40) \
  MEMBER(sluice_comm_config_t, struct_size, 0, 8) \
  MEMBER(sluice_comm_config_t, next, 8, 8) \
  MEMBER(sluice_comm_config_t, rank, 16, 4) \
  MEMBER(sluice_comm_config_t, world_size, 20, 4) \
  MEMBER(sluice_comm_config_t, timeout_ns, 24, 8) \
  MEMBER(sluice_comm_config_t, warn_ns, 32, 8) \
  STRUCT(sluice_exchange_t, 32) \
  MEMBER(sluice_exchange_t, send, 0, 8) \
  MEMBER(sluice_exchange_t, send_bytes, 8, 8) \
  MEMBER(sluice_exchange_t, recv, 16, 8) \
  MEMBER(sluice_exchange_t, recv_bytes, 24, 8) \
  STRUCT(sluice_host_failure_t, 520) \
  MEMBER(sluice_host_failure_t, peer, 0, 4) \
  MEMBER(sluice_host_failure_t, native_code, 4, 4) \
  MEMBER(sluice_host_failure_t, message, 8, 512) \
  STRUCT(sluice_host_comm_vtable_t, 64) \
  MEMBER(sluice_host_comm_vtable_t, struct_size, 0, 8) \
  MEMBER(sluice_host_comm_vtable_t, exchange_start, 8, 8) \
  MEMBER(sluice_host_comm_vtable_t, exchange_wait, 16, 8) \
  MEMBER(sluice_host_comm_vtable_t, abort, 24, 8) \
  MEMBER(sluice_host_comm_vtable_t, publish, 32, 8) \
  MEMBER(sluice_host_comm_vtable_t, lookup, 40, 8) \
  MEMBER(sluice_host_comm_vtable_t, destroy, 48, 8) \
  MEMBER(sluice_host_comm_vtable_t, is_interrupted, 56, 8) \
  STRUCT(sluice_nccl_group_t, 72) \
  MEMBER(sluice_nccl_group_t, struct_size, 0, 8) \
  MEMBER(sluice_nccl_group_t, next, 8, 8) \
  MEMBER(sluice_nccl_group_t, device_id, 16, 4) \
  MEMBER(sluice_nccl_group_t, color, 20, 4) \
  MEMBER(sluice_nccl_group_t, id, 24, 8) \
  MEMBER(sluice_nccl_group_t, parent, 32, 8) \
  MEMBER(sluice_nccl_group_t, library, 40, 8) \
  MEMBER(sluice_nccl_group_t, store_user, 48, 8) \
  MEMBER(sluice_nccl_group_t, publish, 56, 8) \
  MEMBER(sluice_nccl_group_t, lookup, 64, 8) \
  STRUCT(sluice_tcp_config_t, 32) \
  MEMBER(sluice_tcp_config_t, struct_size, 0, 8) \
  MEMBER(sluice_tcp_config_t, next, 8, 8) \
  MEMBER(sluice_tcp_config_t, interfaces, 16, 8) \
  MEMBER(sluice_tcp_config_t, connect_timeout_ns, 24, 8) \
  STRUCT(sluice_host_gemm_args_t, 112) \
  MEMBER(sluice_host_gemm_args_t, m, 0, 8) \
  MEMBER(sluice_host_gemm_args_t, n, 8, 8) \
  MEMBER(sluice_host_gemm_args_t, k, 16, 8) \
  MEMBER(sluice_host_gemm_args_t, a, 24, 8) \
  MEMBER(sluice_host_gemm_args_t, b, 32, 8) \
  MEMBER(sluice_host_gemm_args_t, c, 40, 8) \
  MEMBER(sluice_host_gemm_args_t, a_row_stride, 48, 8) \
  MEMBER(sluice_host_gemm_args_t, a_col_stride, 56, 8) \
  MEMBER(sluice_host_gemm_args_t, b_row_stride, 64, 8) \
  MEMBER(sluice_host_gemm_args_t, b_col_stride, 72, 8) \
  MEMBER(sluice_host_gemm_args_t, c_row_stride, 80, 8) \
  MEMBER(sluice_host_gemm_args_t, c_col_stride, 88, 8) \
  MEMBER(sluice_host_gemm_args_t, dtype_ab, 96, 4) \
  MEMBER(sluice_host_gemm_args_t, dtype_c, 100, 4) \
  MEMBER(sluice_host_gemm_args_t, beta, 104, 4) \
  MEMBER(sluice_host_gemm_args_t, reserved, 108, 4) \
  STRUCT(sluice_context_config_t, 128) \
  MEMBER(sluice_context_config_t, struct_size, 0, 8) \
  MEMBER(sluice_context_config_t, next, 8, 8) \
  MEMBER(sluice_context_config_t, device_type, 16, 4) \
  MEMBER(sluice_context_config_t, device_id, 20, 4) \
  MEMBER(sluice_context_config_t, gemm, 24, 8) \
  MEMBER(sluice_context_config_t, gemm_library, 32, 8) \
  MEMBER(sluice_context_config_t, host_gemm, 40, 8) \
  MEMBER(sluice_context_config_t, host_gemm_user, 48, 8) \
  MEMBER(sluice_context_config_t, allocate, 56, 8) \
  MEMBER(sluice_context_config_t, release, 64, 8) \
  MEMBER(sluice_context_config_t, allocate_user, 72, 8) \
  MEMBER(sluice_context_config_t, memory_budget, 80, 8) \
  MEMBER(sluice_context_config_t, max_outstanding, 88, 4) \
  MEMBER(sluice_context_config_t, halves_apart, 92, 4) \
  MEMBER(sluice_context_config_t, host_memory_budget, 96, 8) \
  MEMBER(sluice_context_config_t, shared_memory_budget, 104, 8) \
  MEMBER(sluice_context_config_t, shared_host_memory_budget, 112, 8) \
  MEMBER(sluice_context_config_t, num_layers, 120, 4) \
  MEMBER(sluice_context_config_t, reserved, 124, 4) \
  STRUCT(sluice_context_stats_t, 272) \
  MEMBER(sluice_context_stats_t, struct_size, 0, 8) \
  MEMBER(sluice_context_stats_t, current_bytes, 8, 8) \
  MEMBER(sluice_context_stats_t, peak_bytes, 16, 8) \
  MEMBER(sluice_context_stats_t, slot_bytes, 24, 8) \
  MEMBER(sluice_context_stats_t, saved_bytes, 32, 8) \
  MEMBER(sluice_context_stats_t, bytes_sent, 40, 8) \
  MEMBER(sluice_context_stats_t, num_passes, 48, 8) \
  MEMBER(sluice_context_stats_t, compute_ns, 56, 8) \
  MEMBER(sluice_context_stats_t, comm_ns, 64, 8) \
  MEMBER(sluice_context_stats_t, comm_cpu_ns, 72, 8) \
  MEMBER(sluice_context_stats_t, pass_ns, 80, 8) \
  MEMBER(sluice_context_stats_t, last_num_chunks, 88, 4) \
  MEMBER(sluice_context_stats_t, last_is_settled, 92, 4) \
  MEMBER(sluice_context_stats_t, gemm, 96, 64) \
  MEMBER(sluice_context_stats_t, num_walks, 160, 8) \
  MEMBER(sluice_context_stats_t, bind_cpu_ns, 168, 8) \
  MEMBER(sluice_context_stats_t, walk_cpu_ns, 176, 8) \
  MEMBER(sluice_context_stats_t, wait_ns, 184, 8) \
  MEMBER(sluice_context_stats_t, num_wakes, 192, 8) \
  MEMBER(sluice_context_stats_t, wake_cpu_ns, 200, 8) \
  MEMBER(sluice_context_stats_t, num_readings, 208, 8) \
  MEMBER(sluice_context_stats_t, readings_cpu_ns, 216, 8) \
  MEMBER(sluice_context_stats_t, num_pool_allocations, 224, 8) \
  MEMBER(sluice_context_stats_t, idle_pool_bytes, 232, 8) \
  MEMBER(sluice_context_stats_t, num_fallback_chunks, 240, 8) \
  MEMBER(sluice_context_stats_t, num_outstanding, 248, 8) \
  MEMBER(sluice_context_stats_t, most_outstanding, 256, 8) \
  MEMBER(sluice_context_stats_t, planned_outstanding, 264, 8) \
  STRUCT(sluice_trace_event_t, 48) \
  MEMBER(sluice_trace_event_t, begin_ns, 0, 8) \
  MEMBER(sluice_trace_event_t, end_ns, 8, 8) \
  MEMBER(sluice_trace_event_t, op, 16, 8) \
  MEMBER(sluice_trace_event_t, layer, 24, 4) \
  MEMBER(sluice_trace_event_t, chunk, 28, 4) \
  MEMBER(sluice_trace_event_t, lane, 32, 4) \
  MEMBER(sluice_trace_event_t, direction, 36, 4) \
  MEMBER(sluice_trace_event_t, bytes, 40, 8) \
  STRUCT(sluice_gate_config_t, 72) \
  MEMBER(sluice_gate_config_t, struct_size, 0, 8) \
  MEMBER(sluice_gate_config_t, next, 8, 8) \
  MEMBER(sluice_gate_config_t, num_experts, 16, 4) \
  MEMBER(sluice_gate_config_t, top_k, 20, 4) \
  MEMBER(sluice_gate_config_t, score, 24, 4) \
  MEMBER(sluice_gate_config_t, renormalize, 28, 4) \
  MEMBER(sluice_gate_config_t, num_groups, 32, 4) \
  MEMBER(sluice_gate_config_t, top_groups, 36, 4) \
  MEMBER(sluice_gate_config_t, group_score_top, 40, 4) \
  MEMBER(sluice_gate_config_t, drop_policy, 44, 4) \
  MEMBER(sluice_gate_config_t, capacity, 48, 8) \
  MEMBER(sluice_gate_config_t, capacity_factor, 56, 4) \
  MEMBER(sluice_gate_config_t, scaling, 60, 4) \
  MEMBER(sluice_gate_config_t, min_capacity, 64, 8) \
  STRUCT(sluice_moe_config_t, 144) \
  MEMBER(sluice_moe_config_t, struct_size, 0, 8) \
  MEMBER(sluice_moe_config_t, next, 8, 8) \
  MEMBER(sluice_moe_config_t, model_width, 16, 8) \
  MEMBER(sluice_moe_config_t, hidden_width, 24, 8) \
  MEMBER(sluice_moe_config_t, num_experts, 32, 4) \
  MEMBER(sluice_moe_config_t, top_k, 36, 4) \
  MEMBER(sluice_moe_config_t, dtype, 40, 4) \
  MEMBER(sluice_moe_config_t, activation, 44, 4) \
  MEMBER(sluice_moe_config_t, gated, 48, 4) \
  MEMBER(sluice_moe_config_t, bias, 52, 4) \
  MEMBER(sluice_moe_config_t, num_chunks, 56, 4) \
  MEMBER(sluice_moe_config_t, wgrad_mode, 60, 4) \
  MEMBER(sluice_moe_config_t, callback_experts, 64, 4) \
  MEMBER(sluice_moe_config_t, layer_id, 68, 4) \
  MEMBER(sluice_moe_config_t, expert_rank, 72, 8) \
  MEMBER(sluice_moe_config_t, restore_input, 80, 4) \
  MEMBER(sluice_moe_config_t, restore_middle, 84, 4) \
  MEMBER(sluice_moe_config_t, swiglu_alpha, 88, 4) \
  MEMBER(sluice_moe_config_t, swiglu_limit, 92, 4) \
  MEMBER(sluice_moe_config_t, swiglu_offset, 96, 4) \
  MEMBER(sluice_moe_config_t, reserved, 100, 4) \
  MEMBER(sluice_moe_config_t, exchange_mode, 104, 4) \
  MEMBER(sluice_moe_config_t, chunk_cut, 108, 4) \
  MEMBER(sluice_moe_config_t, ceiling_rows, 112, 8) \
  MEMBER(sluice_moe_config_t, deduplicate, 120, 4) \
  MEMBER(sluice_moe_config_t, reserved_3, 124, 4) \
  MEMBER(sluice_moe_config_t, restore_input_of, 128, 8) \
  MEMBER(sluice_moe_config_t, restore_middle_of, 136, 8) \
  STRUCT(sluice_expert_tensors_t, 56) \
  MEMBER(sluice_expert_tensors_t, struct_size, 0, 8) \
  MEMBER(sluice_expert_tensors_t, w1, 8, 8) \
  MEMBER(sluice_expert_tensors_t, w3, 16, 8) \
  MEMBER(sluice_expert_tensors_t, w2, 24, 8) \
  MEMBER(sluice_expert_tensors_t, b1, 32, 8) \
  MEMBER(sluice_expert_tensors_t, b3, 40, 8) \
  MEMBER(sluice_expert_tensors_t, b2, 48, 8) \
  STRUCT(sluice_expert_callbacks_t, 32) \
  MEMBER(sluice_expert_callbacks_t, struct_size, 0, 8) \
  MEMBER(sluice_expert_callbacks_t, user, 8, 8) \
  MEMBER(sluice_expert_callbacks_t, forward, 16, 8) \
  MEMBER(sluice_expert_callbacks_t, backward, 24, 8) \
  STRUCT(sluice_moe_forward_args_t, 104) \
  MEMBER(sluice_moe_forward_args_t, struct_size, 0, 8) \
  MEMBER(sluice_moe_forward_args_t, next, 8, 8) \
  MEMBER(sluice_moe_forward_args_t, tokens, 16, 8) \
  MEMBER(sluice_moe_forward_args_t, expert_ids, 24, 8) \
  MEMBER(sluice_moe_forward_args_t, route_weights, 32, 8) \
  MEMBER(sluice_moe_forward_args_t, params, 40, 8) \
  MEMBER(sluice_moe_forward_args_t, callbacks, 48, 8) \
  MEMBER(sluice_moe_forward_args_t, out_tokens, 56, 8) \
  MEMBER(sluice_moe_forward_args_t, save, 64, 8) \
  MEMBER(sluice_moe_forward_args_t, save_user, 72, 8) \
  MEMBER(sluice_moe_forward_args_t, needs_backward, 80, 4) \
  MEMBER(sluice_moe_forward_args_t, local_status, 84, 4) \
  MEMBER(sluice_moe_forward_args_t, local_message, 88, 8) \
  MEMBER(sluice_moe_forward_args_t, save_is_counted, 96, 4) \
  MEMBER(sluice_moe_forward_args_t, repeats, 100, 4) \
  STRUCT(sluice_moe_backward_args_t, 120) \
  MEMBER(sluice_moe_backward_args_t, struct_size, 0, 8) \
  MEMBER(sluice_moe_backward_args_t, next, 8, 8) \
  MEMBER(sluice_moe_backward_args_t, tokens, 16, 8) \
  MEMBER(sluice_moe_backward_args_t, route_weights, 24, 8) \
  MEMBER(sluice_moe_backward_args_t, params, 32, 8) \
  MEMBER(sluice_moe_backward_args_t, callbacks, 40, 8) \
  MEMBER(sluice_moe_backward_args_t, grad_out, 48, 8) \
  MEMBER(sluice_moe_backward_args_t, grad_tokens, 56, 8) \
  MEMBER(sluice_moe_backward_args_t, grad_route_weights, 64, 8) \
  MEMBER(sluice_moe_backward_args_t, grad_params, 72, 8) \
  MEMBER(sluice_moe_backward_args_t, grad_mode, 80, 4) \
  MEMBER(sluice_moe_backward_args_t, halves, 84, 4) \
  MEMBER(sluice_moe_backward_args_t, expert_ready, 88, 8) \
  MEMBER(sluice_moe_backward_args_t, expert_ready_user, 96, 8) \
  MEMBER(sluice_moe_backward_args_t, local_status, 104, 4) \
  MEMBER(sluice_moe_backward_args_t, may_reuse_saved, 108, 4) \
  MEMBER(sluice_moe_backward_args_t, local_message, 112, 8) \
  STRUCT(sluice_ceiling_report_t, 56) \
  MEMBER(sluice_ceiling_report_t, struct_size, 0, 8) \
  MEMBER(sluice_ceiling_report_t, num_forwards, 8, 8) \
  MEMBER(sluice_ceiling_report_t, num_routes, 16, 8) \
  MEMBER(sluice_ceiling_report_t, num_dropped, 24, 8) \
  MEMBER(sluice_ceiling_report_t, most_rows, 32, 8) \
  MEMBER(sluice_ceiling_report_t, bad_route, 40, 8) \
  MEMBER(sluice_ceiling_report_t, most_expert, 48, 4) \
  MEMBER(sluice_ceiling_report_t, reserved, 52, 4) \
  STRUCT(sluice_plan_config_t, 88) \
  MEMBER(sluice_plan_config_t, struct_size, 0, 8) \
  MEMBER(sluice_plan_config_t, next, 8, 8) \
  MEMBER(sluice_plan_config_t, max_tokens, 16, 8) \
  MEMBER(sluice_plan_config_t, memory_budget, 24, 8) \
  MEMBER(sluice_plan_config_t, base_bytes, 32, 8) \
  MEMBER(sluice_plan_config_t, max_outstanding, 40, 4) \
  MEMBER(sluice_plan_config_t, num_chunks, 44, 4) \
  MEMBER(sluice_plan_config_t, restore_input, 48, 4) \
  MEMBER(sluice_plan_config_t, restore_middle, 52, 4) \
  MEMBER(sluice_plan_config_t, wgrad_mode, 56, 4) \
  MEMBER(sluice_plan_config_t, halves_apart, 60, 4) \
  MEMBER(sluice_plan_config_t, host_memory_budget, 64, 8) \
  MEMBER(sluice_plan_config_t, restore_input_of, 72, 8) \
  MEMBER(sluice_plan_config_t, restore_middle_of, 80, 8) \
  STRUCT(sluice_plan_info_t, 208) \
  MEMBER(sluice_plan_info_t, struct_size, 0, 8) \
  MEMBER(sluice_plan_info_t, max_tokens, 8, 8) \
  MEMBER(sluice_plan_info_t, chunk_rows, 16, 8) \
  MEMBER(sluice_plan_info_t, kept_rows, 24, 8) \
  MEMBER(sluice_plan_info_t, num_blocks, 32, 4) \
  MEMBER(sluice_plan_info_t, num_chunks, 36, 4) \
  MEMBER(sluice_plan_info_t, max_chunks, 40, 4) \
  MEMBER(sluice_plan_info_t, restore_input, 44, 4) \
  MEMBER(sluice_plan_info_t, restore_middle, 48, 4) \
  MEMBER(sluice_plan_info_t, wgrad_mode, 52, 4) \
  MEMBER(sluice_plan_info_t, max_outstanding, 56, 4) \
  MEMBER(sluice_plan_info_t, kept_chunks, 60, 4) \
  MEMBER(sluice_plan_info_t, base_bytes, 64, 8) \
  MEMBER(sluice_plan_info_t, slot_bytes, 72, 8) \
  MEMBER(sluice_plan_info_t, routing_bytes, 80, 8) \
  MEMBER(sluice_plan_info_t, schedule_bytes, 88, 8) \
  MEMBER(sluice_plan_info_t, header_bytes, 96, 8) \
  MEMBER(sluice_plan_info_t, product_bytes, 104, 8) \
  MEMBER(sluice_plan_info_t, step_bytes, 112, 8) \
  MEMBER(sluice_plan_info_t, total_bytes, 120, 8) \
  MEMBER(sluice_plan_info_t, relative_time, 128, 8) \
  MEMBER(sluice_plan_info_t, host_pool_bytes, 136, 8) \
  MEMBER(sluice_plan_info_t, communication_bytes, 144, 8) \
  MEMBER(sluice_plan_info_t, saved_bytes, 152, 8) \
  MEMBER(sluice_plan_info_t, deferred_bytes, 160, 8) \
  MEMBER(sluice_plan_info_t, peak_slot_bytes, 168, 8) \
  MEMBER(sluice_plan_info_t, peak_direction, 176, 4) \
  MEMBER(sluice_plan_info_t, peak_op, 180, 28) \
  STRUCT(sluice_plan_candidate_t, 40) \
  MEMBER(sluice_plan_candidate_t, num_chunks, 0, 4) \
  MEMBER(sluice_plan_candidate_t, restore_input, 4, 4) \
  MEMBER(sluice_plan_candidate_t, restore_middle, 8, 4) \
  MEMBER(sluice_plan_candidate_t, wgrad_mode, 12, 4) \
  MEMBER(sluice_plan_candidate_t, total_bytes, 16, 8) \
  MEMBER(sluice_plan_candidate_t, relative_time, 24, 8) \
  MEMBER(sluice_plan_candidate_t, fits, 32, 4) \
  MEMBER(sluice_plan_candidate_t, kept_chunks, 36, 4) \
  STRUCT(sluice_planner_workload_t, 136) \
  MEMBER(sluice_planner_workload_t, struct_size, 0, 8) \
  MEMBER(sluice_planner_workload_t, next, 8, 8) \
  MEMBER(sluice_planner_workload_t, model_width, 16, 8) \
  MEMBER(sluice_planner_workload_t, hidden_width, 24, 8) \
  MEMBER(sluice_planner_workload_t, num_tokens, 32, 8) \
  MEMBER(sluice_planner_workload_t, memory_budget, 40, 8) \
  MEMBER(sluice_planner_workload_t, skew, 48, 8) \
  MEMBER(sluice_planner_workload_t, num_experts, 56, 4) \
  MEMBER(sluice_planner_workload_t, top_k, 60, 4) \
  MEMBER(sluice_planner_workload_t, world_size, 64, 4) \
  MEMBER(sluice_planner_workload_t, dtype, 68, 4) \
  MEMBER(sluice_planner_workload_t, gated, 72, 4) \
  MEMBER(sluice_planner_workload_t, callback_experts, 76, 4) \
  MEMBER(sluice_planner_workload_t, max_outstanding, 80, 4) \
  MEMBER(sluice_planner_workload_t, reserved, 84, 4) \
  MEMBER(sluice_planner_workload_t, host_memory_budget, 88, 8) \
  MEMBER(sluice_planner_workload_t, deduplicate, 96, 4) \
  MEMBER(sluice_planner_workload_t, chunk_cut, 100, 4) \
  MEMBER(sluice_planner_workload_t, restore_input_of, 104, 8) \
  MEMBER(sluice_planner_workload_t, restore_middle_of, 112, 8) \
  MEMBER(sluice_planner_workload_t, kept_chunks, 120, 4) \
  MEMBER(sluice_planner_workload_t, may_keep_part, 124, 4) \
  MEMBER(sluice_planner_workload_t, activation, 128, 4) \
  MEMBER(sluice_planner_workload_t, reserved_2, 132, 4) \
  STRUCT(sluice_planner_choice_t, 16) \
  MEMBER(sluice_planner_choice_t, num_chunks, 0, 4) \
  MEMBER(sluice_planner_choice_t, restore_input, 4, 4) \
  MEMBER(sluice_planner_choice_t, restore_middle, 8, 4) \
  MEMBER(sluice_planner_choice_t, wgrad_mode, 12, 4) \
  STRUCT(sluice_planner_prediction_t, 248) \
  MEMBER(sluice_planner_prediction_t, struct_size, 0, 8) \
  MEMBER(sluice_planner_prediction_t, forward_seconds, 8, 8) \
  MEMBER(sluice_planner_prediction_t, backward_seconds, 16, 8) \
  MEMBER(sluice_planner_prediction_t, forward_busy, 24, 32) \
  MEMBER(sluice_planner_prediction_t, backward_busy, 56, 32) \
  MEMBER(sluice_planner_prediction_t, overhead_seconds, 88, 8) \
  MEMBER(sluice_planner_prediction_t, mpmoe_forward_seconds, 96, 8) \
  MEMBER(sluice_planner_prediction_t, mpmoe_backward_seconds, 104, 8) \
  MEMBER(sluice_planner_prediction_t, mpipemoe_forward_seconds, 112, 8) \
  MEMBER(sluice_planner_prediction_t, mpipemoe_backward_seconds, 120, 8) \
  MEMBER(sluice_planner_prediction_t, machine_error_median, 128, 8) \
  MEMBER(sluice_planner_prediction_t, machine_error_p90, 136, 8) \
  MEMBER(sluice_planner_prediction_t, chunk_rows, 144, 8) \
  MEMBER(sluice_planner_prediction_t, base_bytes, 152, 8) \
  MEMBER(sluice_planner_prediction_t, slot_bytes, 160, 8) \
  MEMBER(sluice_planner_prediction_t, routing_bytes, 168, 8) \
  MEMBER(sluice_planner_prediction_t, schedule_bytes, 176, 8) \
  MEMBER(sluice_planner_prediction_t, header_bytes, 184, 8) \
  MEMBER(sluice_planner_prediction_t, product_bytes, 192, 8) \
  MEMBER(sluice_planner_prediction_t, step_bytes, 200, 8) \
  MEMBER(sluice_planner_prediction_t, total_bytes, 208, 8) \
  MEMBER(sluice_planner_prediction_t, fits, 216, 4) \
  MEMBER(sluice_planner_prediction_t, num_entries, 220, 4) \
  MEMBER(sluice_planner_prediction_t, max_chunks, 224, 4) \
  MEMBER(sluice_planner_prediction_t, run_chunks, 228, 4) \
  MEMBER(sluice_planner_prediction_t, sent_rows, 232, 8) \
  MEMBER(sluice_planner_prediction_t, kept_chunks, 240, 4) \
  MEMBER(sluice_planner_prediction_t, reserved, 244, 4) \
  STRUCT(sluice_planner_entry_t, 40) \
  MEMBER(sluice_planner_entry_t, begin_seconds, 0, 8) \
  MEMBER(sluice_planner_entry_t, end_seconds, 8, 8) \
  MEMBER(sluice_planner_entry_t, op, 16, 8) \
  MEMBER(sluice_planner_entry_t, direction, 24, 4) \
  MEMBER(sluice_planner_entry_t, lane, 28, 4) \
  MEMBER(sluice_planner_entry_t, chunk, 32, 4) \
  MEMBER(sluice_planner_entry_t, index, 36, 4) \
  STRUCT(sluice_planner_candidate_t, 64) \
  MEMBER(sluice_planner_candidate_t, choice, 0, 16) \
  MEMBER(sluice_planner_candidate_t, verdict, 16, 4) \
  MEMBER(sluice_planner_candidate_t, kept_chunks, 20, 4) \
  MEMBER(sluice_planner_candidate_t, forward_seconds, 24, 8) \
  MEMBER(sluice_planner_candidate_t, backward_seconds, 32, 8) \
  MEMBER(sluice_planner_candidate_t, slower_by, 40, 8) \
  MEMBER(sluice_planner_candidate_t, total_bytes, 48, 8) \
  MEMBER(sluice_planner_candidate_t, bytes_over, 56, 8) \
  STRUCT(sluice_paper_footprint_t, 48) \
  MEMBER(sluice_paper_footprint_t, states, 0, 8) \
  MEMBER(sluice_paper_footprint_t, activations, 8, 8) \
  MEMBER(sluice_paper_footprint_t, temporaries, 16, 8) \
  MEMBER(sluice_paper_footprint_t, pipelined_temporaries, 24, 8) \
  MEMBER(sluice_paper_footprint_t, saving, 32, 8) \
  MEMBER(sluice_paper_footprint_t, saved_share, 40, 8) \
  STRUCT(sluice_schedule_config_t, 96) \
  MEMBER(sluice_schedule_config_t, struct_size, 0, 8) \
  MEMBER(sluice_schedule_config_t, next, 8, 8) \
  MEMBER(sluice_schedule_config_t, direction, 16, 4) \
  MEMBER(sluice_schedule_config_t, num_chunks, 20, 4) \
  MEMBER(sluice_schedule_config_t, single_rank, 24, 4) \
  MEMBER(sluice_schedule_config_t, needs_backward, 28, 4) \
  MEMBER(sluice_schedule_config_t, callback_experts, 32, 4) \
  MEMBER(sluice_schedule_config_t, gated, 36, 4) \
  MEMBER(sluice_schedule_config_t, input_half, 40, 4) \
  MEMBER(sluice_schedule_config_t, weight_half, 44, 4) \
  MEMBER(sluice_schedule_config_t, wgrad_mode, 48, 4) \
  MEMBER(sluice_schedule_config_t, may_reuse_saved, 52, 4) \
  MEMBER(sluice_schedule_config_t, under_plan, 56, 4) \
  MEMBER(sluice_schedule_config_t, restore_input, 60, 4) \
  MEMBER(sluice_schedule_config_t, restore_middle, 64, 4) \
  MEMBER(sluice_schedule_config_t, reserved, 68, 4) \
  MEMBER(sluice_schedule_config_t, restore_input_of, 72, 8) \
  MEMBER(sluice_schedule_config_t, restore_middle_of, 80, 8) \
  MEMBER(sluice_schedule_config_t, deduplicate, 88, 4) \
  MEMBER(sluice_schedule_config_t, cut_rows, 92, 4) \
  STRUCT(sluice_schedule_prediction_t, 48) \
  MEMBER(sluice_schedule_prediction_t, struct_size, 0, 8) \
  MEMBER(sluice_schedule_prediction_t, seconds, 8, 8) \
  MEMBER(sluice_schedule_prediction_t, busy_seconds, 16, 32) \
  STRUCT(sluice_tuner_config_t, 32) \
  MEMBER(sluice_tuner_config_t, struct_size, 0, 8) \
  MEMBER(sluice_tuner_config_t, next, 8, 8) \
  MEMBER(sluice_tuner_config_t, mode, 16, 4) \
  MEMBER(sluice_tuner_config_t, reserved, 20, 4) \
  MEMBER(sluice_tuner_config_t, machine, 24, 8) \
  STRUCT(sluice_tuner_decision_t, 96) \
  MEMBER(sluice_tuner_decision_t, model_width, 0, 8) \
  MEMBER(sluice_tuner_decision_t, hidden_width, 8, 8) \
  MEMBER(sluice_tuner_decision_t, num_experts, 16, 4) \
  MEMBER(sluice_tuner_decision_t, top_k, 20, 4) \
  MEMBER(sluice_tuner_decision_t, dtype, 24, 4) \
  MEMBER(sluice_tuner_decision_t, gated, 28, 4) \
  MEMBER(sluice_tuner_decision_t, rows, 32, 8) \
  MEMBER(sluice_tuner_decision_t, num_chunks, 40, 4) \
  MEMBER(sluice_tuner_decision_t, wgrad_mode, 44, 4) \
  MEMBER(sluice_tuner_decision_t, why, 48, 4) \
  MEMBER(sluice_tuner_decision_t, num_raced, 52, 4) \
  MEMBER(sluice_tuner_decision_t, race_passes, 56, 8) \
  MEMBER(sluice_tuner_decision_t, seconds, 64, 8) \
  MEMBER(sluice_tuner_decision_t, predicted_seconds, 72, 8) \
  MEMBER(sluice_tuner_decision_t, runner_up_seconds, 80, 8) \
  MEMBER(sluice_tuner_decision_t, runner_up_chunks, 88, 4) \
  MEMBER(sluice_tuner_decision_t, runner_up_wgrad_mode, 92, 4) \
  STRUCT(sluice_tuner_policy_t, 32) \
  MEMBER(sluice_tuner_policy_t, restore_input, 0, 4) \
  MEMBER(sluice_tuner_policy_t, restore_middle, 4, 4) \
  MEMBER(sluice_tuner_policy_t, runner_up_restore_input, 8, 4) \
  MEMBER(sluice_tuner_policy_t, runner_up_restore_middle, 12, 4) \
  MEMBER(sluice_tuner_policy_t, memory_budget, 16, 8) \
  MEMBER(sluice_tuner_policy_t, total_bytes, 24, 8) \
  STRUCT(sluice_tuner_stats_t, 112) \
  MEMBER(sluice_tuner_stats_t, struct_size, 0, 8) \
  MEMBER(sluice_tuner_stats_t, timed_passes, 8, 8) \
  MEMBER(sluice_tuner_stats_t, race_passes, 16, 8) \
  MEMBER(sluice_tuner_stats_t, num_decisions, 24, 8) \
  MEMBER(sluice_tuner_stats_t, num_switches, 32, 8) \
  MEMBER(sluice_tuner_stats_t, num_questioned, 40, 8) \
  MEMBER(sluice_tuner_stats_t, num_changed, 48, 8) \
  MEMBER(sluice_tuner_stats_t, monotonic, 56, 8) \
  MEMBER(sluice_tuner_stats_t, not_monotonic, 64, 8) \
  MEMBER(sluice_tuner_stats_t, total_seconds, 72, 8) \
  MEMBER(sluice_tuner_stats_t, excess_seconds, 80, 8) \
  MEMBER(sluice_tuner_stats_t, switch_seconds, 88, 8) \
  MEMBER(sluice_tuner_stats_t, one_valley, 96, 8) \
  MEMBER(sluice_tuner_stats_t, not_one_valley, 104, 8) \
  STRUCT(sluice_calibration_config_t, 56) \
  MEMBER(sluice_calibration_config_t, struct_size, 0, 8) \
  MEMBER(sluice_calibration_config_t, next, 8, 8) \
  MEMBER(sluice_calibration_config_t, model_width, 16, 8) \
  MEMBER(sluice_calibration_config_t, hidden_width, 24, 8) \
  MEMBER(sluice_calibration_config_t, seconds, 32, 8) \
  MEMBER(sluice_calibration_config_t, cache_dir, 40, 8) \
  MEMBER(sluice_calibration_config_t, dtype, 48, 4) \
  MEMBER(sluice_calibration_config_t, refresh, 52, 4)

#define CONSTANTS \
  CONSTANT(SLUICE_OK, 0) \
  CONSTANT(SLUICE_E_INVALID_ARGUMENT, -1) \
  CONSTANT(SLUICE_E_ABI, -2) \
  CONSTANT(SLUICE_E_NO_MEMORY, -3) \
  CONSTANT(SLUICE_E_BUSY, -4) \
  CONSTANT(SLUICE_E_UNSUPPORTED, -5) \
  CONSTANT(SLUICE_E_NOT_FOUND, -6) \
  CONSTANT(SLUICE_E_STATE, -7) \
  CONSTANT(SLUICE_E_MISMATCH, -8) \
  CONSTANT(SLUICE_E_PEER_REFUSED, -9) \
  CONSTANT(SLUICE_E_PEER_LOST, -10) \
  CONSTANT(SLUICE_E_TIMED_OUT, -11) \
  CONSTANT(SLUICE_E_ABORTED, -12) \
  CONSTANT(SLUICE_E_FOREIGN, -13) \
  CONSTANT(SLUICE_E_OVER_BUDGET, -14) \
  CONSTANT(SLUICE_E_INTERNAL, -15) \
  CONSTANT(SLUICE_E_CAPACITY, -16) \
  CONSTANT(SLUICE_LOG_ERROR, 0) \
  CONSTANT(SLUICE_LOG_WARN, 1) \
  CONSTANT(SLUICE_LOG_INFO, 2) \
  CONSTANT(SLUICE_LOG_DEBUG, 3) \
  CONSTANT(SLUICE_TYPE_INT, 0) \
  CONSTANT(SLUICE_TYPE_UINT, 1) \
  CONSTANT(SLUICE_TYPE_FLOAT, 2) \
  CONSTANT(SLUICE_TYPE_BFLOAT, 4) \
  CONSTANT(SLUICE_DEVICE_CPU, 1) \
  CONSTANT(SLUICE_DEVICE_CUDA, 2) \
  CONSTANT(SLUICE_DTYPE_F32, 1) \
  CONSTANT(SLUICE_DTYPE_BF16, 2) \
  CONSTANT(SLUICE_DTYPE_F16, 3) \
  CONSTANT(SLUICE_DTYPE_F64, 4) \
  CONSTANT(SLUICE_DTYPE_I32, 5) \
  CONSTANT(SLUICE_DTYPE_I64, 6) \
  CONSTANT(SLUICE_LANE_COMPUTE, 0) \
  CONSTANT(SLUICE_LANE_COMM, 1) \
  CONSTANT(SLUICE_LANE_COPY_OUT, 2) \
  CONSTANT(SLUICE_LANE_COPY_IN, 3) \
  CONSTANT(SLUICE_FORWARD, 0) \
  CONSTANT(SLUICE_BACKWARD, 1) \
  CONSTANT(SLUICE_SCORE_SOFTMAX, 0) \
  CONSTANT(SLUICE_SCORE_SIGMOID, 1) \
  CONSTANT(SLUICE_DROP_NONE, 0) \
  CONSTANT(SLUICE_DROP_POSITION, 1) \
  CONSTANT(SLUICE_DROP_SCORE, 2) \
  CONSTANT(SLUICE_ACTIVATION_IDENTITY, 0) \
  CONSTANT(SLUICE_ACTIVATION_RELU, 1) \
  CONSTANT(SLUICE_ACTIVATION_GELU, 2) \
  CONSTANT(SLUICE_ACTIVATION_GELU_TANH, 3) \
  CONSTANT(SLUICE_ACTIVATION_SILU, 4) \
  CONSTANT(SLUICE_ACTIVATION_RELU2, 5) \
  CONSTANT(SLUICE_ACTIVATION_SWIGLU, 6) \
  CONSTANT(SLUICE_GATED_NO, 0) \
  CONSTANT(SLUICE_GATED_HALVES, 1) \
  CONSTANT(SLUICE_GATED_INTERLEAVED, 2) \
  CONSTANT(SLUICE_WGRAD_ADAPTIVE, -1) \
  CONSTANT(SLUICE_WGRAD_DEFERRED, 0) \
  CONSTANT(SLUICE_WGRAD_PER_CHUNK, 1) \
  CONSTANT(SLUICE_EXCHANGE_EXACT, 0) \
  CONSTANT(SLUICE_EXCHANGE_CEILING, 1) \
  CONSTANT(SLUICE_RESTORE_ADAPTIVE, -1) \
  CONSTANT(SLUICE_RESTORE_KEEP, 0) \
  CONSTANT(SLUICE_RESTORE_OFFLOAD, 1) \
  CONSTANT(SLUICE_RESTORE_REDISPATCH, 2) \
  CONSTANT(SLUICE_RESTORE_RECOMPUTE, 3) \
  CONSTANT(SLUICE_SAVED_META, 0) \
  CONSTANT(SLUICE_SAVED_INPUT, 1) \
  CONSTANT(SLUICE_SAVED_MIDDLE, 2) \
  CONSTANT(SLUICE_SAVED_HOST_INPUT, 3) \
  CONSTANT(SLUICE_SAVED_HOST_MIDDLE, 4) \
  CONSTANT(SLUICE_SAVED_COUNT, 5) \
  CONSTANT(SLUICE_GRAD_OVERWRITE, 0) \
  CONSTANT(SLUICE_GRAD_ACCUMULATE, 1) \
  CONSTANT(SLUICE_HALF_INPUT, 1) \
  CONSTANT(SLUICE_HALF_WEIGHT, 2) \
  CONSTANT(SLUICE_HALF_BOTH, 3) \
  CONSTANT(SLUICE_WEIGHT_HALF_NONE, 0) \
  CONSTANT(SLUICE_WEIGHT_HALF_NOW, 1) \
  CONSTANT(SLUICE_WEIGHT_HALF_LATER, 2) \
  CONSTANT(SLUICE_SCHEDULE_LANES, 4) \
  CONSTANT(SLUICE_PLANNER_CHOSEN, 0) \
  CONSTANT(SLUICE_PLANNER_SLOWER, 1) \
  CONSTANT(SLUICE_PLANNER_OVER_BUDGET, 2) \
  CONSTANT(SLUICE_PLANNER_OVER_HOST_BUDGET, 4) \
  CONSTANT(SLUICE_PLANNER_EQUAL, 3) \
  CONSTANT(SLUICE_TUNER_ADAPTIVE, 0) \
  CONSTANT(SLUICE_TUNER_PROFILE, 1) \
  CONSTANT(SLUICE_TUNER_MODEL, 2) \
  CONSTANT(SLUICE_WHY_NOTHING_YET, 0) \
  CONSTANT(SLUICE_WHY_ON_TRIAL, 1) \
  CONSTANT(SLUICE_WHY_INSIDE_RANGE, 2) \
  CONSTANT(SLUICE_WHY_ONE_LEFT, 3) \
  CONSTANT(SLUICE_WHY_RACED, 4) \
  CONSTANT(SLUICE_WHY_PREDICTED, 5) \
  CONSTANT(SLUICE_WHY_QUESTIONED, 6) \
  CONSTANT(SLUICE_WHY_IMPORTED, 7) \
  CONSTANT(SLUICE_NCCL_ID_BYTES, 128)
/* clang-format on */

#define STRUCT(type, size) _Static_assert(sizeof(type) == (size), "the size of " #type " is part of the ABI");
#define MEMBER(type, member, offset, size)                                                   \
  _Static_assert(offsetof(type, member) == (offset) && sizeof(((type*)0)->member) == (size), \
                 #type "." #member " is part of the ABI");
#define CONSTANT(name, value) _Static_assert((name) == (value), #name " is part of the ABI");
LAYOUT
CONSTANTS
#undef STRUCT
#undef MEMBER
#undef CONSTANT

typedef struct line_s {
  const char* type;   /* NULL: a constant */
  const char* member; /* NULL: the struct itself */
  long long offset;   /* or the value */
  long long size;
} line_t;

static const line_t lines[] = {
#define STRUCT(type, size)                 {#type, NULL, 0, size},
#define MEMBER(type, member, offset, size) {#type, #member, offset, size},
#define CONSTANT(name, value)              {NULL, #name, value, 0},
    LAYOUT CONSTANTS
#undef STRUCT
#undef MEMBER
#undef CONSTANT
};
enum { NUM_LINES = sizeof lines / sizeof lines[0] };

static int print_line(const line_t* line, char* out, size_t bytes) {
  if (line->type == NULL) return snprintf(out, bytes, "%s = %lld\n", line->member, line->offset);
  if (line->member == NULL) return snprintf(out, bytes, "%s: %lld bytes\n", line->type, line->size);
  return snprintf(out, bytes, "  %lld +%lld %s\n", line->offset, line->size, line->member);
}

static char* print_all(void) {
  char* text = calloc(NUM_LINES, 128);
  char* at = text;
  for (int i = 0; i < NUM_LINES; ++i) at += print_line(&lines[i], at, 128);
  return text;
}

/* Test data lies below the workspace root, where tests run. */
static char* read_text(const char* path) {
  FILE* file = fopen(path, "rb");
  if (file == NULL) fail_msg("%s is not there", path);
  char* text = calloc(1, 1 << 20);
  size_t length = fread(text, 1, (1 << 20) - 1, file);
  fclose(file);
  text[length] = '\0';
  return text;
}

static void Layout_EqualsTheGoldenFile(void** state) {
  (void)state;
  char* now = print_all();
  char* golden = read_text("capi/abi/layout.txt");
  if (strcmp(now, golden) != 0) {
    size_t at = 0;
    while (now[at] == golden[at]) ++at;
    while (at > 0 && now[at - 1] != '\n') --at;
    fail_msg("capi/abi/layout.txt says \"%.*s\", the headers say \"%.*s\"; see capi/abi/ABI.md",
             (int)strcspn(golden + at, "\n"), golden + at, (int)strcspn(now + at, "\n"), now + at);
  }
  free(now);
  free(golden);
}

/* No gap: padding is a named member, and no member is missing from the list. */
static void Layout_EveryByte_BelongsToAMember(void** state) {
  (void)state;
  long long end = 0, size = 0;
  const char* type = "";
  for (int i = 0; i < NUM_LINES; ++i) {
    const line_t* line = &lines[i];
    if (line->type != NULL && line->member != NULL) {
      if (line->offset != end) fail_msg("%s: bytes %lld to %lld belong to no member", type, end, line->offset);
      end += line->size;
      continue;
    }
    if (end != size) fail_msg("%s: %lld bytes at its end belong to no member", type, size - end);
    if (line->type == NULL) break;
    end = 0, size = line->size, type = line->type;
  }
}

/* A struct that grows begins with its size, as the 0.1 layouts do. */
static void Layout_GrowingStructs_BeginWithTheirSize(void** state) {
  (void)state;
  static const char* const fixed[] = {
      "sluice_tensor_t",         "sluice_ext_header_t",    "sluice_exchange_t",          "sluice_host_failure_t",
      "sluice_host_gemm_args_t", "sluice_trace_event_t",   "sluice_plan_candidate_t",    "sluice_paper_footprint_t",
      "sluice_planner_choice_t", "sluice_planner_entry_t", "sluice_planner_candidate_t", "sluice_tuner_decision_t",
      "sluice_tuner_policy_t"};
  for (int i = 0; i + 1 < NUM_LINES && lines[i].type != NULL; ++i) {
    if (lines[i].member != NULL) continue;
    int grows = 1;
    for (size_t f = 0; f < sizeof fixed / sizeof fixed[0]; ++f) grows &= strcmp(lines[i].type, fixed[f]) != 0;
    if (grows) assert_string_equal(lines[i + 1].member, "struct_size");
  }
}

/* Every exported function of the version script stands in since.txt under its node, and nothing else does. */
static void Since_EqualsTheVersionScript(void** state) {
  (void)state;
  char* script = read_text("capi/abi/sluice.lds");
  char* since = read_text("capi/abi/since.txt");
  char* open = strstr(script, "*/");
  char* save = NULL;
  char node[32] = "", wanted[128];
  int exported = 0, listed = 0;
  for (char* word = strtok_r(open != NULL ? open + 2 : script, " \n\t{};", &save); word != NULL;
       word = strtok_r(NULL, " \n\t{};", &save)) {
    if (strncmp(word, "SLUICE_", 7) == 0) {
      snprintf(node, sizeof node, "%s", word + 7);
    } else if (strncmp(word, "sluice_", 7) == 0) {
      ++exported;
      snprintf(wanted, sizeof wanted, "\n%s %s\n", node, word);
      if (strstr(since, wanted) == NULL) fail_msg("capi/abi/since.txt lacks \"%s %s\"", node, word);
    }
  }
  for (const char* at = since; *at != '\0'; at += strcspn(at, "\n") + 1) listed += *at != '#';
  assert_true(exported > 40);
  assert_int_equal(listed, exported);
  free(script);
  free(since);
}

int main(int argc, char** argv) {
  if (argc > 1 && strcmp(argv[1], "--print") == 0) {
    char* text = print_all();
    fputs(text, stdout);
    free(text);
    return 0;
  }
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Layout_EqualsTheGoldenFile),
      cmocka_unit_test(Layout_EveryByte_BelongsToAMember),
      cmocka_unit_test(Layout_GrowingStructs_BeginWithTheirSize),
      cmocka_unit_test(Since_EqualsTheVersionScript),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
