/* Pipelines: the stages of a model on the ranks of a communicator, run by what has arrived.
 *
 * A model is cut into p * v virtual stages in the order of its layers; each of the p ranks holds v of them. A batch is
 * cut into m micro-batches, and each goes through all virtual stages forward and, as gradients, backward. Which
 * micro-batch a rank runs next is decided by a policy among what is ready; messages travel beside the computation.
 * Every batch ends with a flush, so that the optimizer sees what one device would have computed: forwards, backwards
 * and weight gradients of a virtual stage keep the order of micro-batches, so gradients fold as on one device.
 *
 * The host owns modules, tensors, parameters, gradients and optimizer. The library owns the order, the messages, and
 * the memory into which messages arrive.
 *
 * Source: AxoNN (Singh and Bhatele, 2022), Algorithm 2; each policy names its own in docs/pipeline.md.
 */
#ifndef SLUICE_PIPELINE_H_
#define SLUICE_PIPELINE_H_

#include "sluice/base.h"
#include "sluice/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_pipeline_s sluice_pipeline_t;

/* ---- callbacks ------------------------------------------------------------------------------------------------ */

/* What goes over one edge for one micro-batch: any number of tensors, of any DLPack type and shape, which may be others
 * for every micro-batch. Both ends see the same list in the same order. */
typedef struct sluice_stage_tensors_s {
  const sluice_tensor_t* tensors; /* [num_tensors] in host memory, row-major without gaps; data NULL only where a tensor
                                     has no elements */
  int32_t num_tensors;            /* >= 0; 0 is a message too */
  int32_t is_local; /* of an input or an output_grad: both virtual stages lie on this rank, so these are the tensors
                       that the host gave itself, with its own addresses */
  uint64_t word;    /* the host's own: carried to the other end as it is */
} sluice_stage_tensors_t;

/* One op of a micro-batch in a virtual stage, for its callback. Pointers NULL where there is nothing. Tensors that
 * arrived may be read and written until the last op of this micro-batch in this virtual stage has returned (weight_grad
 * where it is apart, else backward; forward where there is no backward): sluice_pipeline_keep makes that longer. */
typedef struct sluice_stage_call_s {
  size_t struct_size; /* sizeof this struct as the library knows it */
  int32_t virtual_stage;
  int32_t micro_batch;
  int32_t is_first; /* no input: the host's data begin here */
  int32_t is_last;  /* no output_grad: the host's loss is here */
  int32_t forward_only;
  int32_t reserved;                          /* 0 */
  const sluice_stage_tensors_t* input;       /* the output of the virtual stage before; not where is_first */
  const sluice_stage_tensors_t* output;      /* what forward gave; not in load and forward */
  const sluice_stage_tensors_t* output_grad; /* what backward of the virtual stage behind gave; in backward and
                                                weight_grad, not where is_last */
} sluice_stage_call_t;

enum { SLUICE_STAGE_OUTPUT = 0, SLUICE_STAGE_INPUT_GRAD = 1 };

/* All are called on the thread that is in sluice_pipeline_run_batch, one at a time. They return SLUICE_OK, or a status
 * and fill out_failure (message, native_code): the batch then fails on every rank, with this message and the rank's
 * name. Nothing may be thrown through them. They may not call sluice_pipeline_run_batch or _destroy of their pipeline.
 *
 * out_result comes empty; its array of tensors is read before the next callback, their data are borrowed until
 * `release`. */
typedef struct sluice_pipeline_callbacks_s {
  size_t struct_size; /* sizeof this struct as the host knows it */
  /* Optional. Before the forward of a micro-batch in the first and in the last virtual stage (once where they are one):
   * inputs and labels. In the order of micro-batches. */
  sluice_status_t (*load)(void* user, const sluice_stage_call_t* call, sluice_host_failure_t* out_failure);
  /* out_result: what goes to the next virtual stage; ignored where is_last. */
  sluice_status_t (*forward)(void* user, const sluice_stage_call_t* call, sluice_stage_tensors_t* out_result,
                             sluice_host_failure_t* out_failure);
  /* Optional. Directly behind the forward in the last virtual stage. */
  sluice_status_t (*loss)(void* user, const sluice_stage_call_t* call, sluice_host_failure_t* out_failure);
  /* The gradient of the input, and of the weights where these are not apart. out_result: what goes to the virtual stage
   * before; ignored where is_first. Needed unless every batch is forward only. */
  sluice_status_t (*backward)(void* user, const sluice_stage_call_t* call, sluice_stage_tensors_t* out_result,
                              sluice_host_failure_t* out_failure);
  /* The gradient of the weights. Needed where these are apart. */
  sluice_status_t (*weight_grad)(void* user, const sluice_stage_call_t* call, sluice_host_failure_t* out_failure);
  /* Optional. The library reads the result `which` (SLUICE_STAGE_OUTPUT of forward, SLUICE_STAGE_INPUT_GRAD of
   * backward) no more: once for each result that had a tensor, also of batches that fail. */
  void (*release)(void* user, int32_t which, int32_t virtual_stage, int32_t micro_batch);
  /* Optional. Not 0 when the host wants the batch ended (Ctrl-C); asked a few times a second while the thread waits.
   * The batch then fails as by a callback. */
  int32_t (*is_interrupted)(void* user);
  /* Optional; on all ranks or on none. Once for each virtual stage in a batch that is not forward_only: the last
   * micro-batch has left its gradients, and nothing in this batch changes them any more, so they may be reduced over
   * replicas while other stages drain. Begin that and return: what goes on beside the thread hides behind the drain,
   * and the host waits for it behind the batch. The replicas of a column (num_replicas) are called in one order. A
   * batch may still fail elsewhere: then its gradients count for nothing, reduced or not, and a reduction that not all
   * replicas have begun is the host's to give up. micro_batch of the call is the last; it has no tensors. */
  sluice_status_t (*reduce)(void* user, const sluice_stage_call_t* call, sluice_host_failure_t* out_failure);
} sluice_pipeline_callbacks_t;

/* ---- life ----------------------------------------------------------------------------------------------------- */

/* Which stage holds virtual stage c. Looped: c mod p. V: down the stages and up again. */
enum { SLUICE_PIPELINE_LOOPED = 0, SLUICE_PIPELINE_V = 1 };

/* Equal on all ranks of the pipeline, but for what is "of this rank". */
typedef struct sluice_pipeline_config_s {
  size_t struct_size;              /* set by sluice_pipeline_config_init */
  const sluice_ext_header_t* next; /* NULL */
  const char* policy;     /* "message_driven", "backward_first", "1f1b_hint", "1f1b", "gpipe", "zero_bubble", "looped",
                             "v"; "adaptive": chosen like in_flight, from what the first batch measured; NULL =
                             "backward_first" */
  const char* partition;  /* how the layers are cut, in the host's words, "0,4,8,12"; or NULL. Compared, never read */
  int32_t num_virtual;    /* v; 1. p * v is at most 128, m * v at most 1024 */
  int32_t placement;      /* SLUICE_PIPELINE_*; -1 = the policy's, else looped */
  int32_t weight_apart;   /* 1: weight gradients are ops of their own; -1 = the policy's, else 0 */
  int32_t receives_ahead; /* inputs that may arrive beyond those in flight; 1 */
  int32_t in_flight;      /* L: forwards of a virtual stage whose backward has not run. 0: chosen; the first batch runs
                             with p, or what fits, and what was measured in it decides for those behind it */
  int32_t held;           /* backwards of a virtual stage whose weight gradient has not run. 0: what the policy's order
                             has; else at most L where that is chosen, and m where it is given */
  const int32_t* in_flight_of; /* [p * v], in place of in_flight by virtual stage; or NULL */
  uint64_t memory_budget;      /* of this rank: bytes of micro-batches in flight and held, and of inputs ahead. 0: no
                                  limit. Needs activation_bytes */
  const uint64_t* activation_bytes; /* [v] of this rank: what a micro-batch in flight takes in each of its virtual
                                       stages, with input, output and their gradients; or NULL */
  const uint64_t* held_bytes;       /* [v] of this rank: what one takes that is held for its weight gradient; or NULL */
  /* Replicas of the whole pipeline whose stages hold expert-parallel layers: all are ranks of one communicator. The
   * replicas of a stage, a column, meet in collectives inside of forwards and backwards, so they run these in one
   * order: replica 0 decides, and a small message tells the others ahead. Replicas that do not meet have a communicator
   * and a pipeline each. A batch fails in all replicas or in none. */
  int32_t num_replicas;       /* 1 */
  int32_t replica;            /* of this rank, [0, num_replicas); -1 = rank / p */
  int32_t stage;              /* of this rank, [0, p); -1 = rank mod p */
  int32_t reserved;           /* 0 */
  const int32_t* has_experts; /* [v] of this rank: 1 where forward and backward of the virtual stage meet those of the
                                 other replicas; NULL: nowhere */
} sluice_pipeline_config_t;

SLUICE_EXPORT void sluice_pipeline_config_init(sluice_pipeline_config_t* out_config, size_t struct_size);

/* comm       the ranks of the pipeline: p * num_replicas of them, p at most 64. Retained. NULL: one rank.
 *            Other exchanges of it may go on beside batches; it has one pipeline at a time
 * callbacks  copied; `user` is borrowed until sluice_pipeline_destroy
 *
 * Collective over comm, and alike on all its ranks. out_pipeline: new, sluice_pipeline_destroy. Thread-safe;
 * comm-exclusive. Errors, after which comm stays usable: INVALID_ARGUMENT, ABI, STATE (comm has a pipeline), MISMATCH
 * (ranks differ in the config or in the version of the library: says which, in what), EXTERNAL (a rank cannot be
 * reached over TCP: says where), PEER_REFUSED (another rank had one of these: names it). NO_MEMORY
 * may end comm, and what the exchanges return does. */
SLUICE_API sluice_status_t sluice_pipeline_create(const sluice_pipeline_config_t* config, sluice_comm_t* comm,
                                                  const sluice_pipeline_callbacks_t* callbacks, void* user,
                                                  sluice_pipeline_t** out_pipeline);
/* Not collective. Tensors that were kept stay valid until they are given back. */
SLUICE_EXPORT void sluice_pipeline_destroy(sluice_pipeline_t* pipeline);

/* ---- batches -------------------------------------------------------------------------------------------------- */

typedef struct sluice_pipeline_batch_s {
  size_t struct_size;        /* set by sluice_pipeline_batch_init */
  int32_t num_micro_batches; /* m; equal on all ranks */
  int32_t forward_only;      /* 1: evaluation, no backward; equal on all ranks */
} sluice_pipeline_batch_t;

SLUICE_EXPORT void sluice_pipeline_batch_init(sluice_pipeline_batch_t* out_batch, size_t struct_size);

/* Runs a batch: all callbacks of this rank. Collective over the pipeline. It ends on all ranks or on none, so that no
 * rank updates parameters by a batch that failed elsewhere. Host-complete: when it returns nothing is borrowed.
 * Threads: one call at a time on a pipeline, others get BUSY.
 *
 * Errors, after which the next batch works: INVALID_ARGUMENT (a callback gave what cannot be sent, among others), ABI,
 * BUSY, NO_MEMORY, OVER_BUDGET (not one micro-batch fits), EXTERNAL and whatever else a callback returned (with its
 * message; that the host interrupted the batch), MISMATCH (ranks differ in m or in forward_only), PEER_REFUSED (another
 * rank had one of these: names it, with its message; within a second, or when the callback that runs here has
 * returned).
 * Errors that end the pipeline: PEER_LOST (names the rank), TIMED_OUT, ABORTED; and NO_MEMORY or OVER_BUDGET where it
 * was a message that had no room on arriving (the record names its sender): later batches return the same. */
SLUICE_API sluice_status_t sluice_pipeline_run_batch(sluice_pipeline_t* pipeline, const sluice_pipeline_batch_t* batch);

/* Makes a batch that runs, and every later one, return ABORTED on this rank in bounded time; the other ranks get
 * PEER_LOST or ABORTED. Any thread, repeatable. */
SLUICE_EXPORT void sluice_pipeline_abort(sluice_pipeline_t* pipeline);

/* Keeps the memory of tensors that arrived, beyond the micro-batch and beyond the pipeline. received: call->input or
 * call->output_grad, inside of a callback. out_kept: new, sluice_pipeline_give_back; NULL for tensors that are local or
 * without bytes: there is nothing to keep. Threads: that of the callback. Errors: INVALID_ARGUMENT,
 * NO_MEMORY. */
SLUICE_API sluice_status_t sluice_pipeline_keep(sluice_pipeline_t* pipeline, const sluice_stage_tensors_t* received,
                                                void** out_kept);
/* Any thread; accepts NULL. */
SLUICE_EXPORT void sluice_pipeline_give_back(void* kept);

/* ---- notes ---------------------------------------------------------------------------------------------------- */

enum { SLUICE_PIPELINE_MAX_NOTE = 1024 };

/* Numbers of the host that ride with the end of each batch, which ranks tell each other in any case: no message more.
 * So all ranks know what each has measured in a batch, alike, and decide alike without a word.
 *
 * numbers  [count], borrowed until another call or the pipeline's end, and read on the thread that is in
 *          sluice_pipeline_run_batch when the last callback of this rank has returned: the host may write them in
 *          callbacks. NULL and 0: none. Ranks may have different counts, at most SLUICE_PIPELINE_MAX_NOTE
 *
 * Any thread, not while a batch runs. Errors: INVALID_ARGUMENT, BUSY. */
SLUICE_API sluice_status_t sluice_pipeline_set_note(sluice_pipeline_t* pipeline, const double* numbers, int32_t count);
/* What a rank of the pipeline's communicator gave with the newest batch: alike on all ranks. Copies up to `capacity` of
 * the numbers; *out_count is how many there are. Any thread, not while a batch runs. Errors: INVALID_ARGUMENT, BUSY,
 * STATE (no batch, or it has failed). */
SLUICE_API sluice_status_t sluice_pipeline_get_note(sluice_pipeline_t* pipeline, int32_t rank, double* out_numbers,
                                                    int32_t capacity, int32_t* out_count);

/* ---- what happened -------------------------------------------------------------------------------------------- */

typedef struct sluice_pipeline_stats_s {
  size_t struct_size;     /* set by the caller: sizeof */
  uint64_t num_batches;   /* that ended well */
  uint64_t num_failed;    /* batches */
  uint64_t batch_ns;      /* wall time in batches */
  uint64_t callback_ns;   /* of that in callbacks */
  uint64_t wait_ns;       /* of that with nothing ready: until a message arrived or was gone */
  uint64_t agree_ns;      /* of that behind the last op, until all ranks had ended */
  uint64_t messages_sent; /* to other ranks, with activations and gradients */
  uint64_t bytes_sent;    /* of their tensors */
  uint64_t bytes_received;
  /* Of the last batch. */
  uint64_t peak_bytes;         /* of what was in flight and held, by the config's bytes */
  uint64_t planned_bytes;      /* that the limits allow */
  uint64_t most_message_bytes; /* of memory that held what had arrived */
  int32_t in_flight;           /* the largest L in force on a virtual stage of this rank */
  int32_t most_in_flight;      /* forwards begun whose backward had not ended, over this rank's virtual stages */
  int32_t most_held;           /* backwards ended whose weight gradient had not */
  int32_t is_chosen;           /* 1: L was chosen from what was measured */
  const char* policy;          /* in force; immutable. NULL: no batch has run */
} sluice_pipeline_stats_t;

/* Any thread. Errors: INVALID_ARGUMENT, ABI, BUSY (a batch runs). */
SLUICE_API sluice_status_t sluice_pipeline_get_stats(sluice_pipeline_t* pipeline, sluice_pipeline_stats_t* out_stats);

/* An op of the last batch on this rank. */
typedef struct sluice_stage_event_s {
  uint64_t begin_ns; /* CLOCK_MONOTONIC: the callback was called; the message was posted */
  uint64_t end_ns;   /* it returned; the message had arrived, or was gone */
  const char* op;    /* immutable name: "forward", "send_activation", ... as in docs/pipeline.md */
  int32_t virtual_stage;
  int32_t micro_batch;
  int32_t peer; /* the rank at the other end of a message; -1 */
  int32_t reserved;
  uint64_t bytes; /* of a message's tensors */
} sluice_stage_event_t;

/* Copies up to `capacity` of them in the order of their ends; *out_count is how many there are. Any thread, not while a
 * batch runs. Errors: INVALID_ARGUMENT, BUSY. */
SLUICE_API sluice_status_t sluice_pipeline_get_events(sluice_pipeline_t* pipeline, sluice_stage_event_t* out_events,
                                                      int64_t capacity, int64_t* out_count);

enum { SLUICE_PIPELINE_MEASURED = 0, SLUICE_PIPELINE_PREDICTED = 1 };

/* The last batch as JSON for pictures, with a terminating zero: {"events": [...]}, as `sluice.timeline.from_trace`
 * reads them, with the stage as rank, the virtual stage as layer, the micro-batch as chunk. MEASURED: this rank's ops,
 * by CLOCK_MONOTONIC. PREDICTED: the ops of all stages, simulated with the times that all ranks measured in this batch,
 * from its begin on this rank on. *inout_bytes is the room and then the size, zero included; text may be NULL to ask.
 * Any thread, not while a batch runs. Errors: INVALID_ARGUMENT (too little room among them), BUSY, STATE (no batch;
 * PREDICTED: it has failed), NO_MEMORY. */
SLUICE_API sluice_status_t sluice_pipeline_timeline_json(sluice_pipeline_t* pipeline, int32_t which, char* text,
                                                         uint64_t* inout_bytes);

/* ---- a layer that moves in a batch ---------------------------------------------------------------------------- */

/* A layer at the cut between two neighbours, the *upper* stage and the *lower* one, which gets its activations from
 * there, goes from one to the other while a batch runs, without a drain. Its state travels beside the batch
 * (sluice/migration.h), from an update of the optimizer on. These rules say who runs it for which micro-batch; messages
 * are what they are without a move, and carry two bits in their words:
 *
 *   activation (upper to lower)  whether the layer has run: SLUICE_LAYER_MOVE_RAN
 *   gradient (lower to upper)    whether its parameters lie in the lower stage: SLUICE_LAYER_MOVE_HAS
 *
 * The receiver looks before each op whether the parameters have come (sluice_migration_read_early). Each backward runs
 * the layer where its forward ran it. Gradients that the receiver makes it holds apart, by micro-batch, until it has
 * the sum of the other ones: then what was held is added to it in the order of micro-batches. That sum is final as soon
 * as the layer runs elsewhere and no backward is left here, and may follow at once (sluice_migration_mark_still); else
 * it comes with the commit of both stages, behind the batch and before the update. So each micro-batch runs the layer
 * forward and backward once, with the parameters of the last update, and sums have the bits of a batch in which nothing
 * moves. Parameters that come too late for a trigger go at the flush. The calls below are pure; NULL counts as a layer
 * that does not move. */
enum { SLUICE_LAYER_MOVE_UPPER = 0, SLUICE_LAYER_MOVE_LOWER = 1 };
enum { SLUICE_LAYER_MOVE_RAN = 1, SLUICE_LAYER_MOVE_HAS = 2 };

/* One of the two stages in one batch. Plain data of the host, which the calls below write. */
typedef struct sluice_layer_move_s {
  int32_t role;     /* SLUICE_LAYER_MOVE_UPPER, _LOWER */
  int32_t to_lower; /* 1: the layer goes from the upper stage to the lower one */
  int32_t has;      /* of the receiver: the parameters are here; of the upper stage: or it has heard so */
  int32_t trigger;  /* of the upper stage: the first micro-batch that runs the layer where it goes; -1: none yet */
  int32_t num_open; /* of the stage that it leaves: forwards that ran it here and whose backward has not ended */
  int32_t is_over;  /* and: a forward has not run it here, so none will */
} sluice_layer_move_t;

/* Before each batch in which the layer may move. Any thread; a move is used by one at a time. */
SLUICE_EXPORT void sluice_layer_move_begin(int32_t role, int32_t to_lower, sluice_layer_move_t* out_move);
/* The parameters have come to this stage, which receives the layer. Any thread. */
SLUICE_EXPORT void sluice_layer_move_arrived(sluice_layer_move_t* move);
/* The upper stage has taken a gradient with this word. Any thread. */
SLUICE_EXPORT void sluice_layer_move_heard(sluice_layer_move_t* move, uint64_t word);
/* Not 0 where this stage runs the layer in the forward of a micro-batch, and so in its backward. word: of the
 * activation that the lower stage was given. In the order of micro-batches, once for each. Any thread. */
SLUICE_EXPORT int32_t sluice_layer_move_runs(sluice_layer_move_t* move, int32_t micro_batch, uint64_t word);
/* The word of an activation of the upper stage; ran: what sluice_layer_move_runs said of it. Any thread. */
SLUICE_EXPORT uint64_t sluice_layer_move_activation_word(int32_t ran);
/* The word of a gradient of the lower stage. Any thread. */
SLUICE_EXPORT uint64_t sluice_layer_move_gradient_word(const sluice_layer_move_t* move);
/* The backward of a micro-batch whose forward ran the layer here has ended. Any thread. */
SLUICE_EXPORT void sluice_layer_move_ended(sluice_layer_move_t* move);
/* Not 0 where the layer leaves this stage, and its gradients of this batch do not change here any more. Any thread. */
SLUICE_EXPORT int32_t sluice_layer_move_is_final(const sluice_layer_move_t* move);
/* Not 0 where the layer comes to this stage, which holds its gradients apart. Any thread. */
SLUICE_EXPORT int32_t sluice_layer_move_receives(const sluice_layer_move_t* move);

/* ---- what would happen ---------------------------------------------------------------------------------------- */

/* A batch that nobody runs. Pure data: no ranks, no clock. Seconds in any unit, the same everywhere. */
typedef struct sluice_pipeline_workload_s {
  size_t struct_size;              /* set by sluice_pipeline_workload_init */
  const sluice_ext_header_t* next; /* NULL */
  const char* policy;              /* as in the config; or "deepspeed": DeepSpeed's own order, whose sends and receives
                                      block the stage, to compare with */
  int32_t num_stages;              /* p, at most 64 */
  int32_t num_virtual;             /* v; 1 */
  int32_t num_micro_batches;       /* m */
  int32_t placement;               /* as in the config, with -1 */
  int32_t weight_apart;            /* as in the config, with -1 */
  int32_t receives_ahead;          /* 1 */
  int32_t in_flight;  /* L of every virtual stage. 0: the smallest whose batch is within 1 % of the best, or
                         what the order of the policy has */
  int32_t rendezvous; /* 1: a message begins when both ends wait for it; 0: sends are buffered */
  /* [p * v], by virtual stage, of one micro-batch. */
  const double* forward_seconds;
  const double* backward_seconds; /* of the input's gradient */
  const double*
      weight_seconds; /* of the weights' gradients, which stand behind it where these are not apart. NULL: 0 */
  const double* message_seconds;    /* from c to c + 1, and of the gradient back; of the last nothing. NULL: 0 */
  const uint64_t* activation_bytes; /* of a micro-batch in flight, with input, output and their gradients. NULL: 0 */
  const uint64_t* held_bytes;       /* of one that is held for its weight gradient. NULL: 0 */
  const uint64_t* memory_budget;    /* [p], of what is in flight, held and ahead; 0: no limit. NULL: none */
  int32_t shares_cards; /* 1: each stage has one network card, which messages to both its neighbours share at max-min
                           fair rates; 0: a link of its own for each direction between two stages */
  int32_t reserved;     /* 0 */
  /* Optional: the seconds of an op, or of a message (its send, from when its link takes it), in place of `seconds`,
   * which are those above: jitter, a slow stage, a link that stalls. op: as in sluice_stage_event_t. Called on the
   * thread that predicts, once for each op that takes time, as it begins, in each batch that is simulated: several
   * where limits or the policy are open. What is not finite, or below 0, is INVALID_ARGUMENT. */
  double (*op_seconds)(void* user, const char* op, int32_t virtual_stage, int32_t micro_batch, double begin_seconds,
                       double seconds);
  void* user;
  const double* reduce_seconds; /* [p * v]: of all gradients of a virtual stage, once a batch, beside its stage's
                                   thread; those of a stage one behind the other. NULL: nothing is reduced */
} sluice_pipeline_workload_t;

SLUICE_EXPORT void sluice_pipeline_workload_init(sluice_pipeline_workload_t* out_workload, size_t struct_size);

/* Of one stage. */
typedef struct sluice_stage_prediction_s {
  double busy_seconds;    /* in forwards, backwards and weight gradients */
  double bubble;          /* share of the batch that is not busy */
  uint64_t planned_bytes; /* that its limits allow */
  uint64_t peak_bytes;    /* of what was in flight and held */
  int32_t in_flight;      /* the largest L in force on its virtual stages */
  int32_t most_in_flight; /* over its virtual stages */
  int32_t most_held;
  int32_t reserved; /* 0 */
} sluice_stage_prediction_t;

typedef struct sluice_pipeline_prediction_s {
  size_t struct_size; /* set by the caller: sizeof */
  double seconds;     /* of the batch */
  double bubble;      /* share of all stages' time that is not busy */
  int32_t in_flight;  /* the largest L in force */
  int32_t is_chosen;  /* 1: L was */
  const char* policy; /* in force; immutable */
} sluice_pipeline_prediction_t;

/* out_stages: [p], or NULL. Any thread. Errors: INVALID_ARGUMENT (what the policy does not take among them), ABI,
 * OVER_BUDGET (not one micro-batch fits, or the order of the policy does not: names the stage), NO_MEMORY. */
SLUICE_API sluice_status_t sluice_pipeline_predict(const sluice_pipeline_workload_t* workload,
                                                   sluice_pipeline_prediction_t* out_prediction,
                                                   sluice_stage_prediction_t* out_stages);

/* The policies that a config may name, index from 0 on; NULL behind the last. Immutable. */
SLUICE_EXPORT const char* sluice_pipeline_policy_name(int32_t index);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_PIPELINE_H_ */
