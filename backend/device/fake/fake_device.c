// SPDX-License-Identifier: Apache-2.0
#include "backend/device/fake/fake_device.h"

#include <assert.h>

enum { MAX_EVENTS = 8192 };

typedef struct fake_device_s {
  sluice_device_t base;
  sluice_device_t* inner;
  uint64_t num_begins;
  uint64_t num_submits;
  int32_t num_faults;
  sluice_fake_device_fault_t faults[SLUICE_FAKE_DEVICE_MAX_FAULTS];
  sluice_fake_submit_t submits[SLUICE_FAKE_DEVICE_MAX_SUBMITS];
  /* The running pass. Jobs see everything written before their submission. */
  sluice_job_fn_t fn;
  void* user;
  int32_t status_of[MAX_EVENTS]; /* not OK: the job fails with it */
} fake_device_t;

static fake_device_t* downcast(sluice_device_t* device) { return (fake_device_t*)device; }

static sluice_status_t planned(const fake_device_t* device, int32_t on, uint64_t nth) {
  for (int32_t i = 0; i < device->num_faults; ++i) {
    if (device->faults[i].on == on && device->faults[i].nth == nth) return device->faults[i].status;
  }
  return SLUICE_OK;
}

static sluice_status_t run_job(void* user, int32_t index, sluice_stream_t stream) {
  fake_device_t* device = user;
  if (device->status_of[index] != SLUICE_OK) {
    return SLUICE_FAIL(device->status_of[index], "fake device: job %d failed on command", index);
  }
  return device->fn(device->user, index, stream);
}

static sluice_status_t fake_begin(sluice_device_t* base, int32_t num_events, sluice_job_fn_t fn, void* user,
                                  sluice_stream_t stream) {
  fake_device_t* device = downcast(base);
  uint64_t number = device->num_begins++;
  sluice_status_t status = planned(device, SLUICE_FAKE_DEVICE_BEGIN, number);
  if (status != SLUICE_OK) {
    return SLUICE_FAIL(status, "fake device: begin %llu failed on command", (unsigned long long)number);
  }
  assert(num_events <= MAX_EVENTS);
  device->fn = fn;
  device->user = user;
  return device->inner->vtable->begin(device->inner, num_events, run_job, device, stream);
}

static sluice_status_t fake_submit(sluice_device_t* base, const sluice_job_t* job) {
  fake_device_t* device = downcast(base);
  uint64_t number = device->num_submits++;
  if (number < SLUICE_FAKE_DEVICE_MAX_SUBMITS) {
    device->submits[number] =
        (sluice_fake_submit_t){device->num_begins - 1, job->index, job->lane, job->num_waits, job->run_on_failure};
  }
  sluice_status_t status = planned(device, SLUICE_FAKE_DEVICE_SUBMIT, number);
  if (status != SLUICE_OK) {
    return SLUICE_FAIL(status, "fake device: submit %llu failed on command", (unsigned long long)number);
  }
  device->status_of[job->index] = planned(device, SLUICE_FAKE_DEVICE_JOB, number);
  return device->inner->vtable->submit(device->inner, job);
}

static sluice_status_t fake_join(sluice_device_t* base) {
  fake_device_t* device = downcast(base);
  return device->inner->vtable->join(device->inner);
}

static void fake_destroy(sluice_device_t* base) {
  fake_device_t* device = downcast(base);
  device->inner->vtable->destroy(device->inner);
  sluice_free(base->allocator, device, sizeof *device);
}

static const sluice_device_vtable_t fake_vtable = {
    .destroy = fake_destroy,
    .begin = fake_begin,
    .submit = fake_submit,
    .join = fake_join,
};

sluice_status_t sluice_fake_device_create(sluice_device_t* inner, sluice_device_t** out_device) {
  *out_device = NULL;
  fake_device_t* device = sluice_alloc_zeroed(inner->allocator, sizeof *device, "fake device");
  if (device == NULL) return sluice_alloc_status();
  device->base = (sluice_device_t){
      .vtable = &fake_vtable, .kernels = inner->kernels, .allocator = inner->allocator, .name = "fake"};
  device->inner = inner;
  *out_device = &device->base;
  return SLUICE_OK;
}

void sluice_fake_device_inject(sluice_device_t* base, const sluice_fake_device_fault_t* fault) {
  fake_device_t* device = downcast(base);
  assert(device->num_faults < SLUICE_FAKE_DEVICE_MAX_FAULTS);
  device->faults[device->num_faults++] = *fault;
}

uint64_t sluice_fake_device_submits(const sluice_device_t* base, const sluice_fake_submit_t** out_submits) {
  const fake_device_t* device = (const fake_device_t*)base;
  *out_submits = device->submits;
  return device->num_submits;
}
