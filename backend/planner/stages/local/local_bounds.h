// SPDX-License-Identifier: Apache-2.0
/* Lower bounds of a stage's turn with some layers decided: the relaxation in which layers may take fractions of
 * options.
 *
 * A turn is at least w * compute + (1 - w) * copies for any weight w in [0, 1]. For one w the undecided layers form a
 * multiple-choice knapsack. Its relaxation is solved by taking the steps of each layer's lower hull of (bytes, weighted
 * seconds) in order of seconds per byte until enough bytes are saved (Sinha and Zoltners, 1979). */
#pragma once

#include <stdint.h>

struct sluice_stages_local_s;

/* A step of a layer's hull: fewer bytes for more weighted seconds. */
typedef struct sluice_stages_local_increment_s {
  double bytes;
  double seconds;
  int32_t depth; /* of the layer in the decision order */
  int32_t index; /* breaks ties */
} sluice_stages_local_increment_t;

/* The bound of one weight. Arrays are [count + 1], for the layers from a depth on. */
typedef struct sluice_stages_local_bound_s {
  double weight;
  double* seconds; /* weighted, each layer at its minimum */
  double* bytes;   /* with those options */
  sluice_stages_local_increment_t* increments;
  int32_t num_increments;
} sluice_stages_local_bound_t;

/* layers: [count] positions in the decision order. Fills arrays that the caller has set. */
void sluice_stages_local_bound_make(const struct sluice_stages_local_s* local, const int32_t* layers, double weight,
                                    sluice_stages_local_bound_t* bound);
/* Returns a lower bound of the weighted seconds of the layers from depth on within the given bytes; INFINITY: they do
 * not fit. */
double sluice_stages_local_bound_of(const sluice_stages_local_bound_t* bound, int32_t depth, double bytes);
