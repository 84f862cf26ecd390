/* The CPU device: the compute lane is the calling thread (its OpenMP pool, its affinity); every other lane is one
 * thread, made on first use. A pass is submitted without a lock and let loose as a whole by join. One mutex guards how
 * far the lanes are; a sleeping lane says which jobs it waits for, and is woken once, by the lane that ends the last of
 * them: each wake-up is a system call, and a switch of threads on a busy core. */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/lanes.h"
#include "backend/device/device.h"

/* Lanes run their jobs in order, so that "event i has fired" is "lane l has ended its nth job": what a job waits for on
 * a lane is one number. */
typedef struct cpu_job_s {
  int32_t lane;
  int32_t nth;                     /* of its lane, from 1 */
  int32_t next;                    /* job of the same lane; NO_JOB behind the last */
  int32_t needs[SLUICE_NUM_LANES]; /* jobs that each lane must have ended */
  int32_t run_on_failure;
} cpu_job_t;

#define NO_JOB (-1)

typedef struct cpu_lane_s {
  struct cpu_device_s* device;
  pthread_t thread;
  sem_t woken;
  int32_t index;
  int32_t started;
  /* of the calling thread, until join lets the lanes loose */
  int32_t first, last; /* its jobs of this pass; NO_JOB: none */
  int32_t submitted;
  /* of the lane's own thread while it runs */
  int32_t next;        /* job to run */
  unsigned ended_wait; /* lanes whose wait it has ended, by bits: to be woken once the mutex is free */
  int32_t released;    /* jobs that it may run; under the mutex */
} cpu_lane_t;

typedef struct cpu_device_s {
  sluice_device_t base;
  pthread_mutex_t mutex;
  /* What every job looks at, together: behind a product nothing else of it is in the caches. Under the mutex. */
  int32_t done[SLUICE_NUM_LANES];         /* jobs that have ended */
  const int32_t* needs[SLUICE_NUM_LANES]; /* while a lane sleeps: jobs that each must have ended; NULL: it is awake */
  int32_t failed;                         /* only run_on_failure jobs run */
  int32_t dead;                           /* nothing runs */
  cpu_lane_t lanes[SLUICE_NUM_LANES];
  int32_t capacity; /* jobs of a pass */
  cpu_job_t* jobs;  /* by op */
  sluice_job_fn_t fn;
  void* user;
  int32_t stopping;
  int32_t counting;          /* base.counts_waits of this pass; lanes read it under the mutex */
  sluice_lane_waits_t waits; /* under the mutex; base.waits has them after join */
  sluice_error_info_t error;
} cpu_device_t;

/* No job ends this wait: that of a lane for the next pass, or for the end. */
static const int32_t next_pass[SLUICE_NUM_LANES] = {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX};

static cpu_device_t* cast(sluice_device_t* device) { return (cpu_device_t*)device; }

/* ---- sleeping and waking; with the mutex held ---- */

static int have_ended(const cpu_device_t* device, const int32_t* needs) {
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) {
    if (device->done[i] < needs[i]) return 0;
  }
  return 1;
}

static void end_wait(cpu_lane_t* by, int32_t sleeper) {
  by->device->needs[sleeper] = NULL;
  by->ended_wait |= 1u << sleeper;
}

/* Gives the mutex up first: the woken want it at once. */
static void unlock_and_wake(cpu_lane_t* lane) {
  cpu_device_t* device = lane->device;
  unsigned sleepers = lane->ended_wait;
  lane->ended_wait = 0;
  pthread_mutex_unlock(&device->mutex);
  for (unsigned i = 0; sleepers >> i != 0; ++i) {
    if (sleepers >> i & 1) sem_post(&device->lanes[i].woken);
  }
}

/* Whoever ends the wait posts once, so that none wakes in vain; a signal's handler may run in between. */
static void sleep_until_woken(cpu_lane_t* lane) {
  while (sem_wait(&lane->woken) != 0 && errno == EINTR) {
  }
}

/* Gives the mutex up meanwhile. A lane may sleep from one pass into the next: it is woken there, and counts where both
 * are counted. */
static void await(cpu_lane_t* lane, const int32_t* needs) {
  cpu_device_t* device = lane->device;
  int counts = device->counting;
  device->needs[lane->index] = needs;
  unlock_and_wake(lane);
  if (!counts) {
    sleep_until_woken(lane);
    pthread_mutex_lock(&device->mutex);
    return;
  }
  uint64_t begin_ns = sluice_now_ns(), begin_cpu_ns = sluice_thread_cpu_ns();
  sleep_until_woken(lane);
  uint64_t cpu_ns = sluice_thread_cpu_ns() - begin_cpu_ns, ns = sluice_now_ns() - begin_ns;
  pthread_mutex_lock(&device->mutex);
  if (!device->counting) return;
  ++device->waits.num_wakes;
  device->waits.cpu_ns += cpu_ns;
  if (lane->index != SLUICE_LANE_COMPUTE) return;
  ++device->waits.num_caller_wakes;
  device->waits.caller_ns += ns;
  device->waits.caller_cpu_ns += cpu_ns;
}

/* ---- running ---- */

/* Called with the mutex held; runs the job without it. */
static void run_job(cpu_lane_t* lane, int32_t index) {
  cpu_device_t* device = lane->device;
  const cpu_job_t* job = &device->jobs[index];
  int skip = device->dead || (device->failed && !job->run_on_failure);
  if (!skip) {
    unlock_and_wake(lane);
    sluice_status_t status = device->fn(device->user, index, NULL);
    pthread_mutex_lock(&device->mutex);
    if (status != SLUICE_OK) {
      if (!device->failed) sluice_error_capture(&device->error);
      device->failed = 1;
      if (job->run_on_failure) device->dead = 1;
    }
  }
  lane->next = job->next;
  ++device->done[lane->index];
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) {
    if (device->needs[i] != NULL && have_ended(device, device->needs[i])) end_wait(lane, i);
  }
}

static void run_released(cpu_lane_t* lane) {
  cpu_device_t* device = lane->device;
  while (device->done[lane->index] < lane->released) {
    const int32_t* needs = device->jobs[lane->next].needs;
    if (!have_ended(device, needs)) await(lane, needs);
    run_job(lane, lane->next);
  }
}

static void* lane_main(void* argument) {
  cpu_lane_t* lane = argument;
  cpu_device_t* device = lane->device;
  pthread_mutex_lock(&device->mutex);
  for (;;) {
    run_released(lane);
    if (device->stopping) break;
    await(lane, next_pass);
  }
  unlock_and_wake(lane);
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
    return SLUICE_FAIL(SLUICE_E_NO_MEMORY, "cpu device: no thread for lane %d: %s", lane->index, strerror(error));
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
      lane->submitted = lane->released = device->done[i] = 0;
    }
    device->fn = fn;
    device->user = user;
    device->failed = device->dead = 0;
    device->counting = base->counts_waits;
    device->waits = (sluice_lane_waits_t){0};
  }
  pthread_mutex_unlock(&device->mutex);
  return status;
}

static void set_needs(const cpu_device_t* device, const sluice_job_t* job, int32_t* needs) {
  for (int32_t i = 0; i < job->num_waits; ++i) {
    const cpu_job_t* awaited = &device->jobs[job->waits[i]];
    if (needs[awaited->lane] < awaited->nth) needs[awaited->lane] = awaited->nth;
  }
}

/* No lane looks at jobs before join: nothing to lock. */
static sluice_status_t cpu_submit(sluice_device_t* base, const sluice_job_t* job) {
  cpu_device_t* device = cast(base);
  cpu_lane_t* lane = &device->lanes[job->lane];
  cpu_job_t* own = &device->jobs[job->index];
  *own = (cpu_job_t){.lane = job->lane, .next = NO_JOB, .run_on_failure = job->run_on_failure};
  if (job->lane != SLUICE_LANE_COMPUTE && !lane->started) {
    sluice_status_t status = start_lane(lane);
    if (status != SLUICE_OK) {
      pthread_mutex_lock(&device->mutex);
      sluice_error_capture(&device->error);
      device->failed = device->dead = 1;
      pthread_mutex_unlock(&device->mutex);
      return status;
    }
  }
  set_needs(device, job, own->needs);
  own->nth = ++lane->submitted;
  if (lane->last == NO_JOB) {
    lane->first = job->index;
  } else {
    device->jobs[lane->last].next = job->index;
  }
  lane->last = job->index;
  return SLUICE_OK;
}

/* A lane whose first job must wait for other lanes sleeps on, until they have come so far. */
static void let_loose(cpu_lane_t* lane, cpu_lane_t* caller) {
  lane->next = lane->first;
  lane->released = lane->submitted;
  cpu_device_t* device = lane->device;
  if (device->needs[lane->index] == NULL || lane->released == 0) return;
  const int32_t* needs = device->jobs[lane->first].needs;
  device->needs[lane->index] = needs;
  if (have_ended(device, needs)) end_wait(caller, lane->index);
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
  run_released(caller);
  if (!have_ended(device, all)) await(caller, all);
  int failed = device->failed;
  base->waits = device->waits;
  unlock_and_wake(caller);
  return failed ? sluice_error_adopt(&device->error) : SLUICE_OK;
}

static void cpu_destroy(sluice_device_t* base) {
  cpu_device_t* device = cast(base);
  cpu_lane_t* caller = &device->lanes[SLUICE_LANE_COMPUTE];
  pthread_mutex_lock(&device->mutex);
  device->stopping = 1;
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) {
    if (device->needs[i] != NULL) end_wait(caller, i);
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
  if (device == NULL) return SLUICE_E_NO_MEMORY;
  device->base.vtable = &cpu_vtable;
  device->base.kernels = sluice_cpu_kernels();
  device->base.allocator = allocator;
  device->base.name = "cpu";
  pthread_mutex_init(&device->mutex, NULL);
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) {
    device->lanes[i] = (cpu_lane_t){.device = device, .index = i};
    sem_init(&device->lanes[i].woken, 0, 0);
  }
  *out_device = &device->base;
  return SLUICE_OK;
}
