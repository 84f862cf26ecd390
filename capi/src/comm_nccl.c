// SPDX-License-Identifier: Apache-2.0
/* The public calls for NCCL communicators. A communicator owns a device object, for its staging and its stream. */
#include "backend/comm/nccl/nccl_comm.h"

#include <assert.h>
#include <string.h>

#include "backend/base/structs.h"
#include "capi/src/own_device.h"

void sluice_nccl_group_init(sluice_nccl_group_t* out_group, size_t struct_size) {
  sluice_struct_init(out_group, struct_size, NULL, 0);
}

sluice_status_t sluice_nccl_id_create(const char* library, void* out_id) {
  if (out_id == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_nccl_id_create: out_id is NULL");
  sluice_nccl_symbols_t symbols;
  sluice_nccl_id_t id;
  static_assert(sizeof id == SLUICE_NCCL_ID_BYTES, "NCCL's id");
  SLUICE_TRY(sluice_nccl_open(library, &symbols));
  SLUICE_TRY(sluice_nccl_make_id(&symbols, &id));
  memcpy(out_id, &id, sizeof id);
  return SLUICE_OK;
}

static sluice_status_t read_group(const sluice_nccl_group_t* group, sluice_nccl_group_t* out) {
  sluice_nccl_group_init(out, sizeof *out);
  SLUICE_TRY(sluice_struct_copy(out, sizeof *out, group, sizeof *out, "sluice_nccl_group_t"));
  SLUICE_TRY(sluice_struct_check_next(out->next, "sluice_nccl_group_t"));
  if ((out->id == NULL) == (out->parent == NULL)) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_nccl_group_t: id is %s and parent is %s; give one of them: an id that one rank made "
                       "(sluice_nccl_id_create), or the host's communicator to split",
                       out->id == NULL ? "NULL" : "set", out->parent == NULL ? "NULL" : "set");
  }
  if ((out->publish == NULL) != (out->lookup == NULL)) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_nccl_group_t: set publish and lookup together, or neither");
  }
  if (out->device_id < 0 || out->color < 0) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_nccl_group_t: device_id is %d and color %d; both count from 0", out->device_id,
                       out->color);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_comm_create_nccl_from(const sluice_comm_config_t* config, const sluice_nccl_group_t* group,
                                             const sluice_cuda_sources_t* sources, sluice_comm_t** out_comm) {
  if (out_comm == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_comm_create_nccl: out_comm is NULL");
  *out_comm = NULL;
  sluice_nccl_group_t g;
  SLUICE_TRY(read_group(group, &g));
  sluice_nccl_symbols_t symbols;
  if (sources != NULL) {
    symbols = *sources->nccl;
  } else {
    SLUICE_TRY(sluice_nccl_open(g.library, &symbols));
  }
  sluice_own_device_t* own = NULL;
  SLUICE_TRY(sluice_own_device_create(g.device_id, sources, &own));
  sluice_nccl_id_t id;
  if (g.id != NULL) memcpy(&id, g.id, sizeof id);
  const sluice_nccl_store_t store = {g.store_user, g.publish, g.lookup};
  const sluice_nccl_options_t options = {
      .symbols = &symbols,
      .device = own->device,
      .memory = &own->memory,
      .id = g.id != NULL ? &id : NULL,
      .parent = g.parent,
      .color = g.color,
      .open_headers = sources != NULL ? sources->open_headers : NULL,
      .store = g.publish != NULL ? &store : NULL,
      .released = sluice_own_device_release,
      .released_user = own,
  };
  return sluice_nccl_comm_create(&options, config, out_comm);
}

sluice_status_t sluice_comm_create_nccl(const sluice_comm_config_t* config, const sluice_nccl_group_t* group,
                                        sluice_comm_t** out_comm) {
  return sluice_comm_create_nccl_from(config, group, NULL, out_comm);
}
