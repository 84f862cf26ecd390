// SPDX-License-Identifier: Apache-2.0
// Keeps the memory of gradients that the host has freed, and reuses it for later gradients of the same size.
//
// A training loop that sets `.grad` to None frees every gradient, and allocates as many bytes a step later. The C
// library returns blocks of this size to the system, which maps and clears them page by page for the next allocation.
// On hosts that take free memory back from their guests this takes longer than the GEMMs that write the gradients.
#define AT_PER_OPERATOR_HEADERS
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <cstdint>
#include <cstring>
#include <list>
#include <mutex>
#include <new>

#include "sluice/base.h"

namespace {

struct Block {
  c10::DataPtr memory;
  size_t bytes;
  uint64_t limit;     // of the last call that took it
  uint64_t let_go_at; // the value of Pool::taken
};

struct Pool {
  std::mutex mutex;
  std::list<Block*> idle; // the newest first: it is the likeliest to be in a cache
  uint64_t idle_bytes = 0;
  uint64_t out_bytes = 0;
  uint64_t taken = 0; // all bytes so far
  uint64_t num_fresh = 0;
  uint64_t num_reused = 0;
};

// The pool is never destroyed, because gradients may outlive everything else of a process.
Pool& pool() {
  static Pool* const only = [] {
    auto* made = new Pool;
    pthread_atfork([] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); }, [] { pool().mutex.unlock(); });
    return made;
  }();
  return *only;
}

using Blocks = std::list<Block*>;

void give_back(Blocks& blocks) {
  for (Block* block : blocks) delete block;
}

// Moves blocks to `out`, the oldest first, until at most `most` bytes are idle. Also moves all blocks that stayed idle
// while twice the bytes of all blocks were taken, since their parameters are no longer trained. The caller holds the
// mutex.
void sort_out(Pool& p, uint64_t most, Blocks& out) {
  const uint64_t most_taken = 2 * (p.idle_bytes + p.out_bytes);
  while (!p.idle.empty()) {
    const Block* oldest = p.idle.back();
    if (p.idle_bytes <= most && p.taken - oldest->let_go_at <= most_taken) return;
    p.idle_bytes -= oldest->bytes;
    out.splice(out.end(), p.idle, std::prev(p.idle.end()));
  }
}

// The deleter of a storage: puts its block into the pool. Any thread may call it.
void let_go(void* context) {
  auto* block = static_cast<Block*>(context);
  Pool& p = pool();
  Blocks out;
  {
    const std::lock_guard<std::mutex> guard(p.mutex);
    p.out_bytes -= block->bytes;
    p.idle_bytes += block->bytes;
    block->let_go_at = p.taken;
    p.idle.push_front(block);
    sort_out(p, block->limit, out);
  }
  give_back(out);
}

Block* reused(Pool& p, size_t bytes, uint64_t limit) {
  Blocks out;
  Block* found = nullptr;
  {
    const std::lock_guard<std::mutex> guard(p.mutex);
    for (auto at = p.idle.begin(); at != p.idle.end() && found == nullptr; ++at) {
      if ((*at)->bytes != bytes) continue;
      found = *at;
      p.idle.erase(at);
      p.idle_bytes -= bytes;
      ++p.num_reused;
      break;
    }
    p.num_fresh += found == nullptr;
    p.taken += bytes;
    p.out_bytes += bytes;
    sort_out(p, limit, out);
  }
  give_back(out);
  return found;
}

void free_all(Pool& p) {
  Blocks out;
  {
    const std::lock_guard<std::mutex> guard(p.mutex);
    out.swap(p.idle);
    p.idle_bytes = 0;
  }
  give_back(out);
}

c10::DataPtr allocate(Pool& p, size_t bytes) {
  try {
    return c10::GetCPUAllocator()->allocate(bytes);
  } catch (...) { // the system has no more memory: free the idle blocks first
    free_all(p);
    return c10::GetCPUAllocator()->allocate(bytes);
  }
}

Block* take(size_t bytes, uint64_t limit) {
  Pool& p = pool();
  Block* block = reused(p, bytes, limit);
  if (block == nullptr) {
    try {
      block = new Block{allocate(p, bytes), bytes, limit, 0};
    } catch (...) {
      const std::lock_guard<std::mutex> guard(p.mutex);
      p.out_bytes -= bytes;
      throw;
    }
  }
  block->limit = limit;
  return block;
}

bool is_plain(const c10::TensorImpl& tensor) {
  return tensor.layout() == c10::kStrided && tensor.device().is_cpu() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.key_set().has(c10::DispatchKey::Python) && tensor.is_non_overlapping_and_dense();
}

} // namespace

extern "C" {

// Gives `target`, an empty tensor of the same dtype, the shape and strides of `like` and uninitialized memory; both are
// TensorImpl*. The memory returns to the pool when its storage is freed; the pool keeps at most `limit` idle bytes.
// Returns 0, without an effect, if `like` is not a dense tensor on the CPU, or there is no memory.
SLUICE_EXPORT int32_t sluice_torch_take_gradient(void* target, const void* like, uint64_t limit) {
  try {
    const auto* model = static_cast<const c10::TensorImpl*>(like);
    auto* made = static_cast<c10::TensorImpl*>(target);
    if (!is_plain(*model) || made->dtype() != model->dtype()) return 0;
    const size_t bytes = static_cast<size_t>(model->numel()) * model->itemsize();
    Block* block = take(bytes, limit);
    c10::DataPtr memory(block->memory.get(), block, &let_go, c10::Device(c10::kCPU));
    made->set_storage_keep_dtype(c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes, std::move(memory), c10::GetCPUAllocator(), true)));
    made->set_sizes_and_strides(model->sizes(), model->strides());
    return 1;
  } catch (...) {
    return 0;
  }
}

// Writes the idle bytes, the bytes of current gradients, and the numbers of gradients in fresh and in reused memory.
SLUICE_EXPORT void sluice_torch_gradient_pool(uint64_t* out) {
  Pool& p = pool();
  const std::lock_guard<std::mutex> guard(p.mutex);
  out[0] = p.idle_bytes;
  out[1] = p.out_bytes;
  out[2] = p.num_fresh;
  out[3] = p.num_reused;
}

// Returns all idle memory to the C library.
SLUICE_EXPORT void sluice_torch_give_back_gradients(void) { free_all(pool()); }

} // extern "C"
