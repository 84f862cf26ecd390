/* The planner: what a choice of (n, restore policy, weight-gradient mode) takes on a machine, which one is best, and
 * why each other one is not. Needs no context, no ranks and no data: machines that one does not have can be asked
 * about.
 *
 * A machine is costs as data: calibrated on the spot, or a named profile. Its JSON form is in docs/tuning.md.
 *
 * Source: prediction by the schedule itself in virtual time, MPMoE's three paradigms of five
 * phases and MPipeMoE eq. 10 as second opinions beside it.
 */
#ifndef SLUICE_PLANNER_H_
#define SLUICE_PLANNER_H_

#include "sluice/context.h"
#include "sluice/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_planner_s sluice_planner_t;

/* machine_json [length] is one machine; it is copied. out_planner: new, sluice_planner_destroy. Immutable: any thread.
 * Errors: INVALID_ARGUMENT naming line or field, what was found and the remedy (unknown fields with the known ones);
 * NO_MEMORY. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_create(const char* machine_json, uint64_t length,
                                                                     sluice_planner_t** out_planner);
SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_planner_destroy(sluice_planner_t* planner); /* accepts NULL */

/* The machine as JSON. *inout_bytes is the room and then the length with the terminating 0; text may be NULL to ask.
 * Any thread. Errors: INVALID_ARGUMENT (too little room). */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_write_machine(const sluice_planner_t* planner, char* text,
                                                                            uint64_t* inout_bytes);

typedef struct sluice_calibration_config_s {
  size_t struct_size;              /* set by sluice_calibration_config_init */
  const sluice_ext_header_t* next; /* NULL */
  int64_t model_width;             /* M of the layers to come; past 4096 it is measured at 4096 */
  int64_t hidden_width;            /* H */
  double seconds;                  /* about so long, in [0.05, 3600]; default 8 */
  const char* cache_dir;           /* folder of machines that were measured before; NULL: SLUICE_CACHE_DIR, else
                                      XDG_CACHE_HOME/sluice, else HOME/.cache/sluice; "": none is read or written */
  int32_t dtype;                   /* SLUICE_DTYPE_F32, _BF16 or _F16 */
  int32_t refresh;                 /* 1: measure although the cache has it */
} sluice_calibration_config_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_calibration_config_init(sluice_calibration_config_t* out_config,
                                                                      size_t struct_size);

/* Measures the machine that the context runs on, through its own GEMMs, communicator and lanes, or takes it from the
 * cache. Collective: every rank calls it with equal numbers, and gets the same machine. Progress goes to the log
 * callback at SLUICE_LOG_INFO. A cached file that is damaged, of another version, or not the same on all ranks is
 * measured again, with a word at SLUICE_LOG_WARN. Takes tens of MB
 * from the process while it runs. out_planner: new, sluice_planner_destroy. Context-exclusive. Errors:
 * INVALID_ARGUMENT, ABI, BUSY, NO_MEMORY, UNSUPPORTED (more than 256 ranks), what GEMMs, exchanges and a CUDA device
 * report. A CUDA context is measured by its device's clock, on its default stream. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_calibrate(sluice_context_t* context,
                                                                        const sluice_calibration_config_t* config,
                                                                        sluice_planner_t** out_planner);

/* What is asked about. The rank that is timed is the fullest; the others wait for it. */
typedef struct sluice_planner_workload_s {
  size_t struct_size;              /* set by sluice_planner_workload_init */
  const sluice_ext_header_t* next; /* NULL */
  int64_t model_width;             /* M */
  int64_t hidden_width;            /* H; of callback experts what they amount to */
  int64_t num_tokens;              /* T >= 1 of each rank */
  uint64_t memory_budget;          /* bytes on each rank over all layers; 0: none */
  double skew;                     /* rows of the fullest rank over those of balanced routing, >= 1; default 1 */
  int32_t num_experts;             /* E, divisible by W */
  int32_t top_k;                   /* K */
  int32_t world_size;              /* W >= 1 */
  int32_t dtype;                   /* SLUICE_DTYPE_F32, _BF16 or _F16 */
  int32_t gated;                   /* SLUICE_GATED_* */
  int32_t callback_experts;        /* 0 or 1 */
  int32_t max_outstanding;         /* >= 1: forwards without their backward, over all layers */
  int32_t reserved;                /* 0; end of the first layout */
  uint64_t host_memory_budget;     /* bytes of offloaded rows of max_outstanding forwards; 0: no limit of their own */
  int32_t deduplicate;             /* SLUICE_DEDUPLICATE_* but ADAPTIVE; NODES: by the machine's ranks_per_node */
  int32_t chunking;                /* SLUICE_CHUNKING_*, as sluice_moe_config_t has it; default ADAPTIVE */
  /* [num_chunks of the choice], or NULL: the policy of each chunk in place of the choice's restore_input or
   * restore_pre_activation, as in sluice_moe_config_t. Read during the call. */
  const int32_t* restore_input_of;
  const int32_t* restore_pre_activation_of;
  int32_t kept_chunks;   /* predict, under a budget: of the choice's num_chunks the first ones that its policies speak
                            of; the rest are sent and computed again. 0: all. choose: 0 */
  int32_t may_keep_part; /* choose: 1: a policy that does not fit for all chunks is a candidate for as many of the first
                            ones as fit, where both policies are open, as in plans; 0: for all chunks alone */
  int32_t activation;    /* SLUICE_ACTIVATION_* of the experts; IDENTITY (the default): not said, priced as GELU */
  int32_t grouped; /* predict: 1: exchanges are grouped (SLUICE_GROUPING_ON); no part of plans, so 0 under a budget.
                      choose: 0 */
} sluice_planner_workload_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_planner_workload_init(sluice_planner_workload_t* out_workload,
                                                                    size_t struct_size);

/* One choice. ADAPTIVE is not a choice: predict takes none of it, but where the workload has the tensor's list. */
typedef struct sluice_planner_choice_s {
  int32_t num_chunks;             /* n in [1, 256] */
  int32_t restore_input;          /* SLUICE_RESTORE_KEEP, _OFFLOAD, _REDISPATCH, with the workload's list _BY_CHUNK */
  int32_t restore_pre_activation; /* SLUICE_RESTORE_KEEP, _OFFLOAD, _RECOMPUTE, likewise */
  int32_t wgrad_mode;             /* SLUICE_WGRAD_DEFERRED, _PER_CHUNK */
} sluice_planner_choice_t;

typedef struct sluice_planner_prediction_s {
  size_t struct_size; /* set by the caller: sizeof */
  double forward_seconds;
  double backward_seconds;
  double forward_busy[4];       /* seconds by lane (SLUICE_LANE_*) */
  double backward_busy[4];      /* */
  double overhead_seconds;      /* of each pass, in the above: routing, header, bookkeeping (not the tables of a
                                   deduplicated forward, which are in forward_seconds too) */
  double mpmoe_forward_seconds; /* MPMoE's phases, without overhead */
  double mpmoe_backward_seconds;
  double mpipemoe_forward_seconds; /* MPipeMoE eq. 10, without overhead */
  double mpipemoe_backward_seconds;
  double machine_error_median; /* |predicted / measured - 1| on sizes held out of the machine's fit; 0: not measured */
  double machine_error_p90;
  int64_t chunk_rows; /* under a budget: capacity of received rows of a chunk; otherwise 0 */
  /* Bytes on a rank as sluice/plan.h has them, under a plan for this workload; base counts handles and tables of one
   * layer. total = base + slots + routing + schedules + headers + GEMMs + max_outstanding * step. */
  uint64_t base_bytes;
  uint64_t slot_bytes;
  uint64_t routing_bytes;
  uint64_t schedule_bytes;
  uint64_t header_bytes;
  uint64_t gemm_bytes;
  uint64_t step_bytes;
  uint64_t total_bytes;
  int32_t fits;        /* total_bytes is within the budget, or there is none */
  int32_t num_entries; /* of the timeline: forward's ops, then backward's */
  int32_t max_chunks;  /* n at most, whatever the routing */
  int32_t run_chunks;  /* n under this skew: a budget cuts the fullest rank's rows into more chunks */
  double sent_rows;    /* that one exchange of a pass sends to other ranks from one rank, all chunks: routes, or token
                          copies */
  int32_t kept_chunks; /* of the choice's num_chunks, the first ones that its policies speak of */
  int32_t reserved;
} sluice_planner_prediction_t;

/* One op of a predicted pass; each direction begins at 0, overhead_seconds before its first op excluded. */
typedef struct sluice_planner_entry_s {
  double begin_seconds;
  double end_seconds;
  const char* op; /* immutable name: "dispatch", "gemm1", ... */
  int32_t direction;
  int32_t lane;
  int32_t chunk; /* -1: all chunks */
  int32_t index; /* of the op in its template */
} sluice_planner_entry_t;

/* Predicts one training step of one layer. out_entries [capacity]: the timeline, as far as it fits (capacity 0: none);
 * out_prediction->num_entries is how many there are. Any thread. Errors: INVALID_ARGUMENT naming the field (a machine
 * without what the workload needs among them), ABI, UNSUPPORTED (callback experts that cannot do the policy),
 * NO_MEMORY. A choice over the budget is no error: `fits` says so. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_predict(
    const sluice_planner_t* planner, const sluice_planner_workload_t* workload, const sluice_planner_choice_t* choice,
    sluice_planner_prediction_t* out_prediction, sluice_planner_entry_t* out_entries, int32_t capacity);

/* Why a candidate is not the one. */
enum {
  SLUICE_PLANNER_CHOSEN = 0,
  SLUICE_PLANNER_SLOWER = 1,          /* by slower_by */
  SLUICE_PLANNER_OVER_BUDGET = 2,     /* by bytes_over */
  SLUICE_PLANNER_EQUAL = 3,           /* as fast as the chosen one, which needs no more bytes or fewer chunks */
  SLUICE_PLANNER_OVER_HOST_BUDGET = 4 /* its offloaded rows, by bytes_over */
};

typedef struct sluice_planner_candidate_s {
  sluice_planner_choice_t choice;
  int32_t verdict;     /* SLUICE_PLANNER_* */
  int32_t kept_chunks; /* of num_chunks, the first ones that the policies speak of: all, or with may_keep_part fewer;
                          the rest are sent and computed again. For the workload of predict */
  double forward_seconds;
  double backward_seconds;
  double slower_by; /* predicted time over that of the chosen one, minus 1 */
  uint64_t total_bytes;
  uint64_t bytes_over; /* the budget */
} sluice_planner_candidate_t;

/* Predicts every candidate and takes the fastest that fits; what keeps part comes behind all that does not. wanted:
 * fields >= 0 (num_chunks >= 1) are fixed, ADAPTIVE
 * (-1; num_chunks 0) are open; NULL: all open. out_candidates [capacity] as far as they fit; *out_count is how many
 * there are; *out_chosen the index of the chosen one, -1 where none fits (then OVER_BUDGET is returned, the record
 * names the shortfall and the leanest, and the candidates are written all the same). out_chosen may be NULL. Any
 * thread. Errors: as predict; OVER_BUDGET. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_choose(
    const sluice_planner_t* planner, const sluice_planner_workload_t* workload, const sluice_planner_choice_t* wanted,
    sluice_planner_candidate_t* out_candidates, int32_t capacity, int32_t* out_count, int32_t* out_chosen);

/* "chosen", "slower", "over budget", "as fast"; immutable. */
SLUICE_EXPORT SLUICE_EXPERIMENTAL const char* sluice_planner_verdict_name(int32_t verdict);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_PLANNER_H_ */
