// SPDX-License-Identifier: Apache-2.0
/* The CPU device: the compute lane is the calling thread (its OpenMP pool, its affinity); every other lane is one
 * thread, created on first use. A pass is submitted without a lock, and join releases it as a whole.
 *
 * A lane runs its jobs in order without checking the others: a job that waits for no other lane has no acquire before
 * it, and a job that no other lane waits for has no release after it. A lane publishes its progress in one counter,
 * after jobs that are awaited and after its last job. A lane that must wait sets its bit in `sleepers` and reads those
 * counters once more; a lane that changes a counter reads `sleepers` afterwards, so one of the two sees the other. Only
 * then is the mutex taken. A sleeper is woken once, by the lane that ends the last job it waits for: each wake-up is a
 * system call, and a context switch on a busy core. */
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/lanes.h"
#include "backend/base/threads.h"
#include "backend/device/cpu/kernels_threads.h"
#include "backend/device/device.h"
#include "backend/model/pass_sizes.h"

/* Lanes run their jobs in order, so "event i has fired" means "lane l has ended its nth job": the wait of a job for a
 * lane is one number. */
typedef struct cpu_job_s {
  int32_t needs[SLUICE_NUM_LANES]; /* jobs that each other lane must have ended */
  int32_t nth;                     /* number within its lane, from 1 */
  int32_t next;                    /* next job of the same lane; NO_JOB after the last */
  int8_t lane;
  int8_t waits;      /* any of needs is not 0 */
  int8_t is_awaited; /* a job of another lane waits for it */
  int8_t run_on_failure;
} cpu_job_t;
static_assert(sizeof(cpu_job_t) == SLUICE_CPU_JOB_BYTES, "plans count it where no device is");

#define NO_JOB (-1)

typedef struct cpu_lane_s {
  struct cpu_device_s* device;
  pthread_t thread;
  sem_t woken;
  int32_t index;
  int32_t started;
  /* used by the calling thread, until join releases the lanes */
  int32_t first, last; /* its jobs of this pass; NO_JOB: none */
  int32_t submitted;
  int32_t loose;       /* first job of a pass that the lane may start, NO_JOB: none; guarded by the mutex */
  unsigned ended_wait; /* bit set of lanes whose wait this lane has ended; they are woken after the mutex is released */
  /* used by the calling thread, if waits are counted: CPU time of waking others */
  uint64_t posts_cpu_ns;
  uint64_t num_posts;
} cpu_lane_t;

typedef struct cpu_device_s {
  sluice_device_t base;
  /* Everything that a lane reads between jobs is adjacent, because a GEMM evicts it from the caches. */
  cpu_job_t* jobs; /* by op */
  sluice_job_fn_t fn;
  void* user;
  _Atomic int32_t failed;    /* only run_on_failure jobs run */
  _Atomic int32_t dead;      /* nothing runs */
  _Atomic unsigned sleepers; /* bit set of lanes that sleep within this pass; changed with the mutex held */
  _Atomic int32_t done[SLUICE_NUM_LANES]; /* number of ended jobs: for each lane up to the last awaited one */
  pthread_mutex_t mutex;
  /* for a sleeping lane: the jobs that each other lane must have ended; NULL: it is awake */
  const int32_t* needs[SLUICE_NUM_LANES];
  cpu_lane_t lanes[SLUICE_NUM_LANES];
  int32_t capacity; /* jobs of a pass */
  int32_t stopping;
  int32_t counting;          /* base.counts_waits of this pass; lanes read it with the mutex held */
  sluice_lane_waits_t waits; /* guarded by the mutex; copied to base.waits after join */
  sluice_error_info_t error;
} cpu_device_t;

/* The wait of a lane for the next pass, or for the end, which no job ends. */
static const int32_t next_pass[SLUICE_NUM_LANES] = {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX};

static cpu_device_t* cast(sluice_device_t* device) { return (cpu_device_t*)device; }

/* ---- sleeping and waking ---- */

static int have_ended(cpu_device_t* device, const int32_t* needs) {
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) {
    if (atomic_load(&device->done[i]) < needs[i]) return 0;
  }
  return 1;
}

static int is_counted(const cpu_lane_t* lane) { return lane->device->counting && lane->index == SLUICE_LANE_COMPUTE; }

static void post(cpu_lane_t* lane, unsigned sleepers) {
  for (unsigned i = 0; sleepers >> i != 0; ++i) {
    if (sleepers >> i & 1) sem_post(&lane->device->lanes[i].woken);
  }
}

/* Releases the mutex first, since the woken lanes need it at once. The time that the calling thread spends on waking
 * others is counted with its time of being woken. */
static void unlock_and_wake(cpu_lane_t* lane) {
  cpu_device_t* device = lane->device;
  unsigned sleepers = lane->ended_wait;
  int counts = sleepers != 0 && is_counted(lane);
  lane->ended_wait = 0;
  pthread_mutex_unlock(&device->mutex);
  uint64_t begin_cpu_ns = counts ? sluice_thread_cpu_ns() : 0;
  post(lane, sleepers);
  if (!counts) return;
  lane->posts_cpu_ns += sluice_thread_cpu_ns() - begin_cpu_ns;
  ++lane->num_posts;
}

/* Call with the mutex held, as the next two. */
static void begin_wait(const cpu_lane_t* lane, const int32_t* needs) {
  cpu_device_t* device = lane->device;
  device->needs[lane->index] = needs;
  if (needs != next_pass) atomic_fetch_or(&device->sleepers, 1u << lane->index);
}

static void end_wait(cpu_device_t* device, int32_t sleeper) {
  device->needs[sleeper] = NULL;
  atomic_fetch_and(&device->sleepers, ~(1u << sleeper));
}

static void end_waits(cpu_lane_t* by) {
  cpu_device_t* device = by->device;
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) {
    if (device->needs[i] == NULL || !have_ended(device, device->needs[i])) continue;
    end_wait(device, i);
    by->ended_wait |= 1u << i;
  }
}

/* Publishes progress: after a job that another lane waits for, and after the last job. */
static void tell(cpu_lane_t* lane, int32_t nth) {
  cpu_device_t* device = lane->device;
  atomic_store(&device->done[lane->index], nth);
  if (atomic_load(&device->sleepers) == 0) return;
  pthread_mutex_lock(&device->mutex);
  end_waits(lane);
  unlock_and_wake(lane);
}

/* Exactly one lane posts at the end of the wait; a signal handler may interrupt it. */
static void sleep_until_woken(cpu_lane_t* lane) {
  while (sem_wait(&lane->woken) != 0 && errno == EINTR) {
  }
}

/* Call with the mutex held; it is released during the wait. A lane may sleep from one pass into the next: it is woken
 * there, and is counted if both passes count. */
static void sleep_for(cpu_lane_t* lane, const int32_t* needs) {
  cpu_device_t* device = lane->device;
  int counts = device->counting;
  begin_wait(lane, needs);
  if (have_ended(device, needs)) { /* since the last check */
    end_wait(device, lane->index);
    return;
  }
  pthread_mutex_unlock(&device->mutex);
  uint64_t begin_ns = counts ? sluice_now_ns() : 0, begin_cpu_ns = counts ? sluice_thread_cpu_ns() : 0;
  sleep_until_woken(lane);
  uint64_t cpu_ns = counts ? sluice_thread_cpu_ns() - begin_cpu_ns : 0, ns = counts ? sluice_now_ns() - begin_ns : 0;
  pthread_mutex_lock(&device->mutex);
  if (!counts || !device->counting) return;
  ++device->waits.num_wakes;
  device->waits.cpu_ns += cpu_ns;
  if (lane->index != SLUICE_LANE_COMPUTE) return;
  ++device->waits.num_caller_wakes;
  device->waits.caller_ns += ns;
  device->waits.caller_cpu_ns += cpu_ns;
}

static void await(cpu_lane_t* lane, const int32_t* needs) {
  if (have_ended(lane->device, needs)) return;
  pthread_mutex_lock(&lane->device->mutex);
  sleep_for(lane, needs);
  pthread_mutex_unlock(&lane->device->mutex);
}

/* ---- running ---- */

static void note_failure(cpu_device_t* device, const cpu_job_t* job) {
  pthread_mutex_lock(&device->mutex);
  if (!atomic_load(&device->failed)) sluice_error_capture(&device->error);
  atomic_store(&device->failed, 1);
  if (job->run_on_failure) atomic_store(&device->dead, 1);
  pthread_mutex_unlock(&device->mutex);
}

static int is_skipped(cpu_device_t* device, const cpu_job_t* job) {
  if (!atomic_load_explicit(&device->failed, memory_order_relaxed)) return 0;
  return !job->run_on_failure || atomic_load_explicit(&device->dead, memory_order_relaxed);
}

/* Runs the jobs from `index` to the lane's last one. Once the last is published, the next pass may begin and overwrite
 * the jobs. */
static void run_jobs(cpu_lane_t* lane, int32_t index) {
  cpu_device_t* device = lane->device;
  while (index != NO_JOB) {
    const cpu_job_t* job = &device->jobs[index];
    if (job->waits) await(lane, job->needs);
    if (!is_skipped(device, job) && device->fn(device->user, index, NULL) != SLUICE_OK) note_failure(device, job);
    index = job->next;
    if (job->is_awaited || index == NO_JOB) tell(lane, job->nth);
  }
}

static void* lane_main(void* argument) {
  cpu_lane_t* lane = argument;
  cpu_device_t* device = lane->device;
  sluice_threads_forgo(); /* the cores belong to the threads of the compute lane */
  pthread_mutex_lock(&device->mutex);
  while (!device->stopping) {
    if (lane->loose == NO_JOB) {
      sleep_for(lane, next_pass);
      continue;
    }
    int32_t first = lane->loose;
    lane->loose = NO_JOB;
    pthread_mutex_unlock(&device->mutex);
    run_jobs(lane, first);
    pthread_mutex_lock(&device->mutex);
  }
  pthread_mutex_unlock(&device->mutex);
  return NULL;
}

/* The host's signal handlers run on the host's threads, never on a lane. */
static sluice_status_t start_lane(cpu_lane_t* lane) {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  int error = pthread_create(&lane->thread, NULL, lane_main, lane);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (error != 0)
    return SLUICE_FAIL(SLUICE_E_NO_MEMORY, "cpu device: cannot start the thread of lane %d: %s", lane->index,
                       strerror(error));
  lane->started = 1;
  return SLUICE_OK;
}

static void free_jobs(cpu_device_t* device) {
  sluice_free(device->base.allocator, device->jobs, (uint64_t)device->capacity * sizeof(cpu_job_t));
  device->jobs = NULL;
  device->capacity = 0;
}

static sluice_status_t reserve(cpu_device_t* device, int32_t num_events) {
  if (num_events <= device->capacity) return SLUICE_OK;
  free_jobs(device);
  device->jobs = sluice_alloc(device->base.allocator, (uint64_t)num_events * sizeof(cpu_job_t), "jobs of a pass");
  if (device->jobs == NULL) return sluice_alloc_status();
  device->capacity = num_events;
  return SLUICE_OK;
}

static uint64_t cpu_events_bytes(const sluice_device_t* base, int32_t num_events) {
  const cpu_device_t* device = (const cpu_device_t*)(const void*)base;
  if (num_events < 0) num_events = device->capacity;
  return num_events == 0 ? 0 : sluice_align_up((uint64_t)num_events * sizeof(cpu_job_t));
}

static sluice_status_t cpu_reserve(sluice_device_t* base, int32_t num_events) {
  return reserve(cast(base), num_events);
}

static sluice_status_t cpu_begin(sluice_device_t* base, int32_t num_events, sluice_job_fn_t fn, void* user,
                                 sluice_stream_t stream) {
  cpu_device_t* device = cast(base);
  (void)stream;
  pthread_mutex_lock(&device->mutex);
  sluice_status_t status = reserve(device, num_events);
  if (status == SLUICE_OK) {
    for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) {
      cpu_lane_t* lane = &device->lanes[i];
      lane->first = lane->last = NO_JOB;
      lane->submitted = 0;
      lane->num_posts = lane->posts_cpu_ns = 0;
      atomic_store(&device->done[i], 0);
    }
    device->fn = fn;
    device->user = user;
    atomic_store(&device->failed, 0);
    atomic_store(&device->dead, 0);
    device->counting = base->counts_waits;
    device->waits = (sluice_lane_waits_t){0};
  }
  pthread_mutex_unlock(&device->mutex);
  return status;
}

static void set_needs(const cpu_device_t* device, const sluice_job_t* job, cpu_job_t* own) {
  for (int32_t i = 0; i < job->num_waits; ++i) {
    cpu_job_t* awaited = &device->jobs[job->waits[i]];
    if (awaited->lane == own->lane) continue; /* ordered by the lane */
    awaited->is_awaited = own->waits = 1;
    if (own->needs[awaited->lane] < awaited->nth) own->needs[awaited->lane] = awaited->nth;
  }
}

/* No lane reads jobs before join, so no lock is needed. */
static sluice_status_t cpu_submit(sluice_device_t* base, const sluice_job_t* job) {
  cpu_device_t* device = cast(base);
  cpu_lane_t* lane = &device->lanes[job->lane];
  cpu_job_t* own = &device->jobs[job->index];
  *own = (cpu_job_t){.lane = (int8_t)job->lane, .next = NO_JOB, .run_on_failure = job->run_on_failure != 0};
  if (job->lane != SLUICE_LANE_COMPUTE && !lane->started) {
    sluice_status_t status = start_lane(lane);
    if (status != SLUICE_OK) {
      sluice_error_capture(&device->error);
      atomic_store(&device->failed, 1);
      atomic_store(&device->dead, 1);
      return status;
    }
  }
  set_needs(device, job, own);
  own->nth = ++lane->submitted;
  if (lane->last == NO_JOB) {
    lane->first = job->index;
  } else {
    device->jobs[lane->last].next = job->index;
  }
  lane->last = job->index;
  return SLUICE_OK;
}

/* A lane whose first job waits for other lanes keeps sleeping until those have ended the jobs it waits for. A lane that
 * is still going to sleep after the previous pass checks `loose` first. */
static void let_loose(cpu_lane_t* lane, cpu_lane_t* caller) {
  cpu_device_t* device = lane->device;
  if (lane == caller || lane->first == NO_JOB) return;
  lane->loose = lane->first;
  if (device->needs[lane->index] == NULL) return;
  begin_wait(lane, device->jobs[lane->first].needs);
  if (!have_ended(device, device->needs[lane->index])) return;
  end_wait(device, lane->index);
  caller->ended_wait |= 1u << lane->index;
}

static sluice_status_t cpu_join(sluice_device_t* base) {
  cpu_device_t* device = cast(base);
  cpu_lane_t* caller = &device->lanes[SLUICE_LANE_COMPUTE];
  int32_t all[SLUICE_NUM_LANES];
  pthread_mutex_lock(&device->mutex);
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) {
    all[i] = device->lanes[i].submitted;
    let_loose(&device->lanes[i], caller);
  }
  unlock_and_wake(caller);
  run_jobs(caller, caller->first);
  await(caller, all);
  pthread_mutex_lock(&device->mutex);
  base->waits = device->waits;
  pthread_mutex_unlock(&device->mutex);
  base->waits.num_caller_posts = caller->num_posts;
  base->waits.caller_cpu_ns += caller->posts_cpu_ns;
  base->waits.cpu_ns += caller->posts_cpu_ns;
  return atomic_load(&device->failed) ? sluice_error_adopt(&device->error) : SLUICE_OK;
}

static void cpu_destroy(sluice_device_t* base) {
  cpu_device_t* device = cast(base);
  cpu_lane_t* caller = &device->lanes[SLUICE_LANE_COMPUTE];
  pthread_mutex_lock(&device->mutex);
  device->stopping = 1;
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) {
    if (device->needs[i] == NULL) continue;
    end_wait(device, i);
    caller->ended_wait |= 1u << i;
  }
  unlock_and_wake(caller);
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) {
    if (device->lanes[i].started) pthread_join(device->lanes[i].thread, NULL);
  }
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) sem_destroy(&device->lanes[i].woken);
  free_jobs(device);
  pthread_mutex_destroy(&device->mutex);
  sluice_free(device->base.allocator, device, sizeof *device);
}

static const sluice_device_vtable_t cpu_vtable = {
    .destroy = cpu_destroy,
    .begin = cpu_begin,
    .submit = cpu_submit,
    .join = cpu_join,
    .events_bytes = cpu_events_bytes,
    .reserve = cpu_reserve,
};

sluice_status_t sluice_cpu_device_create(sluice_allocator_t* allocator, sluice_device_t** out_device) {
  *out_device = NULL;
  cpu_device_t* device = sluice_alloc_zeroed(allocator, sizeof *device, "cpu device");
  if (device == NULL) return sluice_alloc_status();
  device->base.vtable = &cpu_vtable;
  device->base.kernels = sluice_cpu_kernels_shared();
  device->base.allocator = allocator;
  device->base.name = "cpu";
  pthread_mutex_init(&device->mutex, NULL);
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) {
    device->lanes[i] = (cpu_lane_t){.device = device, .index = i, .loose = NO_JOB};
    sem_init(&device->lanes[i].woken, 0, 0);
  }
  *out_device = &device->base;
  return SLUICE_OK;
}
