// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/buckets/plan.h"

#include "backend/base/lanes.h"
#include "backend/base/math.h"
#include "sluice/context.h"

enum { NOBODY = -1 };

static const int32_t lane_of[SLUICE_BUCKET_NUM_KINDS] = {
    [SLUICE_BUCKET_COPY_IN] = SLUICE_LANE_COPY_IN, [SLUICE_BUCKET_STAGE] = SLUICE_LANE_COMPUTE,
    [SLUICE_BUCKET_LOOK] = SLUICE_LANE_COMPUTE,    [SLUICE_BUCKET_DECIDE] = SLUICE_LANE_COMM,
    [SLUICE_BUCKET_UPDATE] = SLUICE_LANE_COMPUTE,  [SLUICE_BUCKET_COPY_OUT] = SLUICE_LANE_COPY_OUT,
};

/* ---- bytes ---- */

uint64_t sluice_bucket_state_bytes(int64_t bucket, int32_t num_slots) {
  return (uint64_t)num_slots * 3 * sluice_align_up((uint64_t)bucket * sizeof(float));
}

uint64_t sluice_bucket_plan_bytes(const sluice_bucket_plan_t* plan) {
  return sluice_bucket_state_bytes(plan->form.bucket, plan->form.num_slots) +
         (uint64_t)plan->grad_elements * sizeof(float);
}

/* ---- dependencies ---- */

/* The last uses of a slot. A lane runs in order, so its last reader stands for all its earlier readers. */
typedef struct room_s {
  int32_t writer;
  int32_t readers[SLUICE_NUM_LANES];
} room_t;

typedef struct builder_s {
  sluice_bucket_plan_t* plan;
  const int64_t* counts;
  room_t* rooms; /* of each sort in turn, with this `stride` */
  int32_t stride;
  int32_t awaited[SLUICE_NUM_LANES][SLUICE_NUM_LANES]; /* by lane: the last op of each other lane that it waits for */
} builder_t;

/* Adds a wait. A wait for a later op of a lane covers earlier ones, for this op and for the following ops on its
 * lane. */
static void wait_for(builder_t* b, sluice_bucket_op_t* op, int32_t other) {
  const sluice_bucket_op_t* ops = b->plan->ops;
  if (other == NOBODY || ops[other].lane == op->lane || b->awaited[op->lane][ops[other].lane] >= other) return;
  b->awaited[op->lane][ops[other].lane] = other;
  for (int32_t i = 0; i < op->num_waits; ++i) {
    if (ops[op->waits[i]].lane != ops[other].lane) continue;
    op->waits[i] = other;
    return;
  }
  op->waits[op->num_waits++] = other;
}

static void derive_waits(builder_t* b, int32_t index) {
  sluice_bucket_op_t* op = b->plan->ops + index;
  for (int32_t r = 0; r < SLUICE_BUCKET_NUM_ROOMS; ++r) {
    const int32_t slot = sluice_bucket_slot_of(op, r);
    if (slot == SLUICE_BUCKET_NO_SLOT) continue;
    room_t* room = &b->rooms[r * b->stride + slot];
    wait_for(b, op, room->writer);
    if (!(sluice_bucket_accesses[op->kind][r] & SLUICE_BUCKET_WRITES)) {
      room->readers[op->lane] = index;
      continue;
    }
    for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
      wait_for(b, op, room->readers[lane]);
      room->readers[lane] = NOBODY;
    }
    room->writer = index;
  }
}

/* ---- ops in program order ---- */

static void add(builder_t* b, sluice_bucket_op_t op) {
  const sluice_bucket_form_t* form = &b->plan->form;
  const int32_t index = b->plan->num_ops++;
  op.lane = op.kind == SLUICE_BUCKET_STAGE && form->sums ? SLUICE_LANE_COMM : lane_of[op.kind];
  b->plan->ops[index] = op;
  derive_waits(b, index);
}

/* Returns an op for one bucket or chunk, without its kind. */
static sluice_bucket_op_t part(const builder_t* b, int32_t line, int64_t line_first, int32_t line_bucket, int64_t at,
                               int64_t size) {
  const sluice_bucket_form_t* form = &b->plan->form;
  const int64_t begin = at * form->bucket, end = sluice_min((at + size) * form->bucket, b->counts[line]);
  return (sluice_bucket_op_t){
      .line = line,
      .bucket = line_bucket + (int32_t)at,
      .num_buckets = (int32_t)(sluice_ceil_div(end, form->bucket) - at),
      .state_slot = SLUICE_BUCKET_NO_SLOT,
      .grad_slot = SLUICE_BUCKET_NO_SLOT,
      .first = line_first + begin,
      .count = end - begin,
  };
}

static void set_grads(const builder_t* b, sluice_bucket_op_t* op, const sluice_bucket_op_t* chunk, int32_t number) {
  const sluice_bucket_plan_t* plan = b->plan;
  if (plan->num_grad_slots == 0) return;
  op->grad_slot = number % plan->num_grad_slots;
  /* If each chunk has a slot, gradients are stored in the order of elements, because pieces that are scanned may cross
   * the ends of chunks. */
  op->grad_at = plan->form.decides
                    ? op->first
                    : op->grad_slot * (plan->grad_elements / plan->num_grad_slots) + op->first - chunk->first;
}

static void add_chunk_head(builder_t* b, sluice_bucket_op_t chunk) {
  if (b->plan->num_grad_slots == 0) return;
  chunk.kind = SLUICE_BUCKET_STAGE;
  add(b, chunk);
  if (!b->plan->form.decides) return;
  chunk.kind = SLUICE_BUCKET_LOOK;
  add(b, chunk);
}

static void add_bucket(builder_t* b, sluice_bucket_op_t op) {
  if (b->plan->form.num_slots > 0) {
    op.state_slot = op.bucket % b->plan->form.num_slots;
    op.kind = SLUICE_BUCKET_COPY_IN;
    add(b, op);
  }
  op.kind = SLUICE_BUCKET_UPDATE;
  add(b, op);
  if (b->plan->form.num_slots == 0) return;
  op.kind = SLUICE_BUCKET_COPY_OUT;
  add(b, op);
}

enum { HEADS = 1, BUCKETS = 2 };

/* Adds the chunks of all lines: staging, updates, or both in turns. */
static void add_chunks(builder_t* b, int which) {
  const sluice_bucket_form_t* form = &b->plan->form;
  int64_t line_first = 0;
  int32_t line_bucket = 0, number = 0;
  for (int32_t line = 0; line < form->num_lines; ++line) {
    const int64_t buckets = sluice_ceil_div(b->counts[line], form->bucket);
    for (int64_t at = 0; at < buckets; at += sluice_min(form->chunk, buckets - at), ++number) {
      sluice_bucket_op_t chunk = part(b, line, line_first, line_bucket, at, sluice_min(form->chunk, buckets - at));
      set_grads(b, &chunk, &chunk, number);
      if (which & HEADS) add_chunk_head(b, chunk);
      for (int64_t i = 0; (which & BUCKETS) && i < chunk.num_buckets; ++i) {
        sluice_bucket_op_t bucket = part(b, line, line_first, line_bucket, at + i, 1);
        set_grads(b, &bucket, &chunk, number);
        add_bucket(b, bucket);
      }
    }
    line_first += b->counts[line];
    line_bucket += (int32_t)buckets;
  }
}

static void add_all(builder_t* b) {
  if (!b->plan->form.decides) {
    add_chunks(b, HEADS | BUCKETS);
    return;
  }
  add_chunks(b, HEADS);
  add(b, (sluice_bucket_op_t){
             .kind = SLUICE_BUCKET_DECIDE, .state_slot = SLUICE_BUCKET_NO_SLOT, .grad_slot = SLUICE_BUCKET_NO_SLOT});
  add_chunks(b, BUCKETS);
}

/* ---- create and destroy ---- */

static sluice_status_t check_form(const sluice_bucket_form_t* form) {
  SLUICE_TRY(SLUICE_REQUIRE(form->num_slots >= 0 && form->num_slots <= SLUICE_BUCKET_MAX_SLOTS,
                            "optimizer: %d slots for buckets; give 1, or 2 for copies during updates",
                            form->num_slots));
  SLUICE_TRY(SLUICE_REQUIRE(form->num_grad_slots >= 0 && form->num_grad_slots <= SLUICE_BUCKET_MAX_SLOTS,
                            "optimizer: %d slots for gradients; give 1, or 2 for sums during updates",
                            form->num_grad_slots));
  SLUICE_TRY(SLUICE_REQUIRE(form->bucket >= 1 && form->chunk >= 1,
                            "optimizer: buckets of %lld elements in chunks of %lld; both are at least 1",
                            (long long)form->bucket, (long long)form->chunk));
  int64_t elements = 0, buckets = 0;
  for (int32_t i = 0; i < form->num_lines; ++i) {
    SLUICE_TRY(SLUICE_REQUIRE(form->counts[i] >= 0 && form->counts[i] <= (INT64_C(1) << 48) - elements,
                              "optimizer: %lld elements in buckets of %lld", (long long)form->counts[i],
                              (long long)form->bucket));
    elements += form->counts[i];
    buckets += form->counts[i] / form->bucket + (form->counts[i] % form->bucket > 0);
  }
  return SLUICE_REQUIRE(buckets <= INT32_MAX / SLUICE_BUCKET_NUM_KINDS,
                        "optimizer: %lld buckets of %lld elements are too many; use larger buckets", (long long)buckets,
                        (long long)form->bucket);
}

/* Computes the sizes that follow from the form. */
static void measure(sluice_bucket_plan_t* plan, const sluice_bucket_form_t* form) {
  int64_t longest = 0;
  int32_t chunks = 0;
  for (int32_t i = 0; i < form->num_lines; ++i) {
    const int64_t buckets = form->counts[i] / form->bucket + (form->counts[i] % form->bucket > 0);
    plan->count += form->counts[i];
    plan->num_buckets += (int32_t)buckets;
    chunks += (int32_t)(buckets / form->chunk + (buckets % form->chunk > 0));
    longest = sluice_max(longest, buckets);
  }
  plan->form = *form;
  plan->form.counts = NULL;
  /* With a single chunk a second slot would stay empty. */
  plan->num_grad_slots = form->decides ? chunks : sluice_min_i32(form->num_grad_slots, chunks > 0 ? chunks : 1);
  const int64_t slot = sluice_min(form->chunk, sluice_max(longest, 1)) * form->bucket;
  const int64_t aligned = (int64_t)(sluice_align_up((uint64_t)slot * sizeof(float)) / sizeof(float));
  plan->grad_elements = form->decides ? plan->count : aligned * plan->num_grad_slots;
}

static uint64_t bytes_of(const sluice_bucket_plan_t* plan) {
  /* At most two ops per chunk and three per bucket, and the verdict. */
  return sizeof *plan + (5 * (uint64_t)plan->num_buckets + 1) * sizeof *plan->ops;
}

static sluice_status_t fill(sluice_bucket_plan_t* plan, const sluice_bucket_form_t* form,
                            sluice_allocator_t* allocator) {
  builder_t b = {.plan = plan, .counts = form->counts};
  b.stride = (int32_t)sluice_max(SLUICE_BUCKET_MAX_SLOTS, plan->num_grad_slots);
  const int32_t num_rooms = b.stride * SLUICE_BUCKET_NUM_ROOMS;
  const uint64_t bytes = (uint64_t)num_rooms * sizeof *b.rooms;
  b.rooms = sluice_alloc(allocator, bytes, "optimizer: the rooms of a step");
  if (b.rooms == NULL) return sluice_alloc_status();
  for (int32_t i = 0; i < num_rooms; ++i) {
    b.rooms[i].writer = NOBODY;
    for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) b.rooms[i].readers[lane] = NOBODY;
  }
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
    for (int32_t other = 0; other < SLUICE_NUM_LANES; ++other) b.awaited[lane][other] = NOBODY;
  }
  plan->num_ops = 0;
  add_all(&b);
  sluice_free(allocator, b.rooms, bytes);
  return SLUICE_OK;
}

sluice_status_t sluice_bucket_plan_create(const sluice_bucket_form_t* form, sluice_allocator_t* allocator,
                                          sluice_bucket_plan_t** out_plan) {
  *out_plan = NULL;
  SLUICE_TRY(check_form(form));
  sluice_bucket_plan_t measured = {.count = 0};
  measure(&measured, form);
  sluice_bucket_plan_t* plan = sluice_alloc(allocator, bytes_of(&measured), "optimizer: the ops of a step");
  if (plan == NULL) return sluice_alloc_status();
  *plan = measured;
  plan->ops = (sluice_bucket_op_t*)(plan + 1);
  const sluice_status_t status = fill(plan, form, allocator);
  if (status != SLUICE_OK) {
    sluice_bucket_plan_destroy(plan, allocator);
    return status;
  }
  *out_plan = plan;
  return SLUICE_OK;
}

void sluice_bucket_plan_destroy(sluice_bucket_plan_t* plan, sluice_allocator_t* allocator) {
  if (plan != NULL) sluice_free(allocator, plan, bytes_of(plan));
}

/* ---- the duration of a plan ---- */

const int64_t sluice_bucket_chunks[SLUICE_BUCKET_NUM_CHUNKS] = {1, 2, 4, SLUICE_BUCKET_ALL};

static double later(double a, double b) { return a > b ? a : b; }

sluice_status_t sluice_bucket_simulate(const sluice_bucket_plan_t* plan, const sluice_bucket_prices_t* prices,
                                       sluice_allocator_t* allocator, double* out_seconds) {
  *out_seconds = 0.0;
  const uint64_t bytes = (uint64_t)plan->num_ops * sizeof(double);
  double* ends = sluice_alloc(allocator, bytes, "optimizer: a simulated step");
  if (ends == NULL) return sluice_alloc_status();
  double lanes[SLUICE_NUM_LANES] = {0.0};
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    const sluice_bucket_op_t* op = plan->ops + i;
    double at = lanes[op->lane];
    for (int32_t w = 0; w < op->num_waits; ++w) at = later(at, ends[op->waits[w]]);
    ends[i] = at + prices->seconds[op->kind] + prices->seconds_per_element[op->kind] * (double)op->count;
    lanes[op->lane] = ends[i];
    *out_seconds = later(*out_seconds, ends[i]);
  }
  sluice_free(allocator, ends, bytes);
  return SLUICE_OK;
}

static sluice_status_t seconds_with(const sluice_bucket_form_t* form, int64_t chunk,
                                    const sluice_bucket_prices_t* prices, sluice_allocator_t* allocator,
                                    double* out_seconds) {
  sluice_bucket_form_t with = *form;
  with.chunk = chunk;
  sluice_bucket_plan_t* plan;
  SLUICE_TRY(sluice_bucket_plan_create(&with, allocator, &plan));
  const sluice_status_t status = sluice_bucket_simulate(plan, prices, allocator, out_seconds);
  sluice_bucket_plan_destroy(plan, allocator);
  return status;
}

int64_t sluice_bucket_best_chunk(const sluice_bucket_form_t* form, const sluice_bucket_prices_t* prices,
                                 sluice_allocator_t* allocator, int64_t otherwise) {
  int64_t best = otherwise;
  double least = 0.0;
  for (int i = 0; i < SLUICE_BUCKET_NUM_CHUNKS; ++i) {
    double seconds;
    if (seconds_with(form, sluice_bucket_chunks[i], prices, allocator, &seconds) != SLUICE_OK) return otherwise;
    if (i > 0 && seconds >= least) continue;
    best = sluice_bucket_chunks[i];
    least = seconds;
  }
  return best;
}

/* ---- running it ---- */

typedef struct run_s {
  const sluice_bucket_plan_t* plan;
  char* memory;
  const sluice_bucket_mode_t* mode;
  void* user;
} run_t;

static sluice_bucket_slot_t slot_at(const run_t* run, int32_t slot) {
  if (slot < 0) return (sluice_bucket_slot_t){NULL, NULL, NULL};
  const uint64_t states = sluice_bucket_state_bytes(run->plan->form.bucket, 1), array = states / 3;
  char* at = run->memory + (uint64_t)slot * states;
  return (sluice_bucket_slot_t){(float*)(void*)at, (float*)(void*)(at + array), (float*)(void*)(at + 2 * array)};
}

static sluice_status_t run_op(void* user, int32_t index, sluice_stream_t stream) {
  const run_t* run = user;
  const sluice_bucket_plan_t* plan = run->plan;
  const sluice_bucket_op_t* op = plan->ops + index;
  float* grads = (float*)(void*)(run->memory + sluice_bucket_state_bytes(plan->form.bucket, plan->form.num_slots));
  const sluice_bucket_part_t part = {
      .first = op->first,
      .count = op->count,
      .line = op->line,
      .slot = slot_at(run, op->state_slot),
      .grad = op->grad_slot < 0 ? NULL : grads + op->grad_at,
      .grads = grads,
  };
  return run->mode->ops[op->kind](run->user, stream, &part);
}

static sluice_status_t submit_all(sluice_device_t* device, const sluice_bucket_plan_t* plan,
                                  const sluice_bucket_mode_t* mode) {
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    const sluice_bucket_op_t* op = plan->ops + i;
    const sluice_job_t job = {.index = i,
                              .lane = op->lane,
                              .waits = op->waits,
                              .num_waits = op->num_waits,
                              .run_on_failure = mode->runs_on_failure[op->kind]};
    SLUICE_TRY(device->vtable->submit(device, &job));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_bucket_run(sluice_device_t* device, const sluice_bucket_plan_t* plan, void* memory,
                                  const sluice_bucket_mode_t* mode, void* user, sluice_stream_t stream) {
  run_t run = {plan, memory, mode, user};
  if (plan->num_ops == 0) return SLUICE_OK;
  SLUICE_TRY(device->vtable->begin(device, plan->num_ops, run_op, &run, stream));
  const sluice_status_t submitted = submit_all(device, plan, mode);
  sluice_error_info_t why;
  if (submitted != SLUICE_OK) sluice_error_capture(&why);
  const sluice_status_t joined = device->vtable->join(device);
  return submitted == SLUICE_OK ? joined : sluice_error_adopt(&why);
}
