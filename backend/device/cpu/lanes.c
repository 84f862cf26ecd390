/* The CPU device: the compute lane is the calling thread (its OpenMP pool, its affinity); every other lane is one
 * thread, made on first use. Jobs and events of one pass lie in plain arrays; one mutex and one condition variable per
 * pass are enough, since a pass has tens of jobs of milliseconds. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/lanes.h"
#include "backend/device/device.h"

typedef struct cpu_lane_s {
  struct cpu_device_s* device;
  pthread_t thread;
  int32_t index;
  int32_t started;
  int32_t head; /* next job to run */
  int32_t tail; /* jobs submitted */
  sluice_job_t* jobs;
} cpu_lane_t;

typedef struct cpu_device_s {
  sluice_device_t base;
  pthread_mutex_t mutex;
  pthread_cond_t changed; /* a job was submitted, an event fired, or the device stops */
  cpu_lane_t lanes[SLUICE_NUM_LANES];
  int32_t capacity; /* jobs per lane, and events */
  unsigned char* fired;
  sluice_job_fn_t fn;
  void* user;
  int32_t failed; /* only run_on_failure jobs run */
  int32_t dead;   /* nothing runs */
  int32_t stopping;
  int32_t counting;          /* base.counts_waits of this pass; lanes read it under the mutex */
  sluice_lane_waits_t waits; /* under the mutex; base.waits has them after join */
  sluice_error_info_t error;
} cpu_device_t;

static cpu_device_t* cast(sluice_device_t* device) { return (cpu_device_t*)device; }

static int all_fired(const cpu_device_t* device, const sluice_job_t* job) {
  for (int32_t i = 0; i < job->num_waits; ++i) {
    if (!device->fired[job->waits[i]]) return 0;
  }
  return 1;
}

/* Sleeps until something changes, with the mutex held. A lane may sleep from one pass into the next: it is woken
 * there, and counts where both are counted. */
static void await_change(cpu_device_t* device, int32_t lane) {
  if (!device->counting) {
    pthread_cond_wait(&device->changed, &device->mutex);
    return;
  }
  uint64_t begin_ns = sluice_now_ns(), begin_cpu_ns = sluice_thread_cpu_ns();
  pthread_cond_wait(&device->changed, &device->mutex);
  if (!device->counting) return;
  uint64_t cpu_ns = sluice_thread_cpu_ns() - begin_cpu_ns;
  ++device->waits.num_wakes;
  device->waits.cpu_ns += cpu_ns;
  if (lane != SLUICE_LANE_COMPUTE) return;
  device->waits.caller_ns += sluice_now_ns() - begin_ns;
  device->waits.caller_cpu_ns += cpu_ns;
}

/* Called with the mutex held; runs the job without it. */
static void run_job(cpu_device_t* device, const sluice_job_t* job) {
  while (!all_fired(device, job)) await_change(device, job->lane);
  int skip = device->dead || (device->failed && !job->run_on_failure);
  if (!skip) {
    pthread_mutex_unlock(&device->mutex);
    sluice_status_t status = device->fn(device->user, job->index, NULL);
    pthread_mutex_lock(&device->mutex);
    if (status != SLUICE_OK) {
      if (!device->failed) sluice_error_capture(&device->error);
      device->failed = 1;
      if (job->run_on_failure) device->dead = 1;
    }
  }
  device->fired[job->index] = 1;
  pthread_cond_broadcast(&device->changed);
}

static void* lane_main(void* argument) {
  cpu_lane_t* lane = argument;
  cpu_device_t* device = lane->device;
  pthread_mutex_lock(&device->mutex);
  for (;;) {
    while (lane->head == lane->tail && !device->stopping) await_change(device, lane->index);
    if (lane->head == lane->tail) break;
    sluice_job_t job = lane->jobs[lane->head];
    run_job(device, &job);
    ++lane->head;
    pthread_cond_broadcast(&device->changed);
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
    return SLUICE_FAIL(SLUICE_E_NO_MEMORY, "cpu device: no thread for lane %d: %s", lane->index, strerror(error));
  lane->started = 1;
  return SLUICE_OK;
}

static void free_arrays(cpu_device_t* device) {
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) {
    sluice_free(device->base.allocator, device->lanes[i].jobs, (uint64_t)device->capacity * sizeof(sluice_job_t));
    device->lanes[i].jobs = NULL;
  }
  sluice_free(device->base.allocator, device->fired, (uint64_t)device->capacity);
  device->fired = NULL;
  device->capacity = 0;
}

static sluice_status_t reserve(cpu_device_t* device, int32_t num_events) {
  if (num_events <= device->capacity) return SLUICE_OK;
  free_arrays(device);
  device->capacity = num_events;
  device->fired = sluice_alloc(device->base.allocator, (uint64_t)num_events, "events of a pass");
  int failed = device->fired == NULL;
  for (int32_t i = 0; i < SLUICE_NUM_LANES && !failed; ++i) {
    device->lanes[i].jobs =
        sluice_alloc(device->base.allocator, (uint64_t)num_events * sizeof(sluice_job_t), "jobs of a lane");
    failed = device->lanes[i].jobs == NULL;
  }
  if (!failed) return SLUICE_OK;
  free_arrays(device);
  return SLUICE_E_NO_MEMORY;
}

static uint64_t cpu_events_bytes(const sluice_device_t* base, int32_t num_events) {
  const cpu_device_t* device = (const cpu_device_t*)(const void*)base;
  if (num_events < 0) num_events = device->capacity;
  if (num_events == 0) return 0;
  return sluice_align_up((uint64_t)num_events) +
         SLUICE_NUM_LANES * sluice_align_up((uint64_t)num_events * sizeof(sluice_job_t));
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
    for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) device->lanes[i].head = device->lanes[i].tail = 0;
    if (num_events > 0) memset(device->fired, 0, (size_t)num_events);
    device->fn = fn;
    device->user = user;
    device->failed = device->dead = 0;
    device->counting = base->counts_waits;
    device->waits = (sluice_lane_waits_t){0};
  }
  pthread_mutex_unlock(&device->mutex);
  return status;
}

static sluice_status_t cpu_submit(sluice_device_t* base, const sluice_job_t* job) {
  cpu_device_t* device = cast(base);
  cpu_lane_t* lane = &device->lanes[job->lane];
  sluice_status_t status = SLUICE_OK;
  pthread_mutex_lock(&device->mutex);
  if (job->lane != SLUICE_LANE_COMPUTE && !lane->started) status = start_lane(lane);
  if (status != SLUICE_OK) {
    sluice_error_capture(&device->error);
    device->failed = device->dead = 1;
    device->fired[job->index] = 1;
  } else {
    lane->jobs[lane->tail++] = *job;
  }
  pthread_cond_broadcast(&device->changed);
  pthread_mutex_unlock(&device->mutex);
  return status;
}

static sluice_status_t cpu_join(sluice_device_t* base) {
  cpu_device_t* device = cast(base);
  cpu_lane_t* compute = &device->lanes[SLUICE_LANE_COMPUTE];
  pthread_mutex_lock(&device->mutex);
  for (; compute->head < compute->tail; ++compute->head) run_job(device, &compute->jobs[compute->head]);
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) {
    while (device->lanes[i].head < device->lanes[i].tail) await_change(device, SLUICE_LANE_COMPUTE);
  }
  int failed = device->failed;
  base->waits = device->waits;
  pthread_mutex_unlock(&device->mutex);
  return failed ? sluice_error_adopt(&device->error) : SLUICE_OK;
}

static void cpu_destroy(sluice_device_t* base) {
  cpu_device_t* device = cast(base);
  pthread_mutex_lock(&device->mutex);
  device->stopping = 1;
  pthread_cond_broadcast(&device->changed);
  pthread_mutex_unlock(&device->mutex);
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) {
    if (device->lanes[i].started) pthread_join(device->lanes[i].thread, NULL);
  }
  free_arrays(device);
  pthread_cond_destroy(&device->changed);
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
  pthread_cond_init(&device->changed, NULL);
  for (int32_t i = 0; i < SLUICE_NUM_LANES; ++i) device->lanes[i] = (cpu_lane_t){.device = device, .index = i};
  *out_device = &device->base;
  return SLUICE_OK;
}
