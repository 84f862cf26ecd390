/* Arrays of gpu_suite, each on both sides: what the plain version works on, and what the device does. */
#ifndef SLUICE_BACKEND_CTS_GPU_GPU_ARRAY_H_
#define SLUICE_BACKEND_CTS_GPU_GPU_ARRAY_H_

#include <stdint.h>

typedef struct gpu_array_s {
  void* host;  /* what the plain version works on */
  void* there; /* the device's */
  void* back;  /* what came from the device */
  int64_t bytes;
  int64_t skipped; /* bytes between the device's block and `there` */
} gpu_array_t;

/* Zeros on the host; on the device nothing was written yet. */
gpu_array_t gpu_array(int64_t bytes);
/* What a kernel writes in part and the suite fetches whole: a checker of memory that was never written would stop
 * there.
 */
gpu_array_t gpu_zeros(int64_t bytes);
/* Random numbers within 3 of 0, on both sides. */
gpu_array_t gpu_randoms(int32_t dtype, int64_t count);
/* The same on the device alone, repeated: as good for times, and there at once where a host would need a minute. */
gpu_array_t gpu_repeated(int32_t dtype, int64_t count);
void gpu_drop(gpu_array_t* a);

/* Elements that arrays of gpu_randoms lie behind an aligned place, as parts of a host's tensors may. */
extern int64_t gpu_apart;

/* host to there; there to back. Both wait. */
void gpu_send(const gpu_array_t* a);
void gpu_fetch(const gpu_array_t* a);

uint32_t gpu_random_bits(void);
double gpu_get(int32_t dtype, const void* data, int64_t i);

/* NULL, or where the device's result differs from the plain one by more than relative * |x| + absolute. */
const char* gpu_differs(const gpu_array_t* a, int32_t dtype, double relative, double absolute);

#endif /* SLUICE_BACKEND_CTS_GPU_GPU_ARRAY_H_ */
