// SPDX-License-Identifier: Apache-2.0
// A communicator for libsluice over a torch.distributed process group.
//
// Fills the C ABI's sluice_host_comm_vtable_t with callbacks that use the CPU backend (gloo) of a c10d process group.
// Nothing here needs Python or the GIL, because the library calls from its own communication thread. libsluice and this
// file share only the public header.
//
// Behaviour of gloo, and its consequences (measured with torch 2.13):
// - A `wait(timeout)` on a send or a receive that expires closes every connection of the group. So a wait is given a
//   long timeout and is ended from outside by `Work::abort()`, which interrupts that one wait and leaves the operation
//   alive. A small thread, the ticker, does this for waits that last longer than a slice.
// - Only the operation that is waited for shows that its connection is closed. So every slice checks all operations.
// - If a rank failed alone, its peers would wait until their deadlines. So a rank that gives up closes its connections,
//   by the expiry above.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/version.h>

#include "sluice/comm.h"

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4, "c10d has had these signatures since torch 2.4");

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kSlice{100};  // an abort or an interrupt is noticed within this time
constexpr milliseconds kShortest{1}; // gloo's unit is the millisecond, and zero means its own timeout
constexpr milliseconds kForever{1000LL * 3600 * 24 * 20};
constexpr milliseconds kStoreTimeout{2000}; // a store that takes longer is treated as lost
constexpr std::chrono::seconds kLinger{1};  // the ticker runs this long after the last wait
constexpr int kTagMask = 0x3fffffff;
constexpr int kCloseTag = 0x40000000; // never sent to anyone

// Set by SIGINT while the main thread is inside the library (see sluice_torch_interrupt_enter).
std::atomic<int> g_interrupted{0};

void fail(sluice_host_failure_t* out, int peer, const char* text) {
  if (out == nullptr) return;
  out->peer = peer;
  out->native_code = 0;
  std::strncpy(out->message, text, sizeof out->message - 1);
  out->message[sizeof out->message - 1] = '\0';
}

// No thread can be started, so that nothing would end a wait. This is not a peer's fault.
struct NoTicker : std::runtime_error {
  explicit NoTicker(const std::system_error& error)
      : std::runtime_error(std::string("no thread can be started to end waits: ") + error.what()),
        code(error.code().value()) {}
  int code;
};

// Interrupts a wait when its slice is over. There is one per process. It is never destroyed, because a detached thread
// may outlive main.
class Ticker {
 public:
  static Ticker& get() {
    static Ticker* ticker = [] {
      // A forked child has no such thread, and perhaps a locked mutex: it gets a new ticker.
      pthread_atfork(nullptr, nullptr, [] { current() = new Ticker(); });
      return current() = new Ticker();
    }();
    (void)ticker;
    return *current();
  }

  // Runs `work->wait`, for about a slice at most. True: done. False: the slice is over. Throws what gloo throws, and
  // NoTicker before it waits; the next wait then tries again.
  bool wait(c10d::Work& work, Clock::time_point until) {
    Armed armed{&work, until};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const bool is_new = !running_;
      if (is_new) start();
      armed_.insert(&armed); // after everything that may throw, so that the ticker never uses a dead frame
      last_use_ = Clock::now();
      if (!is_new && until < next_) {
        wake_.notify_one();
      }
    }
    struct Disarm {
      Ticker& ticker;
      Armed* armed;
      ~Disarm() {
        std::lock_guard<std::mutex> lock(ticker.mutex_);
        ticker.armed_.erase(armed);
      }
    } disarm{*this, &armed};
    return work.wait(kForever);
  }

 private:
  static Ticker*& current() {
    static Ticker* ticker = nullptr;
    return ticker;
  }

  struct Armed {
    c10d::Work* work;
    Clock::time_point until;
  };

  // The caller holds the mutex, for which the new thread waits.
  void start() {
    try {
      std::thread([this] { run(); }).detach();
    } catch (const std::system_error& error) {
      throw NoTicker(error);
    }
    running_ = true;
  }

  void run() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr); // signals belong to the host's threads
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const Clock::time_point now = Clock::now();
      next_ = now + kSlice / 2;
      for (Armed* armed : armed_) {
        // Under the lock, so that the work is still waited for. If it has just finished, it is not waited for again.
        if (armed->until <= now) {
          armed->work->abort();
        } else {
          next_ = std::min(next_, armed->until);
        }
      }
      if (armed_.empty() && now - last_use_ > kLinger) {
        running_ = false;
        return;
      }
      wake_.wait_until(lock, next_);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::set<Armed*> armed_;
  Clock::time_point next_;
  Clock::time_point last_use_;
  bool running_ = false;
};

// One message in transit. The Work holds the tensor, which borrows the library's bytes.
struct Message {
  int peer;
  bool is_receive;
  c10::intrusive_ptr<c10d::Work> work;
};

struct Request {
  std::vector<Message> pending; // receives first
};

// A rank's notes in the group's store. Each call runs on a separate thread, because a store has no short timeout.
class Notes {
 public:
  explicit Notes(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  bool available() const { return store_.defined() && !gone_.load(); }

  // Runs `action(store)`; false if it failed or took too long (the store is then not used again).
  template <typename Action>
  bool ask(Action action) {
    if (!available()) return false;
    auto done = std::make_shared<std::promise<bool>>();
    std::future<bool> answer = done->get_future();
    std::thread([store = store_, action, done]() mutable {
      bool good = false;
      try {
        action(*store);
        good = true;
      } catch (...) {
      }
      done->set_value(good);
    }).detach();
    if (answer.wait_for(kStoreTimeout) == std::future_status::ready && answer.get()) return true;
    gone_.store(true);
    return false;
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  std::atomic<bool> gone_{false};
};

template <typename Group>
auto store_of(const Group& group, int) -> decltype(group->getStore()) {
  return group->getStore();
}
// Before torch 2.8 a process group has no getStore: there are no notes then.
template <typename Group>
c10::intrusive_ptr<c10d::Store> store_of(const Group&, long) {
  return {};
}

struct Comm {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  c10::intrusive_ptr<c10d::Backend> backend;
  std::unique_ptr<Notes> notes;
  int rank = 0;
  int world_size = 1;
  int sequence = 0;
  std::set<Request*> requests;
  std::atomic<bool> aborted{false};
  std::atomic<bool> closed{false};

  // Closes all connections of the group, so that every peer notices now and not at its deadline.
  void close() {
    if (closed.exchange(true)) return;
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer == rank) continue;
      try {
        uint8_t byte = 0;
        std::vector<at::Tensor> one{at::from_blob(&byte, {1}, at::kByte)};
        backend->recv(one, peer, kCloseTag)->wait(kShortest);
      } catch (...) {
        return; // expected: the expiry closed them
      }
    }
  }

  void release(Request* request) {
    requests.erase(request);
    delete request; // gloo's buffers wait for a reader that is inside them, and then drop the bytes
  }
};

sluice_status_t give_up(Comm* comm, Request* request, sluice_status_t status) {
  comm->close();
  comm->release(request);
  return status;
}

// ABORTED if this rank itself closed the connections, PEER_LOST otherwise.
sluice_status_t lost(Comm* comm, sluice_host_failure_t* out, int peer, const char* text) {
  if (comm->aborted.load()) {
    fail(out, -1, "the communicator was aborted");
    return SLUICE_E_ABORTED;
  }
  fail(out, peer, text);
  return SLUICE_E_PEER_LOST;
}

void post(Comm* comm, Request* request, int peer, bool is_receive, void* data, uint64_t bytes, int tag) {
  std::vector<at::Tensor> tensors{at::from_blob(data, {static_cast<int64_t>(bytes)}, at::kByte)};
  auto work = is_receive ? comm->backend->recv(tensors, peer, tag) : comm->backend->send(tensors, peer, tag);
  request->pending.push_back({peer, is_receive, std::move(work)});
}

sluice_status_t exchange_start(void* user, const sluice_exchange_t* exchange, void** out_request,
                               sluice_host_failure_t* out_failure) {
  auto* comm = static_cast<Comm*>(user);
  *out_request = nullptr;
  Request* request = nullptr;
  int peer = -1;
  sluice_status_t status;
  try {
    if (comm->aborted.load()) return lost(comm, out_failure, -1, "");
    request = new Request();
    comm->requests.insert(request);
    request->pending.reserve(2 * static_cast<size_t>(comm->world_size));
    const int tag = comm->sequence++ & kTagMask;
    // From the next rank onwards, so that not all ranks send to rank 0 first.
    for (int step = 1; step < comm->world_size; ++step) {
      peer = (comm->rank + comm->world_size - step) % comm->world_size;
      const uint64_t bytes = exchange->recv_bytes[peer];
      if (bytes > 0) post(comm, request, peer, true, exchange->recv[peer], bytes, tag);
    }
    for (int step = 1; step < comm->world_size; ++step) {
      peer = (comm->rank + step) % comm->world_size;
      const uint64_t bytes = exchange->send_bytes[peer];
      if (bytes > 0) post(comm, request, peer, false, const_cast<void*>(exchange->send[peer]), bytes, tag);
    }
    *out_request = request;
    return SLUICE_OK;
  } catch (const std::exception& error) {
    status = lost(comm, out_failure, peer, error.what());
  } catch (...) {
    status = lost(comm, out_failure, peer, "an unknown exception while posting a message");
  }
  return request == nullptr ? status : give_up(comm, request, status);
}

// Waits for one message until `until`. Throws what gloo throws.
bool arrived(Message& message, Clock::time_point until) { return Ticker::get().wait(*message.work, until); }

// Throws if the connection of this message is gone, without waiting for the message.
void look(Message& message) {
  message.work->abort(); // interrupts the next wait, which checks the connection first
  message.work->wait(kForever);
}

sluice_status_t exchange_wait(void* user, void* handle, uint64_t timeout_ns, sluice_host_failure_t* out_failure) {
  auto* comm = static_cast<Comm*>(user);
  auto* request = static_cast<Request*>(handle);
  const auto longest = std::chrono::duration_cast<std::chrono::nanoseconds>(kForever / 2);
  const auto timeout = std::min(std::chrono::nanoseconds(std::min<uint64_t>(timeout_ns, INT64_MAX)), longest);
  const Clock::time_point deadline = Clock::now() + std::max<std::chrono::nanoseconds>(timeout, kShortest);
  std::vector<Message>& pending = request->pending;
  int peer = -1;
  try {
    for (size_t next = 0; next < pending.size();) {
      Message& message = pending[next];
      peer = message.peer;
      if (arrived(message, std::min(deadline, Clock::now() + kSlice))) {
        ++next;
        continue;
      }
      if (comm->aborted.load()) return give_up(comm, request, lost(comm, out_failure, -1, ""));
      if (g_interrupted.load() != 0) {
        fail(out_failure, -1, "interrupted by a signal");
        comm->aborted.store(true);
        return give_up(comm, request, SLUICE_E_ABORTED);
      }
      const int missing = peer;
      for (size_t other = next; other < pending.size(); ++other) {
        peer = pending[other].peer;
        look(pending[other]);
      }
      if (Clock::now() >= deadline) {
        fail(out_failure, missing,
             message.is_receive ? "its message has not arrived" : "it has not taken this rank's message");
        pending.erase(pending.begin(), pending.begin() + static_cast<std::ptrdiff_t>(next));
        return SLUICE_E_TIMED_OUT;
      }
    }
    comm->release(request);
    return SLUICE_OK;
  } catch (const NoTicker& error) {
    fail(out_failure, -1, error.what());
    if (out_failure != nullptr) out_failure->native_code = error.code;
    return give_up(comm, request, SLUICE_E_EXTERNAL);
  } catch (const std::exception& error) {
    return give_up(comm, request, lost(comm, out_failure, peer, error.what()));
  } catch (...) {
    return give_up(comm, request, lost(comm, out_failure, peer, "an unknown exception while waiting for a message"));
  }
}

void abort_comm(void* user) {
  auto* comm = static_cast<Comm*>(user);
  comm->aborted.store(true);
  try {
    comm->close();
  } catch (...) {
  }
}

void publish(void* user, const char* key, const char* value) {
  auto* comm = static_cast<Comm*>(user);
  try {
    comm->notes->ask([key = std::string(key), value = std::string(value)](c10d::Store& store) {
      store.set(key, std::vector<uint8_t>(value.begin(), value.end()));
    });
  } catch (...) {
  }
}

int32_t lookup(void* user, const char* key, char* out, int32_t out_bytes) {
  auto* comm = static_cast<Comm*>(user);
  try {
    auto value = std::make_shared<std::vector<uint8_t>>();
    const bool good = comm->notes->ask([key = std::string(key), value](c10d::Store& store) {
      if (store.check({key})) *value = store.get(key); // get would wait for a key that is absent
    });
    if (!good) return -1;
    const auto bytes = static_cast<int32_t>(std::min<size_t>(value->size(), static_cast<size_t>(out_bytes)));
    std::memcpy(out, value->data(), static_cast<size_t>(bytes));
    return bytes;
  } catch (...) {
    return -1;
  }
}

int32_t is_interrupted(void*) { return g_interrupted.load(); }

void destroy(void* user) {
  auto* comm = static_cast<Comm*>(user);
  try {
    if (!comm->requests.empty()) comm->close();
    while (!comm->requests.empty()) comm->release(*comm->requests.begin());
    delete comm;
  } catch (...) {
  }
}

struct sigaction g_previous;

// Records the signal, and calls Python's own handler; async-signal-safe.
void on_interrupt(int number, siginfo_t* info, void* context) {
  g_interrupted.store(1);
  if ((g_previous.sa_flags & SA_SIGINFO) != 0) {
    g_previous.sa_sigaction(number, info, context);
  } else if (g_previous.sa_handler != SIG_DFL && g_previous.sa_handler != SIG_IGN) {
    g_previous.sa_handler(number);
  }
}

} // namespace

extern "C" {

// Opens the process group registered under `group_name`; fills the callbacks and their `user`. Not collective.
// Returns a sluice_status_t; on failure `message` (terminated, may be NULL) says why.
SLUICE_EXPORT int32_t sluice_torch_comm_open(const char* group_name, sluice_host_comm_vtable_t* out_vtable,
                                             void** out_user, char* message, int32_t message_bytes) {
  std::string why;
  try {
    auto comm = std::make_unique<Comm>();
    comm->group = c10d::resolve_process_group(group_name);
    comm->backend = comm->group->getBackend(c10::DeviceType::CPU);
    comm->rank = comm->group->getRank();
    comm->world_size = comm->group->getSize();
    comm->notes = std::make_unique<Notes>(store_of(comm->group, 0));
    std::memset(out_vtable, 0, sizeof *out_vtable);
    out_vtable->struct_size = sizeof *out_vtable;
    out_vtable->exchange_start = exchange_start;
    out_vtable->exchange_wait = exchange_wait;
    out_vtable->abort = abort_comm;
    out_vtable->publish = comm->notes->available() ? publish : nullptr;
    out_vtable->lookup = comm->notes->available() ? lookup : nullptr;
    out_vtable->destroy = destroy;
    out_vtable->is_interrupted = is_interrupted;
    *out_user = comm.release();
    return SLUICE_OK;
  } catch (const std::exception& error) {
    why = error.what();
  } catch (...) {
    why = "an unknown exception";
  }
  if (message != nullptr && message_bytes > 0) {
    std::strncpy(message, why.c_str(), static_cast<size_t>(message_bytes) - 1);
    message[message_bytes - 1] = '\0';
  }
  return SLUICE_E_EXTERNAL;
}

// Between enter and leave, which the main thread calls around a call into the library, SIGINT also ends waits: Python's
// handler runs only when that call returns. Other handlers of the host are called as before.
SLUICE_EXPORT void sluice_torch_interrupt_enter(void) {
  struct sigaction mine;
  std::memset(&mine, 0, sizeof mine);
  mine.sa_sigaction = on_interrupt;
  mine.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&mine.sa_mask);
  g_interrupted.store(0);
  struct sigaction before;
  if (sigaction(SIGINT, nullptr, &before) != 0) return;
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction == on_interrupt) return;
  g_previous = before;
  sigaction(SIGINT, &mine, nullptr);
}

SLUICE_EXPORT void sluice_torch_interrupt_leave(void) {
  struct sigaction now;
  if (sigaction(SIGINT, nullptr, &now) != 0) return;
  // A handler that other code has installed meanwhile stays.
  if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == on_interrupt) sigaction(SIGINT, &g_previous, nullptr);
}

} // extern "C"
