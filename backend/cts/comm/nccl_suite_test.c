// SPDX-License-Identifier: Apache-2.0
/* The suite on the NCCL transport with the fake library and driver. Ranks are threads, each with its own device. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/comm/nccl/fake/fake_nccl.h"
#include "backend/cts/comm/comm_suite.h"
#include "backend/device/cuda/fake/fake_cuda.h"

enum { MAX_RANKS = 8 };

typedef struct shared_s {
  sluice_nccl_id_t id;
  sluice_device_t* devices[MAX_RANKS];
  pthread_mutex_t mutex; /* of the store */
  struct {
    char key[32];
    char value[192];
  } notes[4 * MAX_RANKS];
} shared_t;

/* The host's store. */
static void publish(void* user, const char* key, const char* value) {
  shared_t* shared = user;
  pthread_mutex_lock(&shared->mutex);
  for (int i = 0; i < 4 * MAX_RANKS; ++i) {
    if (shared->notes[i].key[0] != '\0' && strcmp(shared->notes[i].key, key) != 0) continue;
    snprintf(shared->notes[i].key, sizeof shared->notes[i].key, "%s", key);
    snprintf(shared->notes[i].value, sizeof shared->notes[i].value, "%s", value);
    break;
  }
  pthread_mutex_unlock(&shared->mutex);
}
static int32_t lookup(void* user, const char* key, char* out, int32_t out_bytes) {
  shared_t* shared = user;
  int32_t bytes = 0;
  pthread_mutex_lock(&shared->mutex);
  for (int i = 0; i < 4 * MAX_RANKS; ++i) {
    if (strcmp(shared->notes[i].key, key) != 0) continue;
    bytes = (int32_t)strlen(shared->notes[i].value);
    if (bytes > out_bytes) bytes = out_bytes;
    memcpy(out, shared->notes[i].value, (size_t)bytes);
  }
  pthread_mutex_unlock(&shared->mutex);
  return bytes;
}

static void* open_group(int32_t world_size) {
  sluice_nccl_symbols_t symbols = sluice_fake_nccl();
  shared_t* shared = calloc(1, sizeof *shared);
  pthread_mutex_init(&shared->mutex, NULL);
  int failed = sluice_nccl_make_id(&symbols, &shared->id) != SLUICE_OK;
  for (int32_t r = 0; r < world_size && !failed; ++r) {
    failed = sluice_fake_cuda_device(sluice_process_allocator(), &shared->devices[r]) != SLUICE_OK;
  }
  if (!failed) return shared;
  for (int32_t r = 0; r < MAX_RANKS; ++r) {
    if (shared->devices[r] != NULL) shared->devices[r]->vtable->destroy(shared->devices[r]);
  }
  free(shared);
  return NULL;
}

static void close_group(void* opaque) {
  shared_t* shared = opaque;
  for (int32_t r = 0; r < MAX_RANKS; ++r) {
    if (shared->devices[r] != NULL) shared->devices[r]->vtable->destroy(shared->devices[r]);
  }
  free(shared);
}

static sluice_status_t create(void* opaque, const sluice_comm_config_t* config, sluice_comm_t** out_comm) {
  shared_t* shared = opaque;
  sluice_nccl_symbols_t symbols = sluice_fake_nccl();
  const sluice_nccl_store_t store = {shared, publish, lookup};
  const sluice_nccl_options_t options = {.store = &store,
                                         .symbols = &symbols,
                                         .device = shared->devices[config->rank],
                                         .memory = sluice_process_allocator(),
                                         .id = &shared->id};
  return sluice_nccl_comm_create(&options, config, out_comm);
}

int main(int argc, char** argv) {
  static const cts_exception_t cannot[] = {
      {"Wait_LateRank_WarnsAndSucceeds", "NCCL does not say whose message is missing; notes are read at the deadline"},
      {"Exchange_MoreSentThanExpected_IsInternalNamingIt", "NCCL matches messages by order, not by size"},
      {"Exchange_LessSentThanExpected_IsInternalNamingIt", "NCCL matches messages by order, not by size"},
      {"Abort_ByOneOfThoseWaiting_EndsTheOthersWait",
       "NCCL shows a lost rank in exchanges with it; notes are not polled"},
      {"Destroy_ByOneOfThoseWaiting_EndsTheOthersWait",
       "NCCL shows a lost rank in exchanges with it; notes are not polled"},
      {NULL, NULL},
  };
  static const cts_transport_t transport = {
      .cannot = cannot, .name = "nccl", .open = open_group, .close = close_group, .create = create};
  sluice_fake_cuda_reset();
  int failed = cts_comm_suite_main(&transport, argc, argv);
  char live[200];
  if (sluice_fake_cuda_live(live, sizeof live) != 0 || sluice_fake_nccl_live() != 0) {
    printf("left: %s, %lld communicators\n", live, (long long)sluice_fake_nccl_live());
    return 1;
  }
  return failed;
}
