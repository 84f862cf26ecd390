// SPDX-License-Identifier: Apache-2.0
/* Pipelines: the stages of a model on the ranks of a communicator, scheduled by the messages that have arrived.
 *
 * A model is cut into p * v virtual stages in the order of its layers; each of the p ranks holds v of them. A batch is
 * cut into m micro-batches, and each passes through all virtual stages forward and, as gradients, backward. A policy
 * decides which of the ready micro-batches a rank runs next. Messages are sent and received while the stages compute.
 * Every batch ends with a flush, so that the optimizer sees the gradients that one device would have computed:
 * forwards, backwards and weight gradients of a virtual stage run in the order of micro-batches, so gradients are
 * accumulated as on one device.
 *
 * The host owns modules, tensors, parameters, gradients and optimizer. The library owns the order of ops, the messages,
 * and the memory into which messages are received.
 *
 * Source: AxoNN (Singh and Bhatele, 2022), Algorithm 2; docs/pipeline.md has the source of each policy. */
#ifndef SLUICE_PIPELINE_H_
#define SLUICE_PIPELINE_H_

#include "sluice/base.h"
#include "sluice/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_pipeline_s sluice_pipeline_t;

/* ---- callbacks --------------------------------------------------------------------------------------------------- */

/* The tensors that one virtual stage sends to the next for one micro-batch: any number, of any DLPack type and shape.
 * They may differ between micro-batches. Both ends see the same list in the same order. */
typedef struct sluice_stage_tensors_s {
  const sluice_tensor_t* tensors; /* [num_tensors] in host memory, row-major without gaps; data is NULL only if a tensor
                                     has no elements */
  int32_t num_tensors;            /* >= 0; a message may have 0 tensors */
  int32_t is_local; /* of an input or an output_grad: 1 if both virtual stages are on this rank. The tensors are then
                       those that the host itself returned, with its own addresses */
  uint64_t word;    /* for use by the host: delivered unchanged to the other end */
} sluice_stage_tensors_t;

/* One op of a micro-batch in a virtual stage, for its callback. Pointers that do not apply are NULL. Tensors that
 * arrived may be read and written until the last op of this micro-batch in this virtual stage has returned: weight_grad
 * if weight gradients are separate, else backward, or forward if there is no backward. sluice_pipeline_keep extends
 * this time. */
typedef struct sluice_stage_call_s {
  size_t struct_size; /* the size of this struct as the library was compiled with it */
  int32_t virtual_stage;
  int32_t micro_batch;
  int32_t is_first; /* no input: the host loads its data here */
  int32_t is_last;  /* no output_grad: the host computes its loss here */
  int32_t forward_only;
  int32_t reserved;                          /* 0 */
  const sluice_stage_tensors_t* input;       /* the output of the previous virtual stage; NULL if is_first */
  const sluice_stage_tensors_t* output;      /* the result of forward; NULL in load and forward */
  const sluice_stage_tensors_t* output_grad; /* the result of backward of the next virtual stage; in backward and
                                                weight_grad, NULL if is_last */
} sluice_stage_call_t;

enum { SLUICE_STAGE_OUTPUT = 0, SLUICE_STAGE_INPUT_GRAD = 1 };

/* Callbacks of the host. They are called on the thread that is in sluice_pipeline_run_batch, one at a time. They return
 * SLUICE_OK, or a status and fill out_failure (message, native_code): the batch then fails on every rank, with this
 * message and the rank's name. They must not throw. They must not call sluice_pipeline_run_batch or _destroy of their
 * pipeline.
 *
 * out_result is empty on entry. Its array of tensors is read before the next callback; the data of the tensors are
 * borrowed until `release`. */
typedef struct sluice_pipeline_callbacks_s {
  size_t struct_size; /* the size of this struct as the host was compiled with it */
  /* Optional. Called before the forward of a micro-batch in the first and in the last virtual stage (once if they are
   * the same), to load inputs and labels. Called in the order of micro-batches. */
  sluice_status_t (*load)(void* user, const sluice_stage_call_t* call, sluice_host_failure_t* out_failure);
  /* Computes the forward. out_result: the tensors for the next virtual stage; ignored if is_last. */
  sluice_status_t (*forward)(void* user, const sluice_stage_call_t* call, sluice_stage_tensors_t* out_result,
                             sluice_host_failure_t* out_failure);
  /* Optional. Called directly after the forward in the last virtual stage. */
  sluice_status_t (*loss)(void* user, const sluice_stage_call_t* call, sluice_host_failure_t* out_failure);
  /* Computes the gradient of the input, and that of the weights unless weight gradients are separate. out_result: the
   * tensors for the previous virtual stage; ignored if is_first. Required unless every batch is forward only. */
  sluice_status_t (*backward)(void* user, const sluice_stage_call_t* call, sluice_stage_tensors_t* out_result,
                              sluice_host_failure_t* out_failure);
  /* Computes the gradient of the weights. Required if weight gradients are separate. */
  sluice_status_t (*weight_grad)(void* user, const sluice_stage_call_t* call, sluice_host_failure_t* out_failure);
  /* Optional. The library no longer reads the result `which` (SLUICE_STAGE_OUTPUT of forward, SLUICE_STAGE_INPUT_GRAD
   * of backward). Called once for each result that had a tensor, also in batches that fail. */
  void (*release)(void* user, int32_t which, int32_t virtual_stage, int32_t micro_batch);
  /* Optional. Returns non-zero when the host wants to end the batch (Ctrl-C). The library asks a few times a second
   * while the thread waits. The batch then fails as if a callback had failed. */
  int32_t (*is_interrupted)(void* user);
  /* Optional; on all ranks or on none. Called once for each virtual stage in a batch that is not forward_only, after
   * the last micro-batch has produced its gradients. Nothing in this batch changes them any more, so they may be
   * reduced over replicas while other stages drain. Start the reduction and return: the reduction then overlaps the
   * drain, and the host waits for it after the batch. The replicas of a column (num_replicas) are called in the same
   * order. A batch may still fail elsewhere: its gradients are then invalid, whether reduced or not, and the host must
   * cancel a reduction that not all replicas have started. micro_batch of the call is the last one; the call has no
   * tensors. */
  sluice_status_t (*reduce)(void* user, const sluice_stage_call_t* call, sluice_host_failure_t* out_failure);
} sluice_pipeline_callbacks_t;

/* ---- configuration ----------------------------------------------------------------------------------------------- */

/* The stage that holds virtual stage c. LOOPED: c mod p. V: down the stages and up again. */
enum { SLUICE_PIPELINE_LOOPED = 0, SLUICE_PIPELINE_V = 1 };

/* Equal on all ranks of the pipeline, except for fields that are marked "of this rank". */
typedef struct sluice_pipeline_config_s {
  size_t struct_size;              /* set by sluice_pipeline_config_init */
  const sluice_ext_header_t* next; /* NULL */
  const char* policy;     /* "message_driven", "backward_first", "1f1b_hint", "1f1b", "gpipe", "zero_bubble", "looped",
                             "v"; "adaptive": chosen in the same way as in_flight, from the times measured in the first
                             batch; NULL = "backward_first" */
  const char* partition;  /* a description of how the layers are cut, for example "0,4,8,12"; or NULL. The ranks compare
                             the text; the library does not interpret it */
  int32_t num_virtual;    /* v; default 1. p * v is at most 128, m * v at most 1024 */
  int32_t placement;      /* SLUICE_PIPELINE_*; -1 = the placement of the policy, else looped */
  int32_t separate_wgrad; /* 1: weight gradients are separate ops; -1 = the setting of the policy, else 0 */
  int32_t receives_ahead; /* inputs that may arrive in addition to those in flight; default 1 */
  int32_t in_flight;      /* L: forwards of a virtual stage whose backward has not run. 0: chosen by the library. The
                             first batch runs with p, or with what fits, and the times measured in it decide for later
                             batches */
  int32_t held;           /* backwards of a virtual stage whose weight gradient has not run. 0: as many as the
                             policy's order has; otherwise at most L if L is chosen by the library, and at most m if
                             L is given */
  const int32_t* in_flight_of;      /* [p * v], replaces in_flight, by virtual stage; or NULL */
  uint64_t memory_budget;           /* of this rank: limit in bytes for micro-batches in flight and held, and for inputs
                                       ahead. 0: no limit. Requires activation_bytes */
  const uint64_t* activation_bytes; /* [v] of this rank: bytes of a micro-batch in flight in each of its virtual stages,
                                       with input, output and their gradients; or NULL */
  const uint64_t* held_bytes;       /* [v] of this rank: bytes of a micro-batch that is held for its weight gradient; or
                                       NULL */
  /* Replicas of the whole pipeline, if its stages hold expert-parallel layers: all replicas are ranks of one
   * communicator. The replicas of one stage form a column. They take part in the same collectives inside forwards and
   * backwards, so they run these ops in one order: replica 0 decides the order and sends it ahead in a small message.
   * Replicas without common collectives have a communicator and a pipeline each. A batch fails in all replicas or in
   * none. */
  int32_t num_replicas;       /* default 1 */
  int32_t replica;            /* of this rank, [0, num_replicas); -1 = rank / p */
  int32_t stage;              /* of this rank, [0, p); -1 = rank mod p */
  int32_t reserved;           /* 0 */
  const int32_t* has_experts; /* [v] of this rank: 1 if forward and backward of the virtual stage have collectives with
                                 the other replicas; NULL: none has */
} sluice_pipeline_config_t;

SLUICE_EXPORT void sluice_pipeline_config_init(sluice_pipeline_config_t* out_config, size_t struct_size);

/* Creates a pipeline.
 *
 *   comm       the ranks of the pipeline: p * num_replicas ranks, p at most 64. Retained. NULL: one rank. Other
 *              exchanges over comm may run at the same time as batches. A communicator has one pipeline at a time
 *   callbacks  copied; `user` is borrowed until sluice_pipeline_destroy
 *
 * Collective over comm, with an equal config on all ranks. out_pipeline: new, sluice_pipeline_destroy. Thread-safe;
 * comm-exclusive. Errors after which comm stays usable: INVALID_ARGUMENT, ABI, STATE (comm has a pipeline), MISMATCH
 * (ranks differ in the config or in the version of the library; the message says which ranks and in what), EXTERNAL (a
 * rank cannot be reached over TCP, with the address), PEER_REFUSED (another rank had one of these, with its name).
 * NO_MEMORY may end comm, and an error of its exchanges does. */
SLUICE_API sluice_status_t sluice_pipeline_create(const sluice_pipeline_config_t* config, sluice_comm_t* comm,
                                                  const sluice_pipeline_callbacks_t* callbacks, void* user,
                                                  sluice_pipeline_t** out_pipeline);
/* Destroys a pipeline. Not collective. Tensors that were kept stay valid until sluice_pipeline_give_back. */
SLUICE_EXPORT void sluice_pipeline_destroy(sluice_pipeline_t* pipeline);

/* ---- batches ----------------------------------------------------------------------------------------------------- */

typedef struct sluice_pipeline_batch_s {
  size_t struct_size;        /* set by sluice_pipeline_batch_init */
  int32_t num_micro_batches; /* m; equal on all ranks */
  int32_t forward_only;      /* 1: evaluation, no backward; equal on all ranks */
} sluice_pipeline_batch_t;

SLUICE_EXPORT void sluice_pipeline_batch_init(sluice_pipeline_batch_t* out_batch, size_t struct_size);

/* Runs a batch: calls all callbacks of this rank. Collective over the pipeline. The batch succeeds on all ranks or on
 * none, so that no rank updates parameters from a batch that failed elsewhere. Host-complete: when it returns, nothing
 * is borrowed. Threads: one call at a time on a pipeline, others get BUSY.
 *
 * Errors after which the next batch works: INVALID_ARGUMENT (for instance, a callback returned something that cannot be
 * sent), ABI, BUSY, NO_MEMORY, OVER_BUDGET (not even one micro-batch fits), EXTERNAL and any other status that a
 * callback returned (with its message; also if the host interrupted the batch), MISMATCH (ranks differ in m or in
 * forward_only), PEER_REFUSED (another rank had one of these, with its name and message; reported within a second, or
 * when the callback that is running here has returned). Errors that end the pipeline: PEER_LOST (names the rank),
 * TIMED_OUT, ABORTED; also NO_MEMORY or OVER_BUDGET if there was no memory for an arriving message (the error names its
 * sender): later batches return the same status. */
SLUICE_API sluice_status_t sluice_pipeline_run_batch(sluice_pipeline_t* pipeline, const sluice_pipeline_batch_t* batch);

/* Makes the current batch, and every later one, return ABORTED on this rank in bounded time; the other ranks get
 * PEER_LOST or ABORTED. Any thread; may be repeated. */
SLUICE_EXPORT void sluice_pipeline_abort(sluice_pipeline_t* pipeline);

/* Keeps the memory of tensors that arrived beyond the end of the micro-batch and of the pipeline. received: call->input
 * or call->output_grad, inside a callback. out_kept: new, sluice_pipeline_give_back; NULL for tensors that are local or
 * have no bytes, because there is nothing to keep. Threads: that of the callback. Errors: INVALID_ARGUMENT,
 * NO_MEMORY. */
SLUICE_API sluice_status_t sluice_pipeline_keep(sluice_pipeline_t* pipeline, const sluice_stage_tensors_t* received,
                                                void** out_kept);
/* Releases memory that sluice_pipeline_keep kept. Any thread; accepts NULL. */
SLUICE_EXPORT void sluice_pipeline_give_back(void* kept);

/* ---- notes ------------------------------------------------------------------------------------------------------- */

enum { SLUICE_PIPELINE_MAX_NOTE = 1024 };

/* Sets numbers of the host that are sent with the message that ends each batch; no additional message is sent. After
 * the batch all ranks have the same measurements of all ranks, so they can make the same decision without further
 * communication.
 *
 *   numbers  [count], borrowed until the next call or the end of the pipeline. They are read on the thread that is in
 *            sluice_pipeline_run_batch, after the last callback of this rank has returned, so the host may write them
 *            in callbacks. NULL and 0: none. Ranks may have different counts, at most SLUICE_PIPELINE_MAX_NOTE
 *
 * Any thread, not while a batch runs. Errors: INVALID_ARGUMENT, BUSY. */
SLUICE_API sluice_status_t sluice_pipeline_set_note(sluice_pipeline_t* pipeline, const double* numbers, int32_t count);
/* Returns the numbers that a rank of the pipeline's communicator gave with the newest batch, the same on all ranks.
 * Copies up to `capacity` numbers; *out_count is how many there are. Any thread, not while a batch runs. Errors:
 * INVALID_ARGUMENT, BUSY, STATE (there is no batch, or it has failed). */
SLUICE_API sluice_status_t sluice_pipeline_get_note(sluice_pipeline_t* pipeline, int32_t rank, double* out_numbers,
                                                    int32_t capacity, int32_t* out_count);

/* ---- statistics -------------------------------------------------------------------------------------------------- */

typedef struct sluice_pipeline_stats_s {
  size_t struct_size;     /* set by the caller: sizeof */
  uint64_t num_batches;   /* batches that succeeded */
  uint64_t num_failed;    /* batches that failed */
  uint64_t batch_ns;      /* wall time in batches */
  uint64_t callback_ns;   /* part of batch_ns: time in callbacks */
  uint64_t wait_ns;       /* part of batch_ns: time with nothing ready, until a message had arrived or had been sent */
  uint64_t agree_ns;      /* part of batch_ns: time after the last op until all ranks had ended */
  uint64_t messages_sent; /* messages to other ranks with activations and gradients */
  uint64_t bytes_sent;    /* bytes of the tensors of these messages */
  uint64_t bytes_received;
  /* The following fields describe the last batch. */
  uint64_t peak_bytes;         /* peak of the micro-batches in flight and held, by the byte counts of the config */
  uint64_t planned_bytes;      /* bytes that the limits allow */
  uint64_t most_message_bytes; /* peak of the memory that held arrived messages */
  int32_t in_flight;           /* the largest L in force on a virtual stage of this rank */
  int32_t most_in_flight;      /* forwards begun whose backward had not ended, over the virtual stages of this rank */
  int32_t most_held;           /* backwards ended whose weight gradient had not */
  int32_t is_chosen;           /* 1: L was chosen from measurements */
  const char* policy;          /* the policy in force; immutable. NULL: no batch has run */
} sluice_pipeline_stats_t;

/* Returns the statistics of the pipeline. Any thread. Errors: INVALID_ARGUMENT, ABI, BUSY (a batch runs). */
SLUICE_API sluice_status_t sluice_pipeline_get_stats(sluice_pipeline_t* pipeline, sluice_pipeline_stats_t* out_stats);

/* An op of the last batch on this rank. */
typedef struct sluice_stage_event_s {
  uint64_t begin_ns; /* CLOCK_MONOTONIC: when the callback was called, or the message posted */
  uint64_t end_ns;   /* when the callback had returned, or the message had arrived or had been sent */
  const char* op;    /* immutable name: "forward", "send_activation", ... as in docs/pipeline.md */
  int32_t virtual_stage;
  int32_t micro_batch;
  int32_t peer; /* the rank at the other end of a message; -1 */
  int32_t reserved;
  uint64_t bytes; /* bytes of a message's tensors */
} sluice_stage_event_t;

/* Copies up to `capacity` of these events in the order of their ends; *out_count is how many there are. Any thread, not
 * while a batch runs. Errors: INVALID_ARGUMENT, BUSY. */
SLUICE_API sluice_status_t sluice_pipeline_get_events(sluice_pipeline_t* pipeline, sluice_stage_event_t* out_events,
                                                      int64_t capacity, int64_t* out_count);

enum { SLUICE_PIPELINE_MEASURED = 0, SLUICE_PIPELINE_PREDICTED = 1 };

/* Returns the last batch as JSON for pictures, with a terminating zero: {"events": [...]}, as
 * `sluice.timeline.from_trace` reads it, with the stage as rank, the virtual stage as layer and the micro-batch as
 * chunk. MEASURED: the ops of this rank, by CLOCK_MONOTONIC. PREDICTED: the ops of all stages, simulated with the times
 * that all ranks measured in this batch, from its start on this rank. On entry *inout_bytes is the room in `text`; on
 * return it is the size, zero included. text may be NULL to ask for the size. Any thread, not while a batch runs.
 * Errors: INVALID_ARGUMENT (for instance too little room), BUSY, STATE (there is no batch; PREDICTED: it has failed),
 * NO_MEMORY. */
SLUICE_API sluice_status_t sluice_pipeline_timeline_json(sluice_pipeline_t* pipeline, int32_t which, char* text,
                                                         uint64_t* inout_bytes);

/* ---- layer migration --------------------------------------------------------------------------------------------- */

/* Migration of a layer between neighbouring stages while a batch runs, without a drain. The layer is at the cut between
 * the *upper* stage and the *lower* stage, which gets its activations from the upper one. The layer's state is sent in
 * the background of the batch (sluice/migration.h), starting after an update of the optimizer. The rules below decide
 * which of the two stages runs the layer for which micro-batch. Messages are the same as without a move, and carry two
 * bits in their words:
 *
 *   activation (upper to lower)  whether the layer has run: SLUICE_LAYER_MOVE_RAN
 *   gradient (lower to upper)    whether the lower stage has the layer's parameters: SLUICE_LAYER_MOVE_HAS
 *
 * Before each op the receiver of the layer checks whether the parameters have arrived (sluice_migration_read_early).
 * Each backward runs the layer on the stage where its forward ran it. The receiver stores its gradients of each
 * micro-batch separately until it has the sum of the other stage's gradients. It then adds the stored gradients to that
 * sum in the order of micro-batches. The other stage's sum is final when that stage runs no further forward or backward
 * of the layer. It may then be sent at once (sluice_migration_mark_still); otherwise it is sent with the commit of both
 * stages, after the batch and before the update. So each micro-batch runs the layer forward and backward once, with the
 * parameters of the last update, and sums have the bits of a batch without a move. If the parameters arrive too late to
 * switch within the batch, the layer moves at the flush. The calls below are pure functions; NULL means a layer that
 * does not move. */
enum { SLUICE_LAYER_MOVE_UPPER = 0, SLUICE_LAYER_MOVE_LOWER = 1 };
enum { SLUICE_LAYER_MOVE_RAN = 1, SLUICE_LAYER_MOVE_HAS = 2 };

/* State of one of the two stages in one batch. Plain data of the host, written by the calls below. */
typedef struct sluice_layer_move_s {
  int32_t role;     /* SLUICE_LAYER_MOVE_UPPER, _LOWER */
  int32_t to_lower; /* 1: the layer goes from the upper stage to the lower one */
  int32_t has;      /* of the receiver: the parameters have arrived; of the upper stage also: the lower stage has
                       reported them */
  int32_t trigger;  /* of the upper stage: the first micro-batch for which the receiver runs the layer; -1: none yet */
  int32_t num_open; /* of the stage that the layer leaves: forwards that ran the layer here and whose backward has not
                       ended */
  int32_t is_over;  /* of the stage that the layer leaves: 1 after a forward that did not run the layer here; no later
                       one will */
} sluice_layer_move_t;

/* Initialises the move; call it before each batch in which the layer may move. Any thread; only one at a time may use a
 * move. */
SLUICE_EXPORT void sluice_layer_move_begin(int32_t role, int32_t to_lower, sluice_layer_move_t* out_move);
/* Records that the parameters have arrived at this stage, which receives the layer. Any thread. */
SLUICE_EXPORT void sluice_layer_move_arrived(sluice_layer_move_t* move);
/* Records that the upper stage has received a gradient with this word. Any thread. */
SLUICE_EXPORT void sluice_layer_move_heard(sluice_layer_move_t* move, uint64_t word);
/* Returns non-zero if this stage runs the layer in the forward of a micro-batch, and therefore in its backward. word:
 * that of the activation that the lower stage received. Call it in the order of micro-batches, once for each. Any
 * thread. */
SLUICE_EXPORT int32_t sluice_layer_move_runs(sluice_layer_move_t* move, int32_t micro_batch, uint64_t word);
/* Returns the word of an activation of the upper stage. ran: the result of sluice_layer_move_runs. Any thread. */
SLUICE_EXPORT uint64_t sluice_layer_move_activation_word(int32_t ran);
/* Returns the word of a gradient of the lower stage. Any thread. */
SLUICE_EXPORT uint64_t sluice_layer_move_gradient_word(const sluice_layer_move_t* move);
/* Records that the backward of a micro-batch whose forward ran the layer here has ended. Any thread. */
SLUICE_EXPORT void sluice_layer_move_ended(sluice_layer_move_t* move);
/* Returns non-zero if the layer leaves this stage and its gradients of this batch do not change here any more. Any
 * thread. */
SLUICE_EXPORT int32_t sluice_layer_move_is_final(const sluice_layer_move_t* move);
/* Returns non-zero if this stage receives the layer and stores its gradients separately. Any thread. */
SLUICE_EXPORT int32_t sluice_layer_move_receives(const sluice_layer_move_t* move);

/* ---- prediction -------------------------------------------------------------------------------------------------- */

/* A batch to simulate. Pure data: the simulation uses no communicator and no clock. Seconds may be in any unit, the
 * same everywhere. */
typedef struct sluice_pipeline_workload_s {
  size_t struct_size;              /* set by sluice_pipeline_workload_init */
  const sluice_ext_header_t* next; /* NULL */
  const char* policy;              /* as in the config; or "deepspeed": DeepSpeed's own order, with sends and receives
                                      that block the stage, for comparison */
  int32_t num_stages;              /* p, at most 64 */
  int32_t num_virtual;             /* v; 1 */
  int32_t num_micro_batches;       /* m */
  int32_t placement;               /* as in the config, with -1 */
  int32_t separate_wgrad;          /* as in the config, with -1 */
  int32_t receives_ahead;          /* 1 */
  int32_t in_flight;  /* L of every virtual stage. 0: the smallest L whose batch is within 1 % of the best, or the L of
                         the policy's order */
  int32_t rendezvous; /* 1: a message starts when both ends wait for it; 0: sends are buffered */
  /* The following arrays have [p * v] entries, by virtual stage, and are for one micro-batch. */
  const double* forward_seconds;
  const double* backward_seconds; /* time of the gradient of the input */
  const double* weight_seconds;  /* of the weight gradients, which run directly after the input gradient unless they are
                                    separate. NULL: 0 */
  const double* message_seconds; /* of a message from c to c + 1, and of the gradient back; the last entry is not
                                    used. NULL: 0 */
  const uint64_t* activation_bytes; /* bytes of a micro-batch in flight, with input, output and their gradients.
                                       NULL: 0 */
  const uint64_t* held_bytes;       /* bytes of a micro-batch that is held for its weight gradient. NULL: 0 */
  const uint64_t* memory_budget;    /* [p] limit of the bytes in flight, held and ahead; 0: no limit. NULL: none */
  int32_t shares_cards; /* 1: each stage has one network card, which messages to both its neighbours share at max-min
                           fair rates; 0: one link for each direction between two stages */
  int32_t reserved;     /* 0 */
  /* Optional: returns the seconds of an op or of a message (its send, from the time when its link takes it), to model
   * jitter, a slow stage or a link that stalls. `seconds` is the time from the arrays above, which the result replaces.
   * op: as in sluice_stage_event_t. Called on the thread that predicts, at the start of each op that takes time, in
   * each batch that is simulated: several batches if limits or the policy are open. A result that is not finite or is
   * below 0 is INVALID_ARGUMENT. */
  double (*op_seconds)(void* user, const char* op, int32_t virtual_stage, int32_t micro_batch, double begin_seconds,
                       double seconds);
  void* user;
  const double* reduce_seconds; /* [p * v]: time to reduce all gradients of a virtual stage, once per batch, in parallel
                                   with the stage's thread; the reductions of one stage run one after another. NULL:
                                   nothing is reduced */
} sluice_pipeline_workload_t;

SLUICE_EXPORT void sluice_pipeline_workload_init(sluice_pipeline_workload_t* out_workload, size_t struct_size);

/* Prediction for one stage. */
typedef struct sluice_stage_prediction_s {
  double busy_seconds;    /* time in forwards, backwards and weight gradients */
  double bubble;          /* share of the batch in which the stage is idle */
  uint64_t planned_bytes; /* bytes that its limits allow */
  uint64_t peak_bytes;    /* peak of the bytes in flight and held */
  int32_t in_flight;      /* the largest L in force on its virtual stages */
  int32_t most_in_flight; /* maximum over its virtual stages */
  int32_t most_held;
  int32_t reserved; /* 0 */
} sluice_stage_prediction_t;

typedef struct sluice_pipeline_prediction_s {
  size_t struct_size; /* set by the caller: sizeof */
  double seconds;     /* time of the batch */
  double bubble;      /* idle share of the time of all stages */
  int32_t in_flight;  /* the largest L in force */
  int32_t is_chosen;  /* 1: L was chosen */
  const char* policy; /* in force; immutable */
} sluice_pipeline_prediction_t;

/* Simulates a batch. out_stages: [p], or NULL. Any thread. Errors: INVALID_ARGUMENT (among others, arguments that the
 * policy does not support), ABI, OVER_BUDGET (not even one micro-batch fits, or the policy's order does not; the
 * message names the stage), NO_MEMORY. */
SLUICE_API sluice_status_t sluice_pipeline_predict(const sluice_pipeline_workload_t* workload,
                                                   sluice_pipeline_prediction_t* out_prediction,
                                                   sluice_stage_prediction_t* out_stages);

/* Returns the name of a policy that a config may use, with index from 0; NULL after the last. Immutable. */
SLUICE_EXPORT const char* sluice_pipeline_policy_name(int32_t index);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_PIPELINE_H_ */
