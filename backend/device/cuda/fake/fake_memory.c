// SPDX-License-Identifier: Apache-2.0
/* Device memory, pinned memory, and registered memory of the host. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/device/cuda/fake/fake_world.h"

enum { MOST_FILLED = 1 << 20 }; /* cuBLAS's workspace is 32 MiB that the fakes never touch */

/* Returns the block that contains this address, or NULL. */
static block_t* block_of(const void* data) {
  for (int i = 0; i < sluice_fake_world.num_places; ++i) {
    block_t* block = &sluice_fake_world.blocks[i];
    const char* begin = block->data;
    if (begin != NULL && (const char*)data >= begin && (const char*)data < begin + block->bytes) return block;
  }
  return NULL;
}

int64_t sluice_fake_block_number(const char* data) {
  const block_t* block = block_of(data);
  return block != NULL ? block->number : 0;
}

int sluice_fake_is_on_device(const char* data) {
  const block_t* block = block_of(data);
  return block != NULL && block->ordinal >= 0;
}

/* Returns the first free entry; NULL if there is none. */
static block_t* free_place(void) {
  sluice_fake_world_t* w = &sluice_fake_world;
  int32_t i = 0;
  while (i < w->num_places && w->blocks[i].data != NULL) ++i;
  if (i == MAX_BLOCKS) return NULL;
  if (i == w->num_places) ++w->num_places;
  return &w->blocks[i];
}

/* For a dry run: pages are mapped when touched, and nothing touches rows. NULL if it fails. */
static void* reserve(uint64_t bytes) {
  void* data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return data == MAP_FAILED ? NULL : data;
}

void sluice_fake_release_block(block_t* block) {
  if (block->data == NULL || block->is_registered) return;
  if (block->is_reserved) {
    (void)munmap(block->data, block->bytes);
  } else {
    free(block->data);
  }
  block->data = NULL;
}

static int take_block(uint64_t bytes, int32_t ordinal, void** out_data) {
  if (bytes == 0) return INVALID_VALUE;
  if (ordinal >= 0 && sluice_fake_world.used[ordinal] + bytes > sluice_fake_world.memory)
    return SLUICE_CU_OUT_OF_MEMORY;
  block_t* block = free_place();
  if (block == NULL) return SLUICE_CU_OUT_OF_MEMORY;
  block->is_reserved = sluice_fake_is_dry();
  if (block->is_reserved) {
    block->data = reserve(bytes);
    if (block->data == NULL) return SLUICE_CU_OUT_OF_MEMORY;
  } else {
    if (posix_memalign(&block->data, 256, bytes) != 0) return SLUICE_CU_OUT_OF_MEMORY;
    memset(block->data, 0xa5, bytes < MOST_FILLED ? bytes : MOST_FILLED); /* stale contents */
  }
  block->bytes = bytes;
  block->ordinal = ordinal;
  block->is_hosts = block->is_registered = 0;
  block->number = ++sluice_fake_world.num_blocks;
  if (ordinal >= 0) sluice_fake_world.used[ordinal] += bytes;
  *out_data = block->data;
  return 0;
}

static int is_refused(void) {
  if (sluice_fake_world.allocations++ != sluice_fake_world.refuse_at) return 0;
  sluice_fake_world.refused = 1;
  return 1;
}

/* Allocates a block for the library; a test may make it fail. */
static int take_library_block(uint64_t bytes, int32_t ordinal, void** out_data) {
  return is_refused() ? SLUICE_CU_OUT_OF_MEMORY : take_block(bytes, ordinal, out_data);
}

void sluice_fake_cuda_refuse(int64_t nth) {
  sluice_fake_cuda_lock();
  sluice_fake_world.allocations = 0;
  sluice_fake_world.refuse_at = nth;
  sluice_fake_world.refused = 0;
  sluice_fake_cuda_unlock();
}
int sluice_fake_cuda_refused(void) { return sluice_fake_world.refused; }

static int give_block(void* data) {
  block_t* block = block_of(data);
  if (block == NULL || block->data != data || block->is_registered) return INVALID_VALUE;
  sluice_fake_cuda_pump();
  if (block->ordinal >= 0) sluice_fake_world.used[block->ordinal] -= block->bytes;
  sluice_fake_release_block(block);
  return 0;
}

int sluice_fake_cuMemAlloc_v2(unsigned long long* out_pointer, size_t bytes) {
  if (sluice_fake_current_device() < 0) return INVALID_CONTEXT;
  void* data = NULL;
  int code = sluice_fake_begin("cuMemAlloc");
  if (code == 0) code = take_library_block(bytes, sluice_fake_current_device(), &data);
  if (code == 0) *out_pointer = (unsigned long long)(uintptr_t)data;
  return sluice_fake_end(code);
}

int sluice_fake_is_idle(const void* of_device) {
  const int32_t ordinal = *(const int32_t*)of_device;
  for (int i = 0; i < MAX_STREAMS; ++i) {
    const fake_stream_t* stream = &sluice_fake_world.streams[i];
    if (stream->live && stream->ordinal == ordinal && stream->head != NULL) return 0;
  }
  return 1;
}

/* Like the real one, it waits for everything on the block's device. */
int sluice_fake_cuMemFree_v2(unsigned long long pointer) {
  void* data = (void*)(uintptr_t)pointer;
  const int code = sluice_fake_begin("cuMemFree");
  const block_t* block = block_of(data);
  const int32_t ordinal = block != NULL ? block->ordinal : -1;
  (void)sluice_fake_wait_until(sluice_fake_is_idle, &ordinal);
  const int freed = give_block(data);
  return sluice_fake_end(code != 0 ? code : freed);
}

/* Synchronizes the current device. It does not order later work here: callers may not rely on a wait for everything. */
int sluice_fake_cuCtxSynchronize(void) {
  const int32_t ordinal = sluice_fake_current_device();
  if (ordinal < 0) return INVALID_CONTEXT;
  int code = sluice_fake_begin("cuCtxSynchronize");
  ++sluice_fake_world.host_waits;
  if (code == 0) code = sluice_fake_wait_until(sluice_fake_is_idle, &ordinal);
  return sluice_fake_end(code);
}

int sluice_fake_cuda_allocate(uint64_t bytes, void** out_data) {
  if (sluice_fake_current_device() < 0) return INVALID_CONTEXT;
  if (sluice_fake_spoils(NULL)) return CAPTURE_UNSUPPORTED;
  return take_library_block(bytes, sluice_fake_current_device(), out_data);
}

int sluice_fake_cuda_free(void* data) { return sluice_fake_spoils(NULL) ? CAPTURE_UNSUPPORTED : give_block(data); }

int sluice_fake_cuMemGetInfo_v2(size_t* out_free, size_t* out_total) {
  if (sluice_fake_current_device() < 0) return INVALID_CONTEXT;
  *out_free = sluice_fake_world.memory - sluice_fake_world.used[sluice_fake_current_device()];
  *out_total = sluice_fake_world.memory;
  return sluice_fake_simple();
}

int sluice_fake_cuMemHostAlloc(void** out_pointer, size_t bytes, unsigned int flags) {
  (void)flags;
  if (sluice_fake_current_device() < 0) return INVALID_CONTEXT;
  int code = sluice_fake_begin("cuMemHostAlloc");
  if (code == 0) code = take_library_block(bytes, -1, out_pointer);
  return sluice_fake_end(code);
}

int sluice_fake_cuMemFreeHost(void* pointer) {
  const int code = sluice_fake_begin("cuMemFreeHost"), freed = give_block(pointer);
  return sluice_fake_end(code != 0 ? code : freed);
}

int sluice_fake_cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned int flags) {
  (void)flags;
  if (sluice_fake_current_device() < 0) return INVALID_CONTEXT;
  int code = sluice_fake_begin("cuMemHostRegister");
  block_t* block = code == 0 && !is_refused() ? free_place() : NULL;
  if (code == 0 && block == NULL) code = SLUICE_CU_OUT_OF_MEMORY;
  if (code == 0) {
    if (!sluice_fake_is_dry()) memset(pointer, 0xa5, bytes); /* the driver touches the pages */
    *block = (block_t){
        .data = pointer, .bytes = bytes, .ordinal = -1, .is_registered = 1, .number = ++sluice_fake_world.num_blocks};
  }
  return sluice_fake_end(code);
}

int sluice_fake_cuMemHostUnregister(void* pointer) {
  const int code = sluice_fake_begin("cuMemHostUnregister");
  block_t* block = block_of(pointer);
  const int is_found = block != NULL && block->data == pointer && block->is_registered;
  if (is_found) *block = (block_t){.data = NULL};
  return sluice_fake_end(code != 0 ? code : is_found ? 0 : INVALID_VALUE);
}

int64_t sluice_fake_cuda_registered_bytes(void) {
  int64_t bytes = 0;
  sluice_fake_cuda_lock();
  for (int i = 0; i < sluice_fake_world.num_places; ++i) {
    if (sluice_fake_world.blocks[i].data != NULL && sluice_fake_world.blocks[i].is_registered)
      bytes += (int64_t)sluice_fake_world.blocks[i].bytes;
  }
  sluice_fake_cuda_unlock();
  return bytes;
}

int sluice_fake_cuPointerGetAttribute(void* out_value, int attribute, unsigned long long pointer) {
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned();
  const block_t* block = code == 0 ? block_of((const void*)(uintptr_t)pointer) : NULL;
  if (code == 0 && block == NULL) code = INVALID_VALUE; /* as for pageable host memory */
  if (code == 0) {
    const unsigned int type = block->ordinal >= 0 ? SLUICE_CU_MEMORY_DEVICE : SLUICE_CU_MEMORY_HOST;
    if (attribute == SLUICE_CU_POINTER_MEMORY_TYPE) memcpy(out_value, &type, sizeof type);
    if (attribute == SLUICE_CU_POINTER_DEVICE_ORDINAL) memcpy(out_value, &block->ordinal, sizeof block->ordinal);
  }
  return sluice_fake_end(code);
}

void* sluice_fake_cuda_take(int32_t ordinal, uint64_t bytes) {
  void* data = NULL;
  sluice_fake_cuda_lock();
  if (take_block(bytes, ordinal, &data) == 0) block_of(data)->is_hosts = 1;
  sluice_fake_cuda_unlock();
  return data;
}

void sluice_fake_cuda_give(void* data) {
  sluice_fake_cuda_lock();
  (void)give_block(data);
  sluice_fake_cuda_unlock();
}
