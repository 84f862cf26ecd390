// SPDX-License-Identifier: Apache-2.0
// Decides whether a backward may add to the `.grad` of its parameters itself, because nothing can observe the
// difference.
//
// Autograd passes a node's gradients to AccumulateGrad nodes, which add them to `.grad`. This file looks for everything
// that could observe a difference: hooks of every kind, gradients for explicitly listed inputs, checks for NaN, and a
// `.grad` to which autograd would not add in place. It reads the engine's own state, so it must be called from within a
// node's backward.
#define AT_PER_OPERATOR_HEADERS // the nodes' headers include all that is needed of ATen
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sluice/base.h"

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

struct Range {
  uintptr_t begin, end;
  bool is_written;
};

Range range_of(const void* data, size_t bytes, bool is_written) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + bytes, is_written};
}

// Returns whether a written range overlaps another range of the list, which is sorted here.
bool overlap(std::vector<Range>& ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  uintptr_t read_to = 0;
  uintptr_t written_to = 0;
  for (const Range& range : ranges) {
    if (range.begin == range.end) continue;
    if (range.begin < written_to || (range.is_written && range.begin < read_to)) return true;
    uintptr_t& end = range.is_written ? written_to : read_to;
    end = std::max(end, range.end);
  }
  return false;
}

// Whether this is backward() over the whole graph. It is not for torch.autograd.grad and backward(inputs=...), whose
// gradients go elsewhere, for compiled autograd, which has no task of the engine, and for anomaly mode, which checks
// gradients for NaN.
bool is_plain_backward() {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  return wanted != nullptr && wanted->empty() && !torch::autograd::AnomalyMode::is_enabled();
}

// The node that adds to a parameter, if no hook sees the gradient: no hook on the tensor (which the node runs), before
// or after the node (those of DDP, FSDP and ZeRO), or when `.grad` is complete.
const AccumulateGrad* unobserved(Node* node) {
  auto* adder = dynamic_cast<AccumulateGrad*>(node);
  if (adder == nullptr || !adder->variable.defined()) return nullptr;
  const bool is_observed = !adder->tensor_pre_hooks().empty() || !adder->pre_hooks().empty() ||
                           !adder->post_hooks().empty() || adder->tensor_post_acc_grad_hooks() != nullptr;
  return is_observed ? nullptr : adder;
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu() && !tensor.is_inference() &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor.key_set().has(c10::DispatchKey::Python);
}

// Whether autograd would add to this `.grad` in place, and to each element once, with the parameter's own layout.
bool takes_sums(const at::Tensor& parameter, const at::Tensor& grad) {
  return is_plain(parameter) && is_plain(grad) && !grad.requires_grad() && !grad.is_view() &&
         grad.scalar_type() == parameter.scalar_type() && grad.sizes() == parameter.sizes() &&
         grad.strides() == parameter.strides() && grad.is_non_overlapping_and_dense();
}

// Returns whether no hook sees the gradient at a node between a parameter and this one, which passes on its gradient.
bool is_unobserved_step(Node& node) {
  return node.num_outputs() == 1 && node.pre_hooks().empty() && node.post_hooks().empty() &&
         node.tensor_pre_hooks().empty() && node.retains_grad_hooks().empty();
}

at::Tensor borrowed(void* tensor) {
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(static_cast<c10::TensorImpl*>(tensor)));
}

// Whether this pass may add to `grad` the gradient that it would pass to `node`. read: the parameter that the pass
// reads.
bool may_add(Node* node, const at::Tensor& grad, const at::Tensor& read) {
  if (const AccumulateGrad* adder = unobserved(node)) {
    return adder->variable.grad().is_same(grad) && takes_sums(adder->variable, grad);
  }
  if (node == nullptr || !is_unobserved_step(*node)) return false;
  return unobserved(node->next_edge(0).function.get()) != nullptr && takes_sums(read, grad);
}

bool may_accumulate(int64_t first, int64_t count, void* const* reads, int64_t num_reads, void* const* grads) {
  if (count == 0 || count > num_reads || !is_plain_backward()) return false;
  const auto node = torch::autograd::get_current_node();
  if (!node || node->num_outputs() != static_cast<size_t>(first + count)) return false;
  if (!node->post_hooks().empty()) return false; // they see the node's gradients
  std::vector<Range> ranges;
  for (int64_t i = 0; i < count; ++i) {
    const auto& edge = node->next_edge(static_cast<size_t>(first + i));
    if (!edge.is_valid()) continue; // frozen: there is nothing to add to
    if (grads[i] == nullptr) return false;
    const at::Tensor grad = borrowed(grads[i]);
    if (!may_add(edge.function.get(), grad, borrowed(reads[num_reads - count + i]))) return false;
    ranges.push_back(range_of(grad.const_data_ptr(), grad.nbytes(), true));
  }
  if (ranges.empty()) return false;
  for (int64_t i = 0; i < num_reads; ++i) {
    const auto* tensor = static_cast<const at::TensorImpl*>(reads[i]);
    if (!tensor->has_storage()) return false;
    ranges.push_back(range_of(tensor->storage().data(), tensor->storage().nbytes(), false));
  }
  return !overlap(ranges);
}

} // namespace

extern "C" {

// For the backward that runs in this thread: 1 if the pass may add to `grads`, a TensorImpl* each, or NULL for none.
// `grads` belong to the `count` parameters, which are the last inputs of the node, from `first` on; parameters that
// require no gradient need none. Each entry is its parameter's `.grad`, or the part of `.grad` to which the gradient is
// added after one further node that passes it on unchanged, as the caller has checked. `grads` must not overlap `reads`
// (also TensorImpl*), the tensors that the pass reads, of which the parameters are the last.
SLUICE_EXPORT int32_t sluice_torch_may_accumulate(int64_t first, int64_t count, void* const* reads, int64_t num_reads,
                                                  void* const* grads) {
  try {
    return may_accumulate(first, count, reads, num_reads, grads) ? 1 : 0;
  } catch (...) {
    return 0;
  }
}

} // extern "C"
