// SPDX-License-Identifier: Apache-2.0
#include "capi/dry_step/dry_step.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/status.h"
#include "backend/comm/nccl/fake/fake_nccl.h"
#include "backend/comm/tcp/tcp_side_channel.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/device/cuda/fake/fake_record.h"
#include "backend/gemm/cublas/fake/fake_cublas.h"
#include "sluice/sluice.h"

/* During the settling steps slots grow, routes of both directions are registered, and first measurements end. */
enum { SETTLING_STEPS = 10, MOST_EXPERTS = 1024, MOST_TOKENS = 1 << 20, MOST_WIDTH = 1 << 17 };
#define TIMEOUT_NS (UINT64_C(300) * 1000000000) /* against hangs */

/* The state that all ranks share. */
typedef struct run_s {
  const sluice_dry_step_t* step;
  sluice_cuda_sources_t sources;
  sluice_cuda_driver_t driver;
  sluice_cublas_symbols_t cublas;
  sluice_cublaslt_symbols_t cublaslt;
  sluice_nccl_symbols_t nccl;
  sluice_nccl_id_t id;
} run_t;

typedef struct tensor_s {
  sluice_tensor_t of;
  int64_t shape[2], strides[2];
} tensor_t;

/* Parameters of the local experts, or their gradients: [E_local, 2H, M] and [E_local, M, H]. */
typedef struct experts_s {
  tensor_t* tensors;
  sluice_tensor_t* lists; /* w1, then w3, then w2 */
  sluice_expert_tensors_t table;
} experts_t;

typedef struct rank_s {
  run_t* run;
  int32_t rank;
  void* stream;
  sluice_comm_t* comm;
  sluice_context_t* context;
  sluice_moe_t* moe;
  tensor_t x, ids, weights, y, dy, dx, dweights;
  experts_t params, grads;
  void* saved[SLUICE_SAVED_COUNT];
  uint64_t saved_bytes[SLUICE_SAVED_COUNT];
  uint64_t taken; /* bytes of tensors */
  sluice_status_t (*phase)(struct rank_s* r);
  sluice_status_t status;
  sluice_error_info_t why;
} rank_t;

/* ---- the host's tensors ----------------------------------------------------------------------------------------- */

static sluice_status_t take(rank_t* r, uint64_t bytes, void** out_data) {
  *out_data = sluice_fake_cuda_take(r->rank, bytes);
  r->taken += bytes;
  if (*out_data != NULL) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_NO_MEMORY,
                     "dry step: the host's tensors alone take more than %llu bytes on rank %d, and the device has %lld "
                     "(or this machine does not let a process reserve so much: see `ulimit -v` and "
                     "vm.overcommit_memory): ask for more ranks or fewer tokens",
                     (unsigned long long)r->taken, r->rank, (long long)r->run->step->device_bytes);
}

static void describe(tensor_t* t, int32_t rank, void* data, int64_t rows, int64_t width, uint8_t code, uint8_t bits) {
  t->shape[0] = rows, t->shape[1] = width;
  t->strides[0] = width, t->strides[1] = 1;
  t->of = (sluice_tensor_t){.data = data,
                            .device_type = SLUICE_DEVICE_CUDA,
                            .device_id = rank,
                            .ndim = 2,
                            .type_code = code,
                            .type_bits = bits,
                            .type_lanes = 1,
                            .shape = t->shape,
                            .strides = t->strides};
}

static sluice_status_t make_tensor(rank_t* r, tensor_t* t, int64_t rows, int64_t width, uint8_t code, uint8_t bits) {
  void* data;
  SLUICE_TRY(take(r, (uint64_t)(rows * width) * bits / 8, &data));
  describe(t, r->rank, data, rows, width, code, bits);
  return SLUICE_OK;
}

static uint64_t next_random(uint64_t* state) {
  uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

static void fill_routes(const rank_t* r) {
  const sluice_dry_step_t* s = r->run->step;
  uint64_t state = (uint64_t)s->seed * 1000003 + (uint64_t)r->rank;
  int32_t* ids = r->ids.of.data;
  for (int64_t t = 0; t < s->tokens; ++t) {
    for (int64_t k = 0; k < s->top_k; ++k) {
      int is_new = 0;
      while (!is_new) {
        ids[t * s->top_k + k] = (int32_t)(next_random(&state) % (uint64_t)s->experts);
        is_new = 1;
        for (int64_t j = 0; j < k; ++j) is_new &= ids[t * s->top_k + j] != ids[t * s->top_k + k];
      }
    }
  }
}

static sluice_status_t make_experts(rank_t* r, experts_t* e) {
  const sluice_dry_step_t* s = r->run->step;
  const int64_t local = s->experts / s->ranks, M = s->model_width, H = s->hidden_width;
  char *up, *down;
  e->tensors = calloc((size_t)(3 * local), sizeof *e->tensors);
  e->lists = calloc((size_t)(3 * local), sizeof *e->lists);
  if (e->tensors == NULL || e->lists == NULL) {
    return SLUICE_FAIL(SLUICE_E_NO_MEMORY, "dry step: no memory for the descriptors of %lld experts", (long long)local);
  }
  SLUICE_TRY(take(r, (uint64_t)(local * 2 * H * M) * 2, (void**)&up));
  SLUICE_TRY(take(r, (uint64_t)(local * M * H) * 2, (void**)&down));
  for (int64_t i = 0; i < local; ++i) {
    describe(&e->tensors[i], r->rank, up + i * 2 * H * M * 2, H, M, SLUICE_TYPE_BFLOAT, 16);
    describe(&e->tensors[local + i], r->rank, up + (i * 2 + 1) * H * M * 2, H, M, SLUICE_TYPE_BFLOAT, 16);
    describe(&e->tensors[2 * local + i], r->rank, down + i * M * H * 2, M, H, SLUICE_TYPE_BFLOAT, 16);
  }
  for (int64_t i = 0; i < local && s->is_transposed; ++i) {
    tensor_t *const w1 = &e->tensors[i], *const w3 = w1 + local, *const w2 = w3 + local;
    w3->of.data = (char*)w1->of.data + H * 2;
    w1->strides[0] = w3->strides[0] = w2->strides[0] = 1;
    w1->strides[1] = w3->strides[1] = 2 * H, w2->strides[1] = M;
  }
  for (int64_t i = 0; i < 3 * local; ++i) e->lists[i] = e->tensors[i].of;
  e->table = (sluice_expert_tensors_t){
      .struct_size = sizeof e->table, .w1 = e->lists, .w3 = e->lists + local, .w2 = e->lists + 2 * local};
  return SLUICE_OK;
}

static sluice_status_t make_tensors(rank_t* r) {
  const sluice_dry_step_t* s = r->run->step;
  tensor_t* const rows[] = {&r->x, &r->y, &r->dy, &r->dx};
  for (int i = 0; i < 4; ++i) {
    SLUICE_TRY(make_tensor(r, rows[i], s->tokens, s->model_width, SLUICE_TYPE_BFLOAT, 16));
  }
  SLUICE_TRY(make_tensor(r, &r->weights, s->tokens, s->top_k, SLUICE_TYPE_FLOAT, 32));
  SLUICE_TRY(make_tensor(r, &r->dweights, s->tokens, s->top_k, SLUICE_TYPE_FLOAT, 32));
  SLUICE_TRY(make_tensor(r, &r->ids, s->tokens, s->top_k, SLUICE_TYPE_INT, 32));
  fill_routes(r);
  SLUICE_TRY(make_experts(r, &r->params));
  return make_experts(r, &r->grads);
}

/* Keeps each buffer for later steps, like a framework's caching allocator. META is in host memory. */
static void* save(void* user, int32_t which, uint64_t bytes) {
  rank_t* r = user;
  const int is_devices = which == SLUICE_SAVED_INPUT || which == SLUICE_SAVED_PRE_ACTIVATION;
  if (r->saved[which] != NULL && bytes <= r->saved_bytes[which]) return r->saved[which];
  if (is_devices) {
    if (r->saved[which] != NULL) sluice_fake_cuda_give(r->saved[which]);
    r->saved[which] = bytes > 0 ? sluice_fake_cuda_take(r->rank, bytes) : NULL;
  } else {
    free(r->saved[which]);
    r->saved[which] = NULL;
    if (posix_memalign(&r->saved[which], 64, bytes > 0 ? bytes : 64) != 0) return NULL;
  }
  r->saved_bytes[which] = bytes;
  return r->saved[which];
}

/* ---- a rank ----------------------------------------------------------------------------------------------------- */

static sluice_status_t make_layer(rank_t* r) {
  const sluice_dry_step_t* s = r->run->step;
  sluice_comm_config_t comm;
  sluice_comm_config_init(&comm, sizeof comm);
  comm.rank = r->rank, comm.world_size = (int32_t)s->ranks, comm.timeout_ns = TIMEOUT_NS;
  sluice_nccl_group_t group;
  sluice_nccl_group_init(&group, sizeof group);
  group.device_id = r->rank, group.id = &r->run->id;
  if (s->ranks > 1) SLUICE_TRY(sluice_comm_create_nccl_from(&comm, &group, &r->run->sources, &r->comm));
  sluice_context_config_t config;
  sluice_context_config_init(&config, sizeof config);
  config.device_type = SLUICE_DEVICE_CUDA, config.device_id = r->rank;
  SLUICE_TRY(sluice_context_create_from(&config, r->comm, &r->run->sources, &r->context));
  sluice_moe_config_t moe;
  sluice_moe_config_init(&moe, sizeof moe);
  moe.model_width = s->model_width, moe.hidden_width = s->hidden_width;
  moe.num_experts = (int32_t)s->experts, moe.top_k = (int32_t)s->top_k, moe.num_chunks = (int32_t)s->chunks;
  moe.deduplicate = (int32_t)s->deduplicate;
  moe.dtype = SLUICE_DTYPE_BF16, moe.activation = SLUICE_ACTIVATION_SILU, moe.gated = SLUICE_GATED_HALVES;
  moe.restore_input = SLUICE_RESTORE_REDISPATCH, moe.restore_pre_activation = SLUICE_RESTORE_KEEP;
  return sluice_moe_create(r->context, &moe, &r->moe);
}

static sluice_status_t run_step(rank_t* r) {
  sluice_moe_forward_args_t forward;
  sluice_moe_backward_args_t backward;
  sluice_step_t* step = NULL;
  sluice_moe_forward_args_init(&forward, sizeof forward);
  forward.tokens = &r->x.of, forward.expert_ids = &r->ids.of, forward.route_weights = &r->weights.of;
  forward.params = &r->params.table, forward.out_tokens = &r->y.of;
  forward.save = save, forward.save_user = r, forward.needs_backward = 1;
  sluice_fake_cuda_mark(r->rank, "forward");
  SLUICE_TRY(sluice_moe_forward(r->moe, &forward, r->stream, &step));
  sluice_moe_backward_args_init(&backward, sizeof backward);
  backward.tokens = &r->x.of, backward.route_weights = &r->weights.of, backward.params = &r->params.table;
  backward.grad_out = &r->dy.of, backward.grad_tokens = &r->dx.of, backward.grad_route_weights = &r->dweights.of;
  backward.grad_params = &r->grads.table;
  sluice_fake_cuda_mark(r->rank, "backward");
  const sluice_status_t status = sluice_moe_backward(r->moe, step, &backward, r->stream);
  sluice_step_drop(step);
  return status;
}

static sluice_status_t settle(rank_t* r) {
  for (int i = 0; i < SETTLING_STEPS; ++i) SLUICE_TRY(run_step(r));
  return SLUICE_OK;
}

static void release(rank_t* r) {
  sluice_moe_destroy(r->moe);
  sluice_context_destroy(r->context);
  sluice_comm_destroy(r->comm);
  free(r->saved[SLUICE_SAVED_META]);
  free(r->saved[SLUICE_SAVED_HOST_INPUT]);
  free(r->saved[SLUICE_SAVED_HOST_PRE_ACTIVATION]);
  free(r->params.tensors), free(r->params.lists);
  free(r->grads.tensors), free(r->grads.lists);
  sluice_fake_cuda_close_stream(r->stream);
}

/* ---- headers ---------------------------------------------------------------------------------------------------- */

/* The vtable of the header connections with a recording exchange_start. It is the same on all ranks. */
static pthread_mutex_t headers_mutex = PTHREAD_MUTEX_INITIALIZER;
static sluice_comm_vtable_t recorded;
static sluice_status_t (*start_header)(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                       sluice_comm_request_t** out_request);

static sluice_status_t record_header(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                     sluice_comm_request_t** out_request) {
  sluice_fake_cuda_header(comm->rank);
  return start_header(comm, exchange, out_request);
}

static sluice_status_t open_headers(sluice_comm_t* comm, sluice_comm_t** out_tcp) {
  SLUICE_TRY(sluice_tcp_open_headers(comm, out_tcp));
  pthread_mutex_lock(&headers_mutex);
  start_header = (*out_tcp)->vtable->exchange_start;
  recorded = *(*out_tcp)->vtable;
  recorded.exchange_start = record_header;
  (*out_tcp)->vtable = &recorded;
  pthread_mutex_unlock(&headers_mutex);
  return SLUICE_OK;
}

/* ---- all ranks -------------------------------------------------------------------------------------------------- */

static void* phase_main(void* argument) {
  rank_t* r = argument;
  r->status = r->phase(r);
  if (r->status != SLUICE_OK) sluice_error_capture(&r->why);
  return NULL;
}

/* Runs a phase on all ranks, each in a thread. Returns the first error that is not about another rank. */
static sluice_status_t run_phase(rank_t* ranks, sluice_status_t (*phase)(rank_t*)) {
  pthread_t threads[SLUICE_DRY_MOST_RANKS];
  const int64_t count = ranks->run->step->ranks;
  const rank_t* failed = NULL;
  for (int64_t i = 0; i < count; ++i) {
    ranks[i].phase = phase;
    if (pthread_create(&threads[i], NULL, phase_main, &ranks[i]) != 0) abort(); /* the others wait for it */
  }
  for (int64_t i = 0; i < count; ++i) pthread_join(threads[i], NULL);
  for (int64_t i = count - 1; i >= 0; --i) {
    if (ranks[i].status == SLUICE_OK) continue;
    if (failed == NULL || ranks[i].status != SLUICE_E_PEER_REFUSED) failed = &ranks[i];
  }
  return failed == NULL ? SLUICE_OK : sluice_error_adopt(&failed->why);
}

static sluice_status_t record_one(rank_t* ranks, FILE* out) {
  for (int64_t i = 0; i < ranks->run->step->ranks; ++i) {
    if (!sluice_fake_cuda_idle(ranks[i].stream)) {
      return SLUICE_FAIL(SLUICE_E_INTERNAL, "dry step: rank %lld has work left of the steps before", (long long)i);
    }
  }
  sluice_fake_cuda_record(1);
  const sluice_status_t status = run_phase(ranks, run_step);
  sluice_fake_cuda_record(0);
  if (status == SLUICE_OK) sluice_fake_cuda_write_record(out);
  return status;
}

/* Adds the remedy to the engine's error, which names the bytes that were refused. */
static sluice_status_t advise(const rank_t* ranks, sluice_status_t status) {
  if (status != SLUICE_E_NO_MEMORY) return status;
  sluice_error_info_t why;
  sluice_error_capture(&why);
  return SLUICE_FAIL(SLUICE_E_NO_MEMORY,
                     "dry step: a device of %lld bytes does not hold this layer on %lld ranks: ask for more ranks or "
                     "fewer tokens (%s)",
                     (long long)ranks->run->step->device_bytes, (long long)ranks->run->step->ranks, why.message);
}

static sluice_status_t run_phases(rank_t* ranks, FILE* out) {
  SLUICE_TRY(run_phase(ranks, make_tensors));
  SLUICE_TRY(advise(ranks, run_phase(ranks, make_layer)));
  SLUICE_TRY(advise(ranks, run_phase(ranks, settle)));
  return record_one(ranks, out);
}

static sluice_status_t check_number(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "dry step: %s is %lld; it must be from %lld to %lld", name,
                     (long long)value, (long long)least, (long long)most);
}

static sluice_status_t check(const sluice_dry_step_t* s) {
  SLUICE_TRY(check_number("ranks", s->ranks, 1, SLUICE_DRY_MOST_RANKS));
  SLUICE_TRY(check_number("tokens", s->tokens, 1, MOST_TOKENS));
  SLUICE_TRY(check_number("model_width", s->model_width, 1, MOST_WIDTH));
  SLUICE_TRY(check_number("hidden_width", s->hidden_width, 1, MOST_WIDTH));
  SLUICE_TRY(check_number("experts", s->experts, 1, MOST_EXPERTS));
  SLUICE_TRY(check_number("top_k", s->top_k, 1, s->experts));
  SLUICE_TRY(check_number("chunks", s->chunks, 1, 64));
  SLUICE_TRY(check_number("deduplicate", s->deduplicate, SLUICE_DEDUPLICATE_NONE, SLUICE_DEDUPLICATE_ANY));
  SLUICE_TRY(check_number("device_bytes", s->device_bytes, 1, INT64_MAX));
  if (s->experts % s->ranks == 0) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "dry step: %lld experts do not divide over %lld ranks: give a number of ranks that does",
                     (long long)s->experts, (long long)s->ranks);
}

sluice_status_t sluice_dry_step_run(const sluice_dry_step_t* step, FILE* out) {
  rank_t ranks[SLUICE_DRY_MOST_RANKS];
  run_t run = {.step = step, .driver = *sluice_fake_cuda_driver()};
  SLUICE_TRY(check(step));
  sluice_fake_cuda_reset();
  sluice_fake_cuda_make_dry();
  sluice_fake_cuda_set_memory((uint64_t)step->device_bytes);
  run.cublas = sluice_fake_cublas(1), run.cublaslt = sluice_fake_cublaslt(), run.nccl = sluice_fake_nccl();
  run.sources = (sluice_cuda_sources_t){&run.driver, sluice_fake_cuda_image(), &run.cublas, &run.cublaslt, &run.nccl,
                                        open_headers};
  SLUICE_TRY(sluice_nccl_make_id(&run.nccl, &run.id));
  memset(ranks, 0, sizeof ranks);
  for (int32_t i = 0; i < step->ranks; ++i) {
    ranks[i].run = &run, ranks[i].rank = i;
    ranks[i].stream = sluice_fake_cuda_open_stream(i);
  }
  const sluice_status_t status = run_phases(ranks, out);
  sluice_error_info_t why;
  if (status != SLUICE_OK) sluice_error_capture(&why);
  for (int32_t i = 0; i < step->ranks; ++i) release(&ranks[i]);
  return status == SLUICE_OK ? SLUICE_OK : sluice_error_adopt(&why);
}
