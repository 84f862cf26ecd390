// SPDX-License-Identifier: Apache-2.0
/* One pass in execution: a template, a binding, where each tensor's slots lie, and the host's tensors. */
#ifndef SLUICE_BACKEND_MOE_PASS_PASS_H_
#define SLUICE_BACKEND_MOE_PASS_PASS_H_

#include "backend/model/pass_sizes.h"
#include "backend/moe/context/row_memory.h"
#include "backend/moe/pass/host_times.h"
#include "backend/moe/routing/binding.h"

/* How the rows of a tensor lie. */
typedef enum sluice_layout_e {
  SLUICE_LAYOUT_NONE = 0,
  SLUICE_LAYOUT_SLOTS,       /* slot after slot, each as large as the largest chunk that uses it, in expert order */
  SLUICE_LAYOUT_EXPERT_MAJOR /* all rows of the pass, by (expert, chunk): one GEMM may run over all chunks */
} sluice_layout_t;

typedef struct sluice_slots_s {
  char* data;
  uint64_t* first; /* SLOTS: [ring] bytes before each slot */
  uint64_t bytes;
  uint64_t row_bytes;
  int32_t layout;
} sluice_slots_t;

typedef struct sluice_op_times_s {
  uint64_t begin_ns;
  uint64_t end_ns;
  uint64_t bytes;
} sluice_op_times_t;

/* CPU time of the communication lane's thread, from its first job of the pass to its last. Only it writes the times. */
typedef struct sluice_comm_jobs_s {
  int32_t first, last; /* -1: it has none */
  uint64_t began_cpu_ns;
  uint64_t cpu_ns;
} sluice_comm_jobs_t;

typedef struct sluice_slot_poisoner_s sluice_slot_poisoner_t;

/* On a device an op may leave its exchange to the next one (ops/exchange_ops.h): both have ended when that one has. */
enum { SLUICE_EXCHANGE_DONE = 0, SLUICE_EXCHANGE_LEFT, SLUICE_EXCHANGE_TAKEN };

struct sluice_travel_s; /* ops/travel.h */
struct sluice_wire_s;   /* ops/wire.h */
struct sluice_pass_s;
/* Does one op of the pass, by kind; index: its own. */
typedef sluice_status_t (*sluice_run_op_fn_t)(struct sluice_pass_s* pass, const sluice_op_t* op, int32_t index);

typedef struct sluice_pass_s {
  sluice_context_t* context;
  sluice_moe_t* moe;
  sluice_pass_memory_t* memory; /* of this pass; its binding has the same */
  const sluice_template_t* schedule;
  sluice_run_op_fn_t run_op;                 /* the ops of its direction */
  const struct sluice_travel_s* travel;      /* what travels between ranks */
  sluice_stream_t stream;                    /* the host's; NULL on a CPU */
  sluice_stream_t streams[SLUICE_NUM_LANES]; /* of the lanes, each written by its own lane's ops; NULL on a CPU */
  sluice_binding_t binding;
  sluice_slots_t slots[SLUICE_T_COUNT];
  const sluice_expert_tensors_t* params;
  const sluice_expert_callbacks_t* callbacks;
  /* forward: tokens in, tokens out. backward: output gradients in, input gradients out (may be NULL). */
  const sluice_tensor_t* in_rows;
  const sluice_tensor_t* out_rows;
  const sluice_tensor_t* tokens;             /* backward: the forward's tokens, to be dispatched again */
  const sluice_tensor_t* route_weights;      /* [T, K] */
  const sluice_tensor_t* grad_route_weights; /* [T, K] or NULL */
  const sluice_expert_tensors_t* grad_params;
  int32_t grad_mode;
  sluice_expert_ready_fn_t expert_ready;
  void* expert_ready_user;
  /* scratch of the communication lane, of the compute lane, and records per op */
  const void** send;
  void** recv;
  uint64_t* send_bytes;
  uint64_t* recv_bytes;
  int64_t* cursor;        /* [W] communication lane */
  sluice_row_run_t* runs; /* [W] communication lane */
  float* route_send;      /* [largest chunk] route weights on their way out */
  float* gate_recv;       /* [largest chunk; chunks_by_experts: all] the gate's scalars as they return */
  float* scalar_recv;     /* [largest chunk] route weights as they arrive */
  float* gate_send;       /* [largest chunk] gate scalars on their way out: scalar_recv, whose route weights were
                             unpacked by the op before, where none arrive meanwhile (grouped) */
  const struct sluice_wire_s* wire; /* communication lane: of the rows that are about to be posted; NULL: as they are */
  sluice_comm_request_t* opened;    /* communication lane: the rows of the exchange that opens a group, on their way */
  int32_t exchange_left;            /* SLUICE_EXCHANGE_*, of the op that ran last */
  sluice_gemm_problem_t* gemms;     /* [sluice_pass_gemms] compute lane */
  char* adapters;                   /* compute lane: factors of adapters in the layer's dtype */
  uint64_t adapter_bytes;           /* of them */
  sluice_packed_t* packed;          /* NULL, or of each of `gemms` how its weight is packed; zeros between lists */
  void* decoded;                    /* compute lane: where a device decodes packed weights; NULL: it does not */
  uint64_t decoded_bytes;           /* of it */
  sluice_op_times_t* times;         /* [num_ops] */
  int32_t is_bounded;               /* a plan has room for it, and its templates keep to the plan's rings */
  int32_t captured;                 /* the host's stream is being captured into a graph */
  int32_t has_device_times;         /* times are the device's own, of ops as they ran there */
  int32_t has_begun;                /* ops are being submitted: rows may have left this rank */
  int32_t is_complete; /* every op was submitted: exchanges ran even if something failed, so the group is in step */
  uint64_t begin_ns, end_ns;
  sluice_comm_jobs_t comm_jobs;
  sluice_host_times_t host;
  sluice_slot_poisoner_t* poisoner; /* slot_poisoner.h; NULL: slots are not poisoned */
  uint64_t agreed_ns;               /* when the header's exchange had ended */
  uint64_t header_ns;               /* that it took */
  int32_t leaves_wgrad_out;         /* backward: no rank wants gradients of weights */
} sluice_pass_t;

/* Sizes of all tensors, from template and binding: pass->slots[tensor].bytes. Before the slots themselves exist. */
sluice_status_t sluice_pass_measure(sluice_pass_t* pass);

/* After measuring: lays all tensors that `given` does not provide into the context's slot arena, and the scratch behind
 * them. given[tensor] != NULL: the data of all its slots (saved buffers, deferred gradients). */
sluice_status_t sluice_pass_prepare(sluice_pass_t* pass, void* const* given);

/* Whether what a pass takes beside its ops is counted. */
static inline int sluice_pass_is_watched(const sluice_moe_t* moe) {
  return moe->context->trace.capacity > 0 && moe->context->rows->has_host_threads;
}

/* Runs the schedule on the device; adds to the context's statistics and trace. */
sluice_status_t sluice_pass_run(sluice_pass_t* pass);

/* What ranks compare of a schedule; 0 where there is none. */
static inline uint64_t sluice_pass_comm_hash(const sluice_pass_t* pass) {
  return pass->schedule != NULL ? pass->schedule->comm_hash : 0;
}

/* The stream of an op's lane, from within the op. */
static inline sluice_stream_t sluice_pass_stream(const sluice_pass_t* pass, const sluice_op_t* op) {
  return pass->streams[op->lane];
}

/* Address of the rows of (tensor, chunk, local expert) at the chunk's home, and of the chunk's first row (SLOTS). */
void* sluice_pass_rows(const sluice_pass_t* pass, int32_t tensor, int32_t chunk, int32_t local);
void* sluice_pass_chunk(const sluice_pass_t* pass, int32_t tensor, int32_t chunk);
/* The tensor that has a chunk's rows: of the chunk alone, or of the pass. */
sluice_rows_at_t sluice_pass_rows_at(const sluice_pass_t* pass, int32_t tensor, int32_t chunk);
/* The chunk's rows of each local expert, for kernels that take all at once. */
sluice_expert_rows_t sluice_pass_expert_rows(const sluice_pass_t* pass, int32_t chunk);
/* Whether the rows of an expert lie one after the other over all chunks. */
int sluice_pass_is_joined(const sluice_pass_t* pass, int32_t tensor);

#endif /* SLUICE_BACKEND_MOE_PASS_PASS_H_ */
