// SPDX-License-Identifier: Apache-2.0
/* A communicator whose ranks are threads of one process: the smallest complete transport, to copy for a new one.
 *
 * A rank posts its request in the group; a waiting rank copies what its peers have posted for the same request number
 * straight out of their send buffers. Only a rank's own thread writes its memory, and a request is complete when
 * everything has been received and all its sends have been fetched. A wait progresses both requests in flight, because
 * two ranks may wait for theirs in different orders.
 *
 * Everything is guarded by the group's mutex, except the bytes being copied: `readers` keeps their request alive during
 * the copy.
 *
 * Device memory is exchanged in stream order in the same way (local_device.h): copies are enqueued instead of executed,
 * and exchange_enqueue returns when all copies of this rank have been enqueued. */
#include "backend/comm/local/local_group.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/clock.h"

static const sluice_comm_vtable_t local_comm_vtable;

/* ---- group ----------------------------------------------------------------------------------------------------- */

static uint64_t group_bytes(int32_t world_size) {
  return sizeof(sluice_local_group_t) + (uint64_t)world_size * sizeof(local_end_t);
}

sluice_status_t sluice_local_group_create(int32_t world_size, sluice_local_group_t** out_group) {
  if (out_group == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_local_group_create: out_group is NULL");
  *out_group = NULL;
  if (world_size < 1) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_local_group_create: world_size is %d, must be at least 1",
                       world_size);
  }
  sluice_local_group_t* group = sluice_alloc_zeroed(sluice_process_allocator(), group_bytes(world_size), "local group");
  if (group == NULL) return sluice_alloc_status();
  pthread_mutex_init(&group->mutex, NULL);
  sluice_cond_init(&group->changed);
  group->pid = getpid();
  group->references = 1;
  group->world_size = world_size;
  group->aborted_by = -1;
  group->mismatch_from = -1;
  *out_group = group;
  return SLUICE_OK;
}

void sluice_local_group_destroy(sluice_local_group_t* group) {
  if (group == NULL || group->pid != getpid()) return;
  pthread_mutex_lock(&group->mutex);
  int32_t left = --group->references;
  pthread_mutex_unlock(&group->mutex);
  if (left > 0) return;
  pthread_cond_destroy(&group->changed);
  pthread_mutex_destroy(&group->mutex);
  sluice_free(sluice_process_allocator(), group, group_bytes(group->world_size));
}

/* ---- creating and destroying a rank's communicator --------------------------------------------------------------- */

static uint64_t comm_bytes(int32_t world_size) {
  return sizeof(local_comm_t) + SLUICE_MAX_IN_FLIGHT * (uint64_t)world_size * sizeof(local_peer_t);
}

sluice_status_t sluice_comm_create_local(sluice_local_group_t* group, const sluice_comm_config_t* config,
                                         sluice_comm_t** out_comm) {
  if (group == NULL || out_comm == NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_comm_create_local: group or out_comm is NULL");
  }
  *out_comm = NULL;
  sluice_comm_config_t c;
  SLUICE_TRY(sluice_comm_config_read(config, &c));
  if (group->pid != getpid()) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "this local group was made before fork and cannot be used in the child; make a new one there");
  }
  if (c.world_size != group->world_size) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "rank %d: world_size is %d in the config, %d in the group", c.rank,
                       c.world_size, group->world_size);
  }
  local_comm_t* comm = sluice_alloc_zeroed(sluice_process_allocator(), comm_bytes(c.world_size), "local communicator");
  if (comm == NULL) return sluice_alloc_status();
  sluice_comm_init_base(&comm->base, &local_comm_vtable, "local", &c);
  comm->group = group;
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) comm->requests[i].peers = comm->peers + (int64_t)i * c.world_size;

  pthread_mutex_lock(&group->mutex);
  local_end_t* end = &group->ends[c.rank];
  int is_taken = end->state != END_ABSENT;
  if (!is_taken) {
    end->state = END_LIVE;
    end->comm = comm;
    ++group->references;
  }
  pthread_mutex_unlock(&group->mutex);
  if (is_taken) {
    sluice_free(sluice_process_allocator(), comm, comm_bytes(c.world_size));
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "rank %d of this local group is taken or was destroyed; each rank is made once per group",
                       c.rank);
  }
  *out_comm = &comm->base;
  return SLUICE_OK;
}

static uint64_t fetched_bytes(const local_comm_t* comm) {
  return (uint64_t)comm->base.world_size * sizeof *comm->fetched;
}

static void drop_on_device(local_comm_t* comm) {
  const sluice_local_device_t there = comm->device;
  for (int32_t p = 0; comm->fetched != NULL && p < comm->base.world_size; ++p) {
    if (comm->fetched[p] != NULL) there.destroy_event(there.user, comm->fetched[p]);
  }
  if (comm->ready != NULL) there.destroy_event(there.user, comm->ready);
  sluice_free(sluice_process_allocator(), comm->fetched, fetched_bytes(comm));
  comm->fetched = NULL;
  comm->ready = NULL;
  memset(&comm->device, 0, sizeof comm->device);
  if (there.released != NULL) there.released(there.user);
}

static void local_destroy(sluice_comm_t* base) {
  local_comm_t* comm = sluice_local_downcast(base);
  sluice_local_group_t* group = comm->group;
  pthread_mutex_lock(&group->mutex);
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) {
    if (comm->requests[i].is_used) sluice_local_withdraw(comm, &comm->requests[i], base->rank, 1);
  }
  sluice_local_leave(comm, base->rank, 0);
  while (comm->unordered > 0) pthread_cond_wait(&group->changed, &group->mutex); /* senders are still in the exchange */
  group->ends[base->rank].comm = NULL;
  pthread_mutex_unlock(&group->mutex);
  drop_on_device(comm);
  sluice_free(sluice_process_allocator(), comm, comm_bytes(base->world_size));
  sluice_local_group_destroy(group);
}

static void local_abort(sluice_comm_t* base) {
  local_comm_t* comm = sluice_local_downcast(base);
  pthread_mutex_lock(&comm->group->mutex);
  comm->is_aborted = 1;
  /* A rank that has given up has already said which rank is at fault. */
  int is_lost = comm->group->ends[base->rank].state == END_LOST;
  if (comm->group->aborted_by < 0 && !is_lost) comm->group->aborted_by = base->rank;
  pthread_cond_broadcast(&comm->group->changed);
  pthread_mutex_unlock(&comm->group->mutex);
}

/* ---- memory of a device ---------------------------------------------------------------------------------------- */

int sluice_comm_is_local(const sluice_comm_t* comm) { return comm->vtable == &local_comm_vtable; }

void* sluice_local_comm_device(sluice_comm_t* comm) {
  return sluice_comm_is_local(comm) ? sluice_local_downcast(comm)->device.user : NULL;
}

sluice_status_t sluice_local_comm_set_device(sluice_comm_t* base, const sluice_local_device_t* there) {
  local_comm_t* comm = sluice_local_downcast(base);
  if (comm->device.copy != NULL) {
    if (there->released != NULL) there->released(there->user);
    return SLUICE_OK;
  }
  comm->device = *there;
  comm->fetched = sluice_alloc_zeroed(sluice_process_allocator(), fetched_bytes(comm), "events of a communicator");
  sluice_status_t status =
      comm->fetched == NULL ? sluice_alloc_status() : there->create_event(there->user, &comm->ready);
  for (int32_t p = 0; p < base->world_size && status == SLUICE_OK; ++p) {
    status = there->create_event(there->user, &comm->fetched[p]);
  }
  if (status == SLUICE_OK) return SLUICE_OK;
  sluice_error_info_t why;
  sluice_error_capture(&why);
  drop_on_device(comm);
  return sluice_error_adopt(&why);
}

/* ---- notes ----------------------------------------------------------------------------------------------------- */

static void local_publish(sluice_comm_t* base, const char* key, const char* value) {
  sluice_local_group_t* group = sluice_local_downcast(base)->group;
  local_note_t* note = &group->ends[base->rank].note; /* one note per rank */
  pthread_mutex_lock(&group->mutex);
  snprintf(note->key, sizeof note->key, "%s", key);
  snprintf(note->value, sizeof note->value, "%s", value);
  pthread_mutex_unlock(&group->mutex);
}

static int32_t local_lookup(sluice_comm_t* base, const char* key, char* out, int32_t out_bytes) {
  sluice_local_group_t* group = sluice_local_downcast(base)->group;
  int32_t bytes = 0;
  pthread_mutex_lock(&group->mutex);
  for (int32_t r = 0; r < group->world_size; ++r) {
    const local_note_t* note = &group->ends[r].note;
    if (strcmp(note->key, key) != 0) continue;
    bytes = (int32_t)strlen(note->value);
    if (bytes > out_bytes) bytes = out_bytes;
    memcpy(out, note->value, (size_t)bytes);
  }
  pthread_mutex_unlock(&group->mutex);
  return bytes;
}

static const sluice_comm_vtable_t local_comm_vtable = {
    .destroy = local_destroy,
    .exchange_start = sluice_local_exchange_start,
    .exchange_wait = sluice_local_exchange_wait,
    .abort = local_abort,
    .publish = local_publish,
    .lookup = local_lookup,
    .abandon = sluice_local_abandon,
    .exchange_enqueue = sluice_local_exchange_enqueue,
    .messages_open = sluice_local_messages_open,
};
