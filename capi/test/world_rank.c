/* One rank of a case through the public ABI. */
#include "capi/test/world_parts.h"

#include <stdio.h>
#include <stdlib.h>

void world_note(rank_t* r, sluice_status_t status) {
  if (status == SLUICE_OK || r->out->status[r->rank] != SLUICE_OK) return;
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  r->out->status[r->rank] = status;
  snprintf(r->out->message[r->rank], sizeof r->out->message[r->rank], "%s", why.message);
}

double* world_copy_rows(const array_t* a, int32_t dtype) {
  world_pull(a);
  double* out = malloc((size_t)(a->shape[0] * a->shape[1] + 1) * sizeof(double));
  for (int64_t i = 0; i < a->shape[0]; ++i)
    for (int64_t j = 0; j < a->shape[1]; ++j)
      out[i * a->shape[1] + j] = world_load(dtype, a->host, i * a->strides[0] + j * a->strides[1]);
  return out;
}

static void count_slots(rank_t* r, sluice_context_t* context) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  if (context == NULL || sluice_context_get_stats(context, 0, &stats) != SLUICE_OK) return;
  uint64_t* most = &r->out->slot_bytes[r->rank];
  if (stats.slot_bytes > *most) *most = stats.slot_bytes;
  r->out->saved_bytes[r->rank] = stats.saved_bytes;
}

static void count_ready(void* user, int32_t local) {
  (void)local;
  ++*(int32_t*)user;
}

void world_run_rank(rank_t* r) {
  const case_t* c = r->c;
  world_here.machine = c->machine, world_here.rank = r->rank;
  int64_t T = c->tokens[r->rank];
  int32_t* ids = calloc((size_t)c->num_experts, sizeof(int32_t));
  int32_t* owners = calloc((size_t)c->num_experts, sizeof(int32_t));
  int32_t count = world_local_experts(c, r->rank, ids);
  for (int32_t e = 0; e < c->num_experts; ++e) owners[e] = world_owner(c, e);
  int32_t grad_dtype = c->grad_f32 && c->dtype != SLUICE_DTYPE_F64 ? SLUICE_DTYPE_F32 : c->dtype;

  sluice_comm_t* comm = NULL;
  sluice_comm_config_t comm_config;
  sluice_comm_config_init(&comm_config, sizeof comm_config);
  comm_config.rank = r->rank;
  comm_config.world_size = c->world_size;
  comm_config.timeout_ns = 20000000000u;
  int own = c->machine != NULL && c->machine->make_comm != NULL;
  if (r->group != NULL && own) world_note(r, c->machine->make_comm(r->rank, &comm_config, &comm));
  if (r->group != NULL && !own) world_note(r, sluice_comm_create_local(r->group, &comm_config, &comm));
  sluice_context_config_t context_config;
  sluice_context_config_init(&context_config, sizeof context_config);
  context_config.gemm = c->gemm != NULL ? c->gemm : "ref";
  context_config.memory_budget = c->budget,
  context_config.max_outstanding = c->max_outstanding > 0 ? c->max_outstanding : c->outstanding;
  context_config.host_memory_budget = c->host_budget;
  context_config.halves_apart = c->halves_apart && !c->halves_unsaid;
  sluice_context_t* context = NULL;
  if (c->machine != NULL) {
    context_config.gemm = c->gemm;
    context_config.device_type = c->machine->device_type, context_config.device_id = c->machine->device_id(r->rank);
    world_note(r, c->machine->make_context(r->rank, &context_config, comm, &context));
  } else {
    world_note(r, sluice_context_create(&context_config, comm, &context));
  }
  sluice_moe_config_t config;
  sluice_moe_config_init(&config, sizeof config);
  config.model_width = c->model_width, config.hidden_width = c->hidden_width, config.num_experts = c->num_experts;
  config.top_k = c->top_k, config.dtype = c->dtype, config.activation = c->activation, config.gated = c->gated;
  config.bias = c->bias, config.num_chunks = c->num_chunks, config.wgrad_mode = c->wgrad_mode;
  config.callback_experts = c->callback_experts, config.layer_id = 7;
  config.expert_rank = c->uneven_owners ? owners : NULL;
  config.swiglu_alpha = WORLD_ALPHA, config.swiglu_limit = WORLD_LIMIT, config.swiglu_offset = WORLD_OFFSET;
  config.restore_input = c->restore_input, config.restore_middle = c->restore_middle;
  config.restore_input_of = c->restore_input_of, config.restore_middle_of = c->restore_middle_of;
  config.deduplicate = c->deduplicate;
  config.chunk_cut = c->chunk_cut;
  if (c->ceiling > 0) config.exchange_mode = SLUICE_EXCHANGE_CEILING, config.ceiling_rows = c->ceiling;
  sluice_moe_t* moe = NULL;
  world_note(r, sluice_moe_create(context, &config, &moe));
  if (c->plan != NULL && moe != NULL) world_note(r, world_use_plan(r, moe));

  array_t x, id, w, y, dy, dx, dw;
  world_make_rows(&x, c->dtype, T, c->model_width, 3);
  world_make_array(&id, SLUICE_DTYPE_I64, 2, T, c->top_k, 1, T > 0 ? T : 1); /* K-major, as DeepSpeed gives them */
  world_make_rows(&w, SLUICE_DTYPE_F32, T, c->top_k, 1);
  world_make_rows(&y, c->dtype, T, c->model_width, 2);
  world_make_rows(&dy, c->dtype, T, c->model_width, 0);
  world_make_rows(&dx, c->dtype, T, c->model_width, 1);
  world_make_rows(&dw, SLUICE_DTYPE_F32, T, c->top_k, 0);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t m = 0; m < c->model_width; ++m) {
      world_store(c->dtype, x.host, t * x.strides[0] + m, world_token_value(c, r->rank, t, m));
      world_store(c->dtype, dy.host, t * dy.strides[0] + m, world_grad_value(c, r->rank, t, m));
    }
    for (int32_t k = 0; k < c->top_k; ++k) {
      world_store(SLUICE_DTYPE_I64, id.host, t * id.strides[0] + k * id.strides[1],
                  (double)world_expert(c, r->rank, t, k));
      world_store(SLUICE_DTYPE_F32, w.host, t * w.strides[0] + k, world_weight_value(c, r->rank, t, k));
    }
  }
  array_t* all[] = {&x, &id, &w, &y, &dy, &dx, &dw};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) world_push(all[i]);
  experts_t params, grads;
  world_make_experts(&params, c, c->dtype, ids, count, 0);
  world_make_experts(&grads, c, grad_dtype, ids, count, 1);
  array_t factors;
  int64_t most = c->callback_experts ? world_tokens_before(c, c->world_size) * c->top_k : 0;
  world_make_array(&factors, SLUICE_DTYPE_F32, 2, count, most, most, 1);
  for (int64_t i = 0; i < count * most; ++i) ((float*)factors.host)[i] = (float)(ids[i / most] + 2);
  world_push(&factors);
  toy_t toy = {.c = c,
               .ids = ids,
               .calls = &r->out->calls[r->rank],
               .most_rows = &r->out->most_rows[r->rank],
               .chunk = -1,
               .context = context,
               .factors = world_tensor_of(&factors)->data,
               .most_factors = most};
  sluice_expert_callbacks_t callbacks = {sizeof callbacks, &toy, world_toy_forward, world_toy_backward};
  saved_t saved = {{NULL}, {0}};

  if (c->parts && r->out->status[r->rank] == SLUICE_OK) {
    world_run_parts(
        r, moe,
        &(parts_t){world_tensor_of(&x), world_tensor_of(&id), world_tensor_of(&w), world_tensor_of(&y),
                   world_tensor_of(&dy), world_tensor_of(&dx), world_tensor_of(&dw), &params.table, &grads.table});
  }
  if (c->cycles > 0 && r->out->status[r->rank] == SLUICE_OK) {
    world_run_cycles(
        r, context, moe,
        &(round_t){.tensors = {&x, &id, &w, &y, &dy, &dx, &dw}, .params = &params.table, .grads = &grads.table});
  }
  sluice_step_t *step = NULL, *others[WORLD_MAX_OUTSTANDING] = {NULL};
  if (r->out->status[r->rank] == SLUICE_OK && !c->parts) {
    sluice_moe_forward_args_t f;
    sluice_moe_forward_args_init(&f, sizeof f);
    f.tokens = world_tensor_of(&x), f.expert_ids = world_tensor_of(&id), f.route_weights = world_tensor_of(&w),
    f.out_tokens = world_tensor_of(&y);
    f.params = c->callback_experts ? NULL : &params.table;
    f.callbacks = c->callback_experts ? &callbacks : NULL;
    f.needs_backward = 1;
    if (c->restore) f.save = world_save, f.save_user = &saved;
    if (c->captured) {
      const sluice_moe_backward_args_t before = world_backward_args(&x, &w, &dy, &dx, &dw, &params.table, &grads.table);
      world_run_before_capture(r, moe, &f, &before, &id);
      world_here.machine->begin_capture(r->rank);
    }
    world_tell(SLUICE_FORWARD, 0);
    world_note(r, sluice_moe_forward(moe, &f, world_stream_here(), &step));
    world_tell(SLUICE_FORWARD, 1);
    count_slots(r, context);
    f.save = NULL, f.save_user = NULL; /* `saved` is the first step's; the others keep what they save themselves */
    for (int32_t i = 1; i < c->outstanding && r->out->status[r->rank] == SLUICE_OK; ++i) {
      world_note(r, sluice_moe_forward(moe, &f, world_stream_here(), &others[i]));
    }
  }
  if (r->out->status[r->rank] == SLUICE_OK && c->restore) world_note(r, world_rebuild(moe, &saved, &step));
  if (r->out->status[r->rank] == SLUICE_OK && !c->parts) {
    sluice_moe_backward_args_t b;
    sluice_moe_backward_args_init(&b, sizeof b);
    b.tokens = world_tensor_of(&x), b.route_weights = world_tensor_of(&w), b.grad_out = world_tensor_of(&dy);
    b.grad_tokens = world_tensor_of(&dx), b.grad_route_weights = world_tensor_of(&dw);
    b.params = c->callback_experts ? NULL : &params.table;
    b.callbacks = c->callback_experts ? &callbacks : NULL;
    b.grad_params = c->callback_experts ? NULL : &grads.table;
    b.grad_mode = c->accumulate ? SLUICE_GRAD_ACCUMULATE : SLUICE_GRAD_OVERWRITE;
    b.may_reuse_saved = c->reuse_saved;
    b.expert_ready = count_ready, b.expert_ready_user = &r->out->ready[r->rank];
    world_tell(SLUICE_BACKWARD, 0);
    if (c->halves_apart) {
      b.halves = SLUICE_HALF_INPUT;
      world_note(r, sluice_moe_backward(moe, step, &b, world_stream_here()));
      b.halves = SLUICE_HALF_WEIGHT;
      b.may_reuse_saved = !c->reuse_saved; /* what the input half did counts */
      b.grad_out = NULL;
    }
    world_note(r, sluice_moe_backward(moe, step, &b, world_stream_here()));
    world_tell(SLUICE_BACKWARD, 1);
  }
  if (c->captured) world_launch_graph(r, &id, (array_t* const[]){&y, &dx, &dw}, &grads, count);
  world_settle();
  r->out->out[r->rank] = world_copy_rows(&y, c->dtype);
  r->out->grad_tokens[r->rank] = world_copy_rows(&dx, c->dtype);
  r->out->grad_weights[r->rank] = world_copy_rows(&dw, SLUICE_DTYPE_F32);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    const int of = world_param_array(c, kind);
    for (int32_t l = 0; world_param_used(c, kind) && grads.arrays[of] != NULL && l < count; ++l) {
      const array_t* a = &grads.arrays[of][l];
      world_pull(a);
      for (int64_t i = 0; i < world_param_size(c, kind); ++i) {
        r->out->grad_params[kind][(int64_t)ids[l] * world_param_size(c, kind) + i] =
            world_load(grad_dtype, a->host, world_param_place(c, a, kind, i));
      }
    }
  }
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  if (context != NULL && sluice_context_get_stats(context, 0, &stats) == SLUICE_OK) {
    r->out->peak_bytes[r->rank] = stats.peak_bytes;
    r->out->fallback_chunks[r->rank] = stats.num_fallback_chunks;
    count_slots(r, context);
    r->out->bytes_sent[r->rank] = stats.bytes_sent;
    r->out->num_chunks[r->rank] = stats.last_num_chunks;
  }
  if (c->ceiling > 0 && moe != NULL) {
    sluice_ceiling_report_t* report = &r->out->report[r->rank];
    sluice_ceiling_report_init(report, sizeof *report);
    r->out->report_status[r->rank] = sluice_moe_take_ceiling_report(moe, world_stream_here(), report);
  }
  if (c->captured) world_here.machine->drop_graph(r->rank);
  for (int i = 0; i < WORLD_MAX_OUTSTANDING; ++i) sluice_step_drop(others[i]);
  sluice_step_drop(step);
  for (int i = 0; i < SLUICE_SAVED_COUNT; ++i) world_give_saved(i, saved.data[i]);
  sluice_moe_destroy(moe);
  sluice_context_destroy(context);
  sluice_comm_destroy(comm);
  world_free_experts(&params, count);
  world_free_experts(&grads, count);
  world_drop_array(&factors);
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) world_drop_array(all[i]);
  free(ids);
  free(owners);
}
