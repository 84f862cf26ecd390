/* Lower bounds of a stage's turn where some of its layers are decided: the relaxation in which layers may take parts of
 * options.
 *
 * A turn is at least w * compute + (1 - w) * copies for any weight w in [0, 1]. For one w the layers that are open form
 * a multiple-choice knapsack, whose relaxation is solved by taking the steps of each layer's lower hull of (bytes,
 * weighted seconds) by seconds a byte until enough bytes are saved (Sinha and Zoltners, 1979). */
#ifndef SLUICE_BACKEND_PLANNER_STAGES_LOCAL_LOCAL_BOUNDS_H_
#define SLUICE_BACKEND_PLANNER_STAGES_LOCAL_LOCAL_BOUNDS_H_

#include <stdint.h>

struct sluice_stages_local_s;

/* A step of a layer's hull: so many bytes less for so many weighted seconds more. */
typedef struct sluice_stages_local_increment_s {
  double bytes;
  double seconds;
  int32_t depth; /* of the layer in the order of decisions */
  int32_t index; /* breaks ties */
} sluice_stages_local_increment_t;

/* The bound of one weight. Arrays are [count + 1], of the layers from a depth on. */
typedef struct sluice_stages_local_bound_s {
  double weight;
  double* seconds; /* weighted, each layer at its least */
  double* bytes;   /* there */
  sluice_stages_local_increment_t* increments;
  int32_t num_increments;
} sluice_stages_local_bound_t;

/* layers: [count] positions in the order of decisions. Fills arrays that the caller has set. */
void sluice_stages_local_bound_make(const struct sluice_stages_local_s* local, const int32_t* layers, double weight,
                                    sluice_stages_local_bound_t* bound);
/* Weighted seconds that the layers from depth on take at least in so many bytes; INFINITY: they do not fit. */
double sluice_stages_local_bound_of(const sluice_stages_local_bound_t* bound, int32_t depth, double bytes);

#endif /* SLUICE_BACKEND_PLANNER_STAGES_LOCAL_LOCAL_BOUNDS_H_ */
