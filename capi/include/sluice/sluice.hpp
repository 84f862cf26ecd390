/* Owners of the handles, defaults of the structs and errors as exceptions.
 * Written by capi/bindings/generate.py: do not edit.
 *
 *   auto config = sluice::defaults<sluice_moe_config_t>();
 *   sluice::Moe moe;
 *   sluice::check(sluice_moe_create(context.get(), &config, moe.out()));
 *
 * Everything else is plain C: sluice/sluice.h has the calls and their contracts. C++11 or newer; no library beside
 * libsluice. Callbacks must not throw. */
#ifndef SLUICE_SLUICE_HPP_
#define SLUICE_SLUICE_HPP_

#include <cstdint>
#include <stdexcept>
#include <string>

#include "sluice/sluice.h"

namespace sluice {

/* What a call that failed says of itself. */
class Error : public std::runtime_error {
 public:
  explicit Error(const sluice_error_info_t& info)
      : std::runtime_error(std::string(sluice_status_name(info.status)) + ": " + info.message),
        status_(info.status),
        peer_(info.peer) {}
  sluice_status_t status() const noexcept { return status_; }
  /* The rank at fault; -1: none is known. */
  std::int32_t peer() const noexcept { return peer_; }

 private:
  sluice_status_t status_;
  std::int32_t peer_;
};

/* Throws unless the call, the last one of this thread, has succeeded. */
inline void check(sluice_status_t status) {
  if (status == SLUICE_OK) return;
  sluice_error_info_t info;
  sluice_error_info_init(&info, sizeof info);
  sluice_error_last(&info);
  info.status = status;
  throw Error(info);
}

/* Owns a handle, or nothing; moved, never copied. */
template <class T, void (*Release)(T*)>
class Owner {
 public:
  Owner() noexcept = default;
  explicit Owner(T* owned) noexcept : owned_(owned) {}
  Owner(Owner&& other) noexcept : owned_(other.release()) {}
  Owner& operator=(Owner&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  ~Owner() { Release(owned_); }

  T* get() const noexcept { return owned_; }
  explicit operator bool() const noexcept { return owned_ != nullptr; }
  void reset(T* owned = nullptr) noexcept {
    T* before = owned_;
    owned_ = owned;
    Release(before);
  }
  /* Gives it up: the caller releases it. */
  T* release() noexcept {
    T* owned = owned_;
    owned_ = nullptr;
    return owned;
  }
  /* For an `out_` argument. What it owned is released. */
  T** out() noexcept {
    reset();
    return &owned_;
  }

 private:
  T* owned_ = nullptr;
};

using Comm = Owner<sluice_comm_t, sluice_comm_destroy>;
using LocalGroup = Owner<sluice_local_group_t, sluice_local_group_destroy>;
using Context = Owner<sluice_context_t, sluice_context_destroy>;
using Migration = Owner<sluice_migration_t, sluice_migration_destroy>;
using Moe = Owner<sluice_moe_t, sluice_moe_destroy>;
using Step = Owner<sluice_step_t, sluice_step_drop>;
using Optimizer = Owner<sluice_optimizer_t, sluice_optimizer_destroy>;
using Pipeline = Owner<sluice_pipeline_t, sluice_pipeline_destroy>;
using Plan = Owner<sluice_plan_t, sluice_plan_destroy>;
using Planner = Owner<sluice_planner_t, sluice_planner_destroy>;
using Schedule = Owner<sluice_schedule_t, sluice_schedule_destroy>;
using Dispatch = Owner<sluice_dispatch_t, sluice_dispatch_destroy>;

/* What the struct's _init writes; where there is none, zeros and its size. */
template <class T>
T defaults();

template <>
inline sluice_error_info_t defaults() {
  sluice_error_info_t it = {};
  sluice_error_info_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_tensor_t defaults() {
  sluice_tensor_t it = {};
  return it;
}
template <>
inline sluice_ext_header_t defaults() {
  sluice_ext_header_t it = {};
  return it;
}
template <>
inline sluice_comm_config_t defaults() {
  sluice_comm_config_t it = {};
  sluice_comm_config_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_exchange_t defaults() {
  sluice_exchange_t it = {};
  return it;
}
template <>
inline sluice_host_failure_t defaults() {
  sluice_host_failure_t it = {};
  return it;
}
template <>
inline sluice_host_comm_vtable_t defaults() {
  sluice_host_comm_vtable_t it = {};
  it.struct_size = sizeof it;
  return it;
}
template <>
inline sluice_nccl_group_t defaults() {
  sluice_nccl_group_t it = {};
  sluice_nccl_group_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_tcp_config_t defaults() {
  sluice_tcp_config_t it = {};
  sluice_tcp_config_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_host_gemm_args_t defaults() {
  sluice_host_gemm_args_t it = {};
  return it;
}
template <>
inline sluice_context_config_t defaults() {
  sluice_context_config_t it = {};
  sluice_context_config_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_context_stats_t defaults() {
  sluice_context_stats_t it = {};
  it.struct_size = sizeof it;
  return it;
}
template <>
inline sluice_trace_event_t defaults() {
  sluice_trace_event_t it = {};
  return it;
}
template <>
inline sluice_gate_config_t defaults() {
  sluice_gate_config_t it = {};
  sluice_gate_config_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_migration_config_t defaults() {
  sluice_migration_config_t it = {};
  sluice_migration_config_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_migration_span_t defaults() {
  sluice_migration_span_t it = {};
  return it;
}
template <>
inline sluice_migration_item_t defaults() {
  sluice_migration_item_t it = {};
  return it;
}
template <>
inline sluice_migration_progress_t defaults() {
  sluice_migration_progress_t it = {};
  it.struct_size = sizeof it;
  return it;
}
template <>
inline sluice_moe_config_t defaults() {
  sluice_moe_config_t it = {};
  sluice_moe_config_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_expert_placement_t defaults() {
  sluice_expert_placement_t it = {};
  sluice_expert_placement_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_expert_tensors_t defaults() {
  sluice_expert_tensors_t it = {};
  it.struct_size = sizeof it;
  return it;
}
template <>
inline sluice_expert_callbacks_t defaults() {
  sluice_expert_callbacks_t it = {};
  it.struct_size = sizeof it;
  return it;
}
template <>
inline sluice_moe_forward_args_t defaults() {
  sluice_moe_forward_args_t it = {};
  sluice_moe_forward_args_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_moe_backward_args_t defaults() {
  sluice_moe_backward_args_t it = {};
  sluice_moe_backward_args_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_capacity_report_t defaults() {
  sluice_capacity_report_t it = {};
  sluice_capacity_report_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_optimizer_config_t defaults() {
  sluice_optimizer_config_t it = {};
  sluice_optimizer_config_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_optimizer_tensor_t defaults() {
  sluice_optimizer_tensor_t it = {};
  return it;
}
template <>
inline sluice_optimizer_group_t defaults() {
  sluice_optimizer_group_t it = {};
  sluice_optimizer_group_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_optimizer_step_args_t defaults() {
  sluice_optimizer_step_args_t it = {};
  sluice_optimizer_step_args_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_optimizer_step_result_t defaults() {
  sluice_optimizer_step_result_t it = {};
  sluice_optimizer_step_result_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_optimizer_file_config_t defaults() {
  sluice_optimizer_file_config_t it = {};
  sluice_optimizer_file_config_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_optimizer_file_info_t defaults() {
  sluice_optimizer_file_info_t it = {};
  sluice_optimizer_file_info_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_optimizer_workload_t defaults() {
  sluice_optimizer_workload_t it = {};
  sluice_optimizer_workload_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_optimizer_prediction_t defaults() {
  sluice_optimizer_prediction_t it = {};
  sluice_optimizer_prediction_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_stage_tensors_t defaults() {
  sluice_stage_tensors_t it = {};
  return it;
}
template <>
inline sluice_stage_call_t defaults() {
  sluice_stage_call_t it = {};
  it.struct_size = sizeof it;
  return it;
}
template <>
inline sluice_pipeline_callbacks_t defaults() {
  sluice_pipeline_callbacks_t it = {};
  it.struct_size = sizeof it;
  return it;
}
template <>
inline sluice_pipeline_config_t defaults() {
  sluice_pipeline_config_t it = {};
  sluice_pipeline_config_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_pipeline_batch_t defaults() {
  sluice_pipeline_batch_t it = {};
  sluice_pipeline_batch_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_pipeline_stats_t defaults() {
  sluice_pipeline_stats_t it = {};
  it.struct_size = sizeof it;
  return it;
}
template <>
inline sluice_stage_event_t defaults() {
  sluice_stage_event_t it = {};
  return it;
}
template <>
inline sluice_layer_move_t defaults() {
  sluice_layer_move_t it = {};
  return it;
}
template <>
inline sluice_pipeline_workload_t defaults() {
  sluice_pipeline_workload_t it = {};
  sluice_pipeline_workload_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_stage_prediction_t defaults() {
  sluice_stage_prediction_t it = {};
  return it;
}
template <>
inline sluice_pipeline_prediction_t defaults() {
  sluice_pipeline_prediction_t it = {};
  it.struct_size = sizeof it;
  return it;
}
template <>
inline sluice_placement_problem_t defaults() {
  sluice_placement_problem_t it = {};
  sluice_placement_problem_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_placement_result_t defaults() {
  sluice_placement_result_t it = {};
  sluice_placement_result_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_planner_move_t defaults() {
  sluice_planner_move_t it = {};
  sluice_planner_move_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_plan_config_t defaults() {
  sluice_plan_config_t it = {};
  sluice_plan_config_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_plan_info_t defaults() {
  sluice_plan_info_t it = {};
  it.struct_size = sizeof it;
  return it;
}
template <>
inline sluice_plan_candidate_t defaults() {
  sluice_plan_candidate_t it = {};
  return it;
}
template <>
inline sluice_paper_footprint_t defaults() {
  sluice_paper_footprint_t it = {};
  return it;
}
template <>
inline sluice_calibration_config_t defaults() {
  sluice_calibration_config_t it = {};
  sluice_calibration_config_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_planner_workload_t defaults() {
  sluice_planner_workload_t it = {};
  sluice_planner_workload_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_planner_choice_t defaults() {
  sluice_planner_choice_t it = {};
  return it;
}
template <>
inline sluice_planner_prediction_t defaults() {
  sluice_planner_prediction_t it = {};
  it.struct_size = sizeof it;
  return it;
}
template <>
inline sluice_planner_entry_t defaults() {
  sluice_planner_entry_t it = {};
  return it;
}
template <>
inline sluice_planner_candidate_t defaults() {
  sluice_planner_candidate_t it = {};
  return it;
}
template <>
inline sluice_schedule_config_t defaults() {
  sluice_schedule_config_t it = {};
  sluice_schedule_config_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_schedule_prediction_t defaults() {
  sluice_schedule_prediction_t it = {};
  it.struct_size = sizeof it;
  return it;
}
template <>
inline sluice_stages_option_t defaults() {
  sluice_stages_option_t it = {};
  return it;
}
template <>
inline sluice_stages_edge_t defaults() {
  sluice_stages_edge_t it = {};
  return it;
}
template <>
inline sluice_stages_link_t defaults() {
  sluice_stages_link_t it = {};
  return it;
}
template <>
inline sluice_planner_layer_t defaults() {
  sluice_planner_layer_t it = {};
  sluice_planner_layer_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_planner_problem_t defaults() {
  sluice_planner_problem_t it = {};
  sluice_planner_problem_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_stages_choice_t defaults() {
  sluice_stages_choice_t it = {};
  return it;
}
template <>
inline sluice_stages_other_cut_t defaults() {
  sluice_stages_other_cut_t it = {};
  return it;
}
template <>
inline sluice_stages_stage_t defaults() {
  sluice_stages_stage_t it = {};
  return it;
}
template <>
inline sluice_planner_result_t defaults() {
  sluice_planner_result_t it = {};
  sluice_planner_result_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_tuner_config_t defaults() {
  sluice_tuner_config_t it = {};
  sluice_tuner_config_init(&it, sizeof it);
  return it;
}
template <>
inline sluice_tuner_decision_t defaults() {
  sluice_tuner_decision_t it = {};
  return it;
}
template <>
inline sluice_tuner_policy_t defaults() {
  sluice_tuner_policy_t it = {};
  return it;
}
template <>
inline sluice_tuner_stats_t defaults() {
  sluice_tuner_stats_t it = {};
  it.struct_size = sizeof it;
  return it;
}

/* A tensor over row-major 32-bit elements on the CPU. Memory and shape are borrowed. */
inline sluice_tensor_t tensor(void* data, std::uint8_t type_code, std::int64_t* shape, std::int32_t ndim) {
  return {data, SLUICE_DEVICE_CPU, 0, ndim, type_code, 32, 1, shape, nullptr, 0};
}

} // namespace sluice

#endif /* SLUICE_SLUICE_HPP_ */
