// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/on_device/refusals.h"

#include <stdio.h>

#include "backend/base/check.h"
#include "backend/base/dtype.h"

static sluice_status_t check_array(sluice_device_t* device, const void* data, int32_t dtype, int64_t count,
                                   const char* array, int64_t group, int64_t tensor) {
  char name[96];
  const uint64_t width = sluice_dtype_bytes(dtype);
  (void)snprintf(name, sizeof name, "optimizer: tensor %lld of group %lld: %s", (long long)tensor, (long long)group,
                 array);
  return device->memory->check_memory(device, data, (uint64_t)count * width, width, name);
}

static sluice_status_t check_tensor(sluice_device_t* device, const sluice_adam_tensor_t* t, int64_t group,
                                    int64_t index) {
  SLUICE_TRY(SLUICE_REQUIRE(t->count == 0 || t->master != NULL,
                            "optimizer: tensor %lld of group %lld: master is NULL; a step on a device updates masters "
                            "in host memory, so pass one",
                            (long long)index, (long long)group));
  SLUICE_TRY(check_array(device, t->param, t->param_dtype, t->count, "param", group, index));
  return check_array(device, t->grad, t->grad_dtype, t->count, "grad", group, index);
}

static sluice_status_t check_comm(const sluice_comm_t* comm) {
  if (comm == NULL || comm->world_size == 1 || comm->vtable->exchange_enqueue != NULL) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                     "optimizer: a %s communicator moves host memory only; a step on a device needs an nccl "
                     "communicator, or a local one if ranks are threads",
                     comm->name);
}

static sluice_status_t check_modes(const sluice_bucketed_step_t* step) {
  if (step->adam.max_norm > 0.0) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "optimizer: max_norm is %g, but a step on a device does not compute the norm of gradients; clip "
                       "them before the step, or multiply loss_scale by the factor that clipping would divide by",
                       step->adam.max_norm);
  }
  SLUICE_TRY(check_comm(step->comm));
  for (int64_t g = 0; step->comm != NULL && g < step->adam.num_groups; ++g) SLUICE_TRY(check_comm(step->comms[g]));
  return SLUICE_OK;
}

sluice_status_t sluice_device_step_check(sluice_device_t* device, const sluice_bucketed_step_t* step) {
  SLUICE_TRY(sluice_adam_check_step(&step->adam));
  SLUICE_TRY(check_modes(step));
  for (int64_t g = 0; g < step->adam.num_groups; ++g) {
    const sluice_adam_group_t* group = step->adam.groups + g;
    for (int64_t t = 0; t < group->num_tensors; ++t) SLUICE_TRY(check_tensor(device, group->tensors + t, g, t));
  }
  return SLUICE_OK;
}
