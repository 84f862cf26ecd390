// SPDX-License-Identifier: Apache-2.0
/* One pass in execution: a template, a binding, the slots of each tensor, and the host's tensors. */
#pragma once

#include "backend/comm/exchange_arrays.h"
#include "backend/model/pass_sizes.h"
#include "backend/moe/context/row_memory.h"
#include "backend/moe/pass/host_times.h"
#include "backend/moe/routing/binding.h"

/* Layout of a tensor's rows. */
typedef enum sluice_layout_e {
  SLUICE_LAYOUT_NONE = 0,
  SLUICE_LAYOUT_SLOTS,       /* consecutive slots, each as large as the largest chunk that uses it, in expert order */
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

/* CPU time of the communication lane's thread from its first to its last job of a pass. Only this thread writes it. */
typedef struct sluice_comm_jobs_s {
  int32_t first, last; /* -1: no job */
  uint64_t began_cpu_ns;
  uint64_t cpu_ns;
} sluice_comm_jobs_t;

typedef struct sluice_slot_poisoner_s sluice_slot_poisoner_t;

/* On a device an op may leave its exchange to the next op (ops/exchange_ops.h): both end with that op. */
enum { SLUICE_EXCHANGE_DONE = 0, SLUICE_EXCHANGE_LEFT, SLUICE_EXCHANGE_TAKEN };

struct sluice_travel_s; /* ops/travel.h */
struct sluice_wire_s;   /* ops/wire.h */
struct sluice_pass_s;
/* Runs one op of the pass, by kind; index: of the op. */
typedef sluice_status_t (*sluice_run_op_fn_t)(struct sluice_pass_s* pass, const sluice_op_t* op, int32_t index);

typedef struct sluice_pass_s {
  sluice_context_t* context;
  sluice_moe_t* moe;
  sluice_pass_memory_t* memory; /* of this pass and its binding */
  const sluice_template_t* schedule;
  sluice_run_op_fn_t run_op;                 /* runs ops of its direction */
  const struct sluice_travel_s* travel;      /* what ranks send each other */
  sluice_stream_t stream;                    /* the host's; NULL on a CPU */
  sluice_stream_t streams[SLUICE_NUM_LANES]; /* of the lanes, each set by ops of its lane; NULL on a CPU */
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
  /* Scratch of the communication lane, of the compute lane, and records by op. */
  sluice_exchange_arrays_t arrays;
  float* route_send;  /* [largest chunk] route weights to be sent */
  float* gate_recv;   /* [largest chunk; chunks_by_experts: all] returned scalars of the gate */
  float* scalar_recv; /* [largest chunk] received route weights */
  float* gate_send;   /* [largest chunk] gate scalars to be sent: scalar_recv, whose weights were unpacked before,
                         as none arrive meanwhile (grouped) */
  const struct sluice_wire_s* wire; /* communication lane: encoding of the rows to be posted; NULL: plain */
  sluice_comm_request_t* opened;    /* communication lane: the pending rows of the exchange that opened a group */
  int32_t exchange_left;            /* SLUICE_EXCHANGE_* of the last op */
  sluice_stream_t own_stream;       /* communication lane: for own rows, next to the op's exchange; NULL: the lane's */
  sluice_gemm_problem_t* gemms;     /* [sluice_pass_gemms] compute lane */
  char* adapters;                   /* compute lane: factors of adapters in the layer's dtype */
  uint64_t adapter_bytes;           /* bytes of `adapters` */
  sluice_packed_t* packed;          /* NULL, or for each of `gemms` its weight's packed format; zeros between lists */
  void* decoded;                    /* compute lane: memory for weights that a device decodes; NULL: not needed */
  uint64_t decoded_bytes;           /* bytes of `decoded` */
  sluice_op_times_t* times;         /* [num_ops] */
  int32_t is_bounded;               /* the plan has room for it, and its templates keep to the plan's rings */
  int32_t captured;                 /* the host's stream is being captured into a graph */
  int32_t has_device_times;         /* times are measured on the device */
  int32_t is_marked;                /* lanes have marked its begin, for its time */
  int32_t has_begun;                /* ops are being submitted: rows may have been sent */
  int32_t is_complete; /* every op was submitted: exchanges ran even after a failure, so the ranks are in step */
  uint64_t begin_ns, end_ns;
  sluice_comm_jobs_t comm_jobs;
  sluice_host_times_t host;
  sluice_slot_poisoner_t* poisoner; /* slot_poisoner.h; NULL: slots are not poisoned */
  uint64_t agreed_ns;               /* when the header exchange had ended */
  uint64_t header_ns;               /* duration of that exchange */
  int32_t leaves_wgrad_out;         /* backward: no rank wants gradients of weights */
} sluice_pass_t;

/* Computes pass->slots[tensor].bytes of all tensors, from template and binding. Before slots are allocated. */
sluice_status_t sluice_pass_measure(sluice_pass_t* pass);

/* After measuring: lays all tensors that `given` does not provide into the slot arena, followed by the scratch.
 * given[tensor] != NULL: the data of all its slots (saved buffers, deferred gradients). */
sluice_status_t sluice_pass_prepare(sluice_pass_t* pass, void* const* given);

/* Whether the pass measures the calling thread's time outside of ops. */
static inline int sluice_pass_is_watched(const sluice_moe_t* moe) {
  return moe->context->trace.capacity > 0 && moe->context->rows->has_host_threads;
}

/* Runs the schedule on the device; updates the context's statistics and trace. */
sluice_status_t sluice_pass_run(sluice_pass_t* pass);

/* The hash of the schedule that ranks compare; 0: no schedule. */
static inline uint64_t sluice_pass_comm_hash(const sluice_pass_t* pass) {
  return pass->schedule != NULL ? pass->schedule->comm_hash : 0;
}

/* The stream of an op's lane. Call it within the op. */
static inline sluice_stream_t sluice_pass_stream(const sluice_pass_t* pass, const sluice_op_t* op) {
  return pass->streams[op->lane];
}

/* Address of the rows of (tensor, chunk, local expert) at the chunk's home, and of the chunk's first row (SLOTS). */
void* sluice_pass_rows(const sluice_pass_t* pass, int32_t tensor, int32_t chunk, int32_t local);
void* sluice_pass_chunk(const sluice_pass_t* pass, int32_t tensor, int32_t chunk);
/* The memory that holds a chunk's rows: of the chunk alone, or of the pass. */
sluice_rows_at_t sluice_pass_rows_at(const sluice_pass_t* pass, int32_t tensor, int32_t chunk);
/* The chunk's rows of each local expert, for kernels that process all experts. */
sluice_expert_rows_t sluice_pass_expert_rows(const sluice_pass_t* pass, int32_t chunk);
/* Whether the rows of an expert are contiguous over all chunks. */
int sluice_pass_is_joined(const sluice_pass_t* pass, int32_t tensor);
