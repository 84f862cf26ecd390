// SPDX-License-Identifier: Apache-2.0
// Runs one forward of one expert that doubles its rows, and exits with 0 if the result is right.
#include <sluice/sluice.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

namespace {

void must(sluice_status_t status) {
  if (status == SLUICE_OK) return;
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  std::fprintf(stderr, "%s: %s\n", sluice_status_name(status), why.message);
  std::exit(1);
}

sluice_tensor_t tensor(void* data, std::uint8_t type_code, std::int64_t* shape) {
  return {data, SLUICE_DEVICE_CPU, 0, 2, type_code, 32, 1, shape, nullptr, 0};
}

} // namespace

int main() {
  float x[3][2] = {{1, 2}, {3, 4}, {5, 6}}, y[3][2] = {};
  float up[2][2] = {{2, 0}, {0, 2}}, down[2][2] = {{1, 0}, {0, 1}}, weights[3][1] = {{1}, {1}, {1}};
  std::int32_t ids[3][1] = {};
  std::int64_t rows[] = {3, 2}, routes[] = {3, 1}, square[] = {2, 2};
  sluice_tensor_t tx = tensor(x, SLUICE_TYPE_FLOAT, rows), ty = tensor(y, SLUICE_TYPE_FLOAT, rows);
  sluice_tensor_t tids = tensor(ids, SLUICE_TYPE_INT, routes), tweights = tensor(weights, SLUICE_TYPE_FLOAT, routes);
  sluice_tensor_t w1 = tensor(up, SLUICE_TYPE_FLOAT, square), w2 = tensor(down, SLUICE_TYPE_FLOAT, square);
  sluice_expert_tensors_t params{};
  params.struct_size = sizeof params, params.w1 = &w1, params.w2 = &w2;

  sluice_context_config_t context_config;
  sluice_context_config_init(&context_config, sizeof context_config);
  sluice_context_t* context = nullptr;
  must(sluice_context_create(&context_config, nullptr, &context));
  std::unique_ptr<sluice_context_t, decltype(&sluice_context_destroy)> context_owner(context, sluice_context_destroy);

  sluice_moe_config_t config;
  sluice_moe_config_init(&config, sizeof config);
  config.model_width = config.hidden_width = 2, config.num_experts = config.top_k = 1;
  config.activation = SLUICE_ACTIVATION_RELU;
  sluice_moe_t* moe = nullptr;
  must(sluice_moe_create(context, &config, &moe));
  std::unique_ptr<sluice_moe_t, decltype(&sluice_moe_destroy)> moe_owner(moe, sluice_moe_destroy);

  sluice_moe_forward_args_t forward;
  sluice_moe_forward_args_init(&forward, sizeof forward);
  forward.tokens = &tx, forward.expert_ids = &tids, forward.route_weights = &tweights;
  forward.params = &params, forward.out_tokens = &ty;
  must(sluice_moe_forward(moe, &forward, nullptr, nullptr));
  for (int t = 0; t < 3; ++t) {
    std::printf("y[%d] = %g %g\n", t, y[t][0], y[t][1]);
    if (y[t][0] != 2 * x[t][0] || y[t][1] != 2 * x[t][1]) return 1;
  }
  return 0;
}
