// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/comm_life.h"

#include <unistd.h>

#include "backend/base/structs.h"

#define SECOND_NS          UINT64_C(1000000000)
#define DEFAULT_TIMEOUT_NS (30 * 60 * SECOND_NS)
#define DEFAULT_WARN_NS    (30 * SECOND_NS)

void sluice_comm_config_init(sluice_comm_config_t* out_config, size_t struct_size) {
  static const sluice_comm_config_t defaults = {.world_size = 1};
  sluice_struct_init(out_config, struct_size, &defaults, sizeof defaults);
}

sluice_status_t sluice_comm_config_read(const sluice_comm_config_t* config, sluice_comm_config_t* out_config) {
  sluice_comm_config_t read;
  sluice_comm_config_init(&read, sizeof read);
  SLUICE_TRY(sluice_struct_copy(&read, sizeof read, config, offsetof(sluice_comm_config_t, timeout_ns),
                                "sluice_comm_config_t"));
  if (read.next != NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_comm_config_t.next: no optional block is known here (got type %d); pass NULL",
                       read.next->type);
  }
  if (read.world_size < 1 || read.rank < 0 || read.rank >= read.world_size) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_comm_config_t: rank %d of world_size %d; world_size must be at least 1 and rank in "
                       "[0, world_size)",
                       read.rank, read.world_size);
  }
  *out_config = read;
  return SLUICE_OK;
}

void sluice_comm_init_base(sluice_comm_t* comm, const sluice_comm_vtable_t* vtable, const char* name,
                           const sluice_comm_config_t* config) {
  comm->vtable = vtable;
  atomic_init(&comm->references, 1);
  comm->name = name;
  comm->rank = config->rank;
  comm->world_size = config->world_size;
  comm->timeout_ns = config->timeout_ns != 0 ? config->timeout_ns : DEFAULT_TIMEOUT_NS;
  comm->warn_ns = config->warn_ns != 0 ? config->warn_ns : DEFAULT_WARN_NS;
  atomic_init(&comm->broken, SLUICE_OK);
  comm->call_number = 0;
  comm->num_started = 0;
  comm->pid = getpid();
  pthread_mutex_init(&comm->messages_mutex, NULL); /* owns no resource that must be released */
  comm->messages = NULL;
}

void sluice_comm_retain(sluice_comm_t* comm) { atomic_fetch_add_explicit(&comm->references, 1, memory_order_relaxed); }

void sluice_comm_release(sluice_comm_t* comm) {
  if (comm == NULL || sluice_comm_is_inherited(comm)) return;
  if (atomic_fetch_sub_explicit(&comm->references, 1, memory_order_acq_rel) == 1) comm->vtable->destroy(comm);
}

int32_t sluice_comm_rank(const sluice_comm_t* comm) { return comm != NULL ? comm->rank : -1; }
int32_t sluice_comm_world_size(const sluice_comm_t* comm) { return comm != NULL ? comm->world_size : 0; }
const char* sluice_comm_name(const sluice_comm_t* comm) { return comm != NULL ? comm->name : ""; }
void sluice_comm_destroy(sluice_comm_t* comm) { sluice_comm_release(comm); }

/* ---- use ---- */

/* In the child of a fork, the parent's threads, locks and connections must not be touched. */
int sluice_comm_is_inherited(const sluice_comm_t* comm) { return comm->pid != getpid(); }

/* The first failure is the one to report. */
void sluice_comm_mark_broken(sluice_comm_t* comm, sluice_status_t status) {
  int32_t expected = SLUICE_OK;
  atomic_compare_exchange_strong(&comm->broken, &expected, status);
}

void sluice_comm_abort(sluice_comm_t* comm) {
  if (comm == NULL || sluice_comm_is_inherited(comm)) return;
  sluice_comm_mark_broken(comm, SLUICE_E_ABORTED);
  sluice_comm_abort_messages(comm);
  if (comm->vtable->abort != NULL) comm->vtable->abort(comm);
}

sluice_status_t sluice_comm_fail_and_tell(sluice_comm_t* comm, sluice_status_t status) {
  sluice_comm_mark_broken(comm, status);
  if (comm->vtable->abort != NULL) comm->vtable->abort(comm);
  return status;
}

sluice_status_t sluice_comm_check_usable(sluice_comm_t* comm) {
  if (sluice_comm_is_inherited(comm)) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "rank %d: this %s communicator was made before fork and cannot be used in the child; make a new "
                       "one there",
                       comm->rank, comm->name);
  }
  sluice_status_t broken = atomic_load(&comm->broken);
  if (broken == SLUICE_OK) return SLUICE_OK;
  return SLUICE_FAIL_PEER(broken, comm->rank, -1,
                          "rank %d: this %s communicator is no longer usable since an earlier %s; " SLUICE_COMM_REMEDY,
                          comm->rank, comm->name, broken == SLUICE_E_ABORTED ? "abort" : sluice_status_name(broken));
}
