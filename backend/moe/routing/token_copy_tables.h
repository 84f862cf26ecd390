// SPDX-License-Identifier: Apache-2.0
/* The tables of a deduplicated pass. token_copies.h defines token copies and route indices. */
#pragma once

#include <stdint.h>

/* With device memory, kernels number the token copies while they order routes, and the one read of a forward includes
 * their numbers; ranks exchange these in the header, and route indices between devices (token_copies_on_device.c). The
 * tables below that are not of i64 are then in device memory, and a step keeps them before its rows. */
typedef struct sluice_token_copies_s {
  int32_t* route_index; /* [R] of received routes, own ones too: by source, then chunk, then in the sender's order */
  /* Of token copies that this rank sends, own ones too, in sent order of their chunk: by destination, then token. */
  int64_t* sent_of_rank;      /* [n][W + 1] by destination */
  int64_t* first_sent;        /* [n + 1] first entry of a chunk in token */
  int32_t* token;             /* of each token copy */
  int32_t* position_of_token; /* [T][W] row of (t, r) in its chunk's order; -1: nothing of t goes to r */
  /* Of token copies that arrive, by source, then in the sender's order. */
  int64_t* recv_of_rank;  /* [n][W + 1] by source; own token copies are empty */
  int64_t* first_arrived; /* [n + 1] token copies of the chunks before, own ones included */
  int32_t* position;      /* [token copies][K] row in the chunk's expert order; -1: no such route */
  int64_t max_arriving;   /* capacity of position in token copies */
  int32_t* origin; /* [R] by (chunk, row in expert order): the received token copy; for own rows the token, with device
                      memory -2 - the token */
  int64_t max_chunk_remote, max_chunk_sent; /* as in the binding, for token copies */
  /* With device memory only. */
  int32_t* send_counts;      /* host [n][W] token copies by destination */
  int32_t* recv_counts;      /* host [W][n] by source */
  int32_t* sent_route_index; /* [T * K] route indices in sent order of each chunk, from first_order; forward */
  int32_t* weight; /* [token copies][K] index of the received route weight, own ones t * K + k; -1: none; forward */
  uint64_t exchanged_bytes; /* of route indices, to other ranks */
} sluice_token_copies_t;
