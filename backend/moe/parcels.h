/* Deduplication: which rows a token's routes share on their way. A *parcel* is what travels between ranks for one token
 * of one chunk: its row once, whatever number of its routes ends at the destination, and one row back.
 *
 *   y[t] = sum over ranks r of p[t, r],   p[t, r] = sum over k with an expert on r of w[t, k] T_DO(t, k)
 *
 * p is summed on rank r in k order in f32 and travels in the layer's dtype; the sum over ranks is in rank order, in
 * f32, and rounded once. Gradients alike: dY[t] travels once to each rank, and sum over k of dT_DI(t, k) comes back.
 * The rank's own parcels follow the same sums without travelling.
 *
 * A *slot* is where a route lies in its parcel: parcel * K + k, parcels counted from 0 for each (chunk, destination).
 * The ranks exchange slots, 4 bytes for each route, once per forward behind the counts; a step keeps what it received.
 *
 * Source: DeepSeek-V3 (arXiv 2412.19437) section 3.2.2 sends a token once to each node and fans it out there; here to
 * each rank, and sums are taken before the way back.
 */
#ifndef SLUICE_BACKEND_MOE_PARCELS_H_
#define SLUICE_BACKEND_MOE_PARCELS_H_

#include <stdint.h>

#include "backend/base/status.h"
#include "sluice/context.h"

/* On a far device its kernels number the parcels while they order routes, and the one read of a forward brings their
 * numbers too; the ranks tell each other these in the header, and slots travel between devices (parcels_far.c). The
 * tables below that are not of i64 then lie in its memory, and a step keeps them in front of its rows. */
typedef struct sluice_parcels_s {
  int32_t* slots; /* [R] of received routes, own ones among them: by source, then chunk, then in the sender's order */
  /* Of parcels that this rank sends, in sent order of their chunk: by destination, then token; own ones among them. */
  int64_t* sent_of_rank;      /* [n][W + 1] by destination */
  int64_t* first_sent;        /* [n + 1] where those of a chunk begin in token */
  int32_t* token;             /* of each parcel */
  int32_t* position_of_token; /* [T][W] row of (t, r) in its chunk's order; -1: nothing of t goes to r */
  /* Of parcels that arrive, by source, then in the sender's order. */
  int64_t* recv_of_rank;  /* [n][W + 1] by source; own parcels take no place */
  int64_t* first_arrived; /* [n + 1] parcels of the chunks before, own ones among them */
  int32_t* position;      /* [parcels][K] row in the chunk's expert order; -1: no such route */
  int64_t max_arriving;   /* parcels that position has room for */
  int32_t* origin;        /* [R] by (chunk, row in expert order): the arrived parcel; of own rows the token */
  int64_t max_chunk_remote, max_chunk_sent; /* as the binding has them of rows */
  /* Far alone. */
  int32_t* send_counts;     /* host [n][W] parcels by destination */
  int32_t* recv_counts;     /* host [W][n] by source */
  int32_t* sent_slots;      /* [T * K] slots in sent order of each chunk, from first_order; forward */
  int32_t* weight;          /* [parcels][K] where the route weight arrives, own ones t * K + k; -1 alike; forward */
  uint64_t exchanged_bytes; /* of slots, to other ranks */
} sluice_parcels_t;

struct sluice_binding_s;

/* Of a binding just finished, in forward: orders the parcels, exchanges slots and derives the rest; collective. The
 * arrays lie in the context's parcel arena. Errors: NO_MEMORY; MISMATCH naming the rank whose slots are none; what the
 * communicator reports. */
sluice_status_t sluice_parcels_exchange(struct sluice_binding_s* binding);
/* The same from the slots that a step kept. Borrows them. */
sluice_status_t sluice_parcels_restore(struct sluice_binding_s* binding, int32_t* slots);

/* The two on a far device. exchange: the numbers of parcels are there, the header brought those of the others; slots
 * and tables follow on `stream`, and nothing waits. Slots that are none are passed over there, since nobody reads them:
 * their rows are zeros. kept: the block that follows sluice_binding_routes_bytes() in a step, of a binding whose counts
 * are known. */
sluice_status_t sluice_parcels_exchange_far(struct sluice_binding_s* binding, sluice_stream_t stream);
sluice_status_t sluice_parcels_restore_far(struct sluice_binding_s* binding, void* kept);
uint64_t sluice_parcels_kept_bytes(const struct sluice_binding_s* binding);
#endif /* SLUICE_BACKEND_MOE_PARCELS_H_ */
