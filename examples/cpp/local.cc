// SPDX-License-Identifier: Apache-2.0
// Expert parallelism in one process, as examples/c/local4.c: the ranks are threads, 1, 2 (the default), 4 or 8.
//
//   examples/cpp/build.sh /tmp/out && /tmp/out/local_cpp [ranks]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>
#include <vector>

#include "sluice/sluice.hpp"

namespace {

constexpr int kTokens = 192; // of all ranks together, so that losses do not depend on the number of ranks
constexpr int M = 16, H = 32, E = 8, K = 2, kSteps = 40;

// Returns a number in [-1, 1) that depends only on the arguments, not on the rank.
float noise(std::uint32_t kind, int i) {
  std::uint32_t h = kind * 0x9e3779b9u + static_cast<std::uint32_t>(i) * 0x85ebca6bu;
  h ^= h >> 16, h *= 0x7feb352du, h ^= h >> 15, h *= 0x846ca68bu, h ^= h >> 16;
  return static_cast<float>(h >> 8) / 8388608.0f - 1;
}

// Data, and the tensor that describes it to the library.
template <class T>
struct Matrix {
  Matrix(std::int64_t rows, std::int64_t columns) : data(rows * columns), shape{rows, columns} {}
  sluice_tensor_t tensor(std::uint8_t type_code = SLUICE_TYPE_FLOAT, std::int64_t part = 0) {
    return sluice::tensor(data.data() + part * shape[0] * shape[1], type_code, shape, 2);
  }
  std::vector<T> data;
  std::int64_t shape[2];
};

// The same for the experts of a rank, with one tensor for each.
struct Weights : Matrix<float> {
  Weights(int num_local, std::int64_t rows, std::int64_t columns) : Matrix(rows, columns) {
    data.resize(num_local * rows * columns);
    for (int e = 0; e < num_local; ++e) tensors.push_back(tensor(SLUICE_TYPE_FLOAT, e));
  }
  void fill(std::uint32_t kind, float scale, int first) {
    int at = first * H * M;
    for (float& one : data) one = scale * noise(kind, at++);
  }
  void descend(const Weights& gradient) {
    for (std::size_t i = 0; i < data.size(); ++i) data[i] -= 1.5f * gradient.data[i];
  }
  std::vector<sluice_tensor_t> tensors;
};

// Returns this rank's part of each step's loss, which is the sum over the ranks.
std::vector<double> train(sluice_comm_t* comm) {
  const int rank = sluice_comm_rank(comm), ranks = sluice_comm_world_size(comm);
  auto context_config = sluice::defaults<sluice_context_config_t>();
  sluice::Context context;
  sluice::check(sluice_context_create(&context_config, comm, context.out()));
  auto config = sluice::defaults<sluice_moe_config_t>();
  config.model_width = M, config.hidden_width = H, config.num_experts = E, config.top_k = K;
  config.num_chunks = 2; // one half is sent while the other is computed
  sluice::Moe moe;
  sluice::check(sluice_moe_create(context.get(), &config, moe.out()));

  const int begin = kTokens * rank / ranks, T = kTokens * (rank + 1) / ranks - begin, num_local = E / ranks;
  Matrix<float> x(T, M), target(T, M), y(T, M), grad_y(T, M), weights(T, K);
  Matrix<std::int32_t> ids(T, K);
  for (int i = 0; i < T * M; ++i) x.data[i] = noise(1, begin * M + i);
  for (int i = 0; i < T * M; ++i) target.data[i] = std::sin(3 * x.data[i / M * M + (i + 1) % M]);
  for (int i = 0; i < T * K; ++i) { // a fixed router, by the signs of coordinates of x
    const float* token = &x.data[i / K * M];
    ids.data[i] = ((token[0] > 0) + 2 * (token[1] > 0) + 4 * (i % K)) % E;
    weights.data[i] = 0.5f;
  }
  Weights w1(num_local, H, M), w2(num_local, M, H), grad_w1(num_local, H, M), grad_w2(num_local, M, H);
  w1.fill(2, 0.4f, rank * num_local), w2.fill(3, 0.3f, rank * num_local);
  auto params = sluice::defaults<sluice_expert_tensors_t>(), grads = params;
  params.w1 = w1.tensors.data(), params.w2 = w2.tensors.data();
  grads.w1 = grad_w1.tensors.data(), grads.w2 = grad_w2.tensors.data();
  const sluice_tensor_t tx = x.tensor(), ty = y.tensor(), tgrad_y = grad_y.tensor(), tweights = weights.tensor();
  const sluice_tensor_t tids = ids.tensor(SLUICE_TYPE_INT);

  std::vector<double> losses(kSteps);
  for (double& loss : losses) {
    auto forward = sluice::defaults<sluice_moe_forward_args_t>();
    forward.tokens = &tx, forward.expert_ids = &tids, forward.route_weights = &tweights, forward.out_tokens = &ty;
    forward.params = &params, forward.needs_backward = 1;
    sluice::Step step;
    sluice::check(sluice_moe_forward(moe.get(), &forward, nullptr, step.out()));
    for (int i = 0; i < T * M; ++i) {
      const double error = y.data[i] - target.data[i];
      loss += error * error / (kTokens * M);
      grad_y.data[i] = static_cast<float>(2 * error / (kTokens * M));
    }
    auto backward = sluice::defaults<sluice_moe_backward_args_t>();
    backward.tokens = &tx, backward.route_weights = &tweights, backward.params = &params;
    backward.grad_out = &tgrad_y, backward.grad_params = &grads;
    sluice::check(sluice_moe_backward(moe.get(), step.get(), &backward, nullptr));
    w1.descend(grad_w1), w2.descend(grad_w2); // an expert's gradient is a sum over the tokens of all ranks
  }
  return losses;
}

int run(int ranks) {
  sluice::LocalGroup group;
  sluice::check(sluice_local_group_create(ranks, group.out()));
  std::vector<std::vector<double>> losses(ranks);
  std::vector<std::exception_ptr> failures(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        auto config = sluice::defaults<sluice_comm_config_t>();
        config.rank = rank, config.world_size = ranks;
        sluice::Comm comm;
        sluice::check(sluice_comm_create_local(group.get(), &config, comm.out()));
        losses[rank] = train(comm.get());
      } catch (...) {
        failures[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
  for (int step = 0; step < kSteps; ++step) {
    double loss = 0;
    for (const std::vector<double>& mine : losses) loss += mine[step];
    if (step % 10 == 0 || step == kSteps - 1) std::printf("step %2d loss %.6f (%d ranks)\n", step, loss, ranks);
  }
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? std::atoi(argv[1]) : 2);
  } catch (const sluice::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
