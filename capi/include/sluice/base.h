// SPDX-License-Identifier: Apache-2.0
/* Status codes, versions, tensors, allocation and logging, which every other header of Sluice uses.
 *
 * The whole ABI is plain C99. Nothing throws, exits or prints (unless SLUICE_LOG in the environment asks for it). Every
 * call that can fail returns a status. A struct that a caller fills begins with `struct_size` and is prepared by its
 * `_init` function, so that it can grow: missing members of a shorter struct take their defaults, and a longer struct
 * is accepted if its unknown tail is zero.
 *
 * Terms used in the comments of all headers
 *   new                 the caller must release the object with the named function (release functions accept NULL)
 *   borrowed until X    the library reads the memory until X and never frees it
 *   immutable / thread-safe / context-exclusive / comm-exclusive / setup-only    which calls may run at the same time
 *   host-complete       results are readable when the call returns
 *   SLUICE_EXPERIMENTAL a release after 0.1.0 may change the function
 * Functions named `_init` write the struct that they are given and nothing else. Functions named `_destroy` accept NULL
 * and may be called from any thread after all other calls that use the handle have returned. */
#ifndef SLUICE_BASE_H_
#define SLUICE_BASE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define SLUICE_EXPORT   __attribute__((visibility("default")))
#define SLUICE_MUST_USE __attribute__((warn_unused_result))
#else
#define SLUICE_EXPORT
#define SLUICE_MUST_USE
#endif
#define SLUICE_API SLUICE_EXPORT SLUICE_MUST_USE

/* Marks, after SLUICE_API or SLUICE_EXPORT, a function that a release after 0.1.0 may still change or remove. All other
 * functions are stable (capi/abi/ABI.md). To get a warning for each use, a program defines the macro before it includes
 * the first header, for instance as __attribute__((deprecated("experimental"))). */
#ifndef SLUICE_EXPERIMENTAL
#define SLUICE_EXPERIMENTAL
#endif

#define SLUICE_VERSION_MAJOR 0
#define SLUICE_VERSION_MINOR 1
#define SLUICE_VERSION_PATCH 0

/* ---- status ------------------------------------------------------------------------------------------------------ */

/* 0 is success, and negative values are errors. A value is never reused.
 *
 * code              meaning                                      effect on the object         retry?  responsible
 * INVALID_ARGUMENT  an argument is wrong                         none                         yes     caller
 * ABI               a struct's size or tail is not understood    none                         yes     caller (rebuild)
 * NO_MEMORY         the host or the allocator refused bytes      none; the step is released   yes     caller
 * BUSY              another thread is inside this object         none                         yes     caller
 * UNSUPPORTED       known, but not available here                none                         no      caller
 * NOT_FOUND         a library or symbol could not be loaded      none                         no      installer
 * STATE             not allowed in this state (backward twice)   none                         no      caller
 * MISMATCH          ranks disagree; the message names them       none, the comm stays usable  yes     caller
 * PEER_REFUSED      another rank refused its input               none, the comm stays usable  yes     that rank
 * PEER_LOST         a rank died, left, or cannot be reached      comm takes abort, destroy    no      operator
 * TIMED_OUT         a rank was silent until the deadline         comm takes abort, destroy    no      operator
 * ABORTED           sluice_comm_abort was called                 comm takes abort, destroy    no      caller
 * EXTERNAL          a host callback or library failed            as its message says          -       see message
 * OVER_BUDGET       the plan does not fit the memory budget      none                         yes     caller
 * INTERNAL          an invariant of Sluice broke: report it      undefined                    no      Sluice
 * CAPACITY          routes beyond a capacity were dropped        outputs lack them            no      caller */
typedef int32_t sluice_status_t;
enum {
  SLUICE_OK = 0,
  SLUICE_E_INVALID_ARGUMENT = -1,
  SLUICE_E_ABI = -2,
  SLUICE_E_NO_MEMORY = -3,
  SLUICE_E_BUSY = -4,
  SLUICE_E_UNSUPPORTED = -5,
  SLUICE_E_NOT_FOUND = -6,
  SLUICE_E_STATE = -7,
  SLUICE_E_MISMATCH = -8,
  SLUICE_E_PEER_REFUSED = -9,
  SLUICE_E_PEER_LOST = -10,
  SLUICE_E_TIMED_OUT = -11,
  SLUICE_E_ABORTED = -12,
  SLUICE_E_EXTERNAL = -13,
  SLUICE_E_OVER_BUDGET = -14,
  SLUICE_E_INTERNAL = -15,
  SLUICE_E_CAPACITY = -16
};

/* Details of a failed call. The struct is a copy: there is nothing to release. */
typedef struct sluice_error_info_s {
  size_t struct_size;  /* set by sluice_error_info_init */
  int32_t status;      /* the status that was returned */
  int32_t rank;        /* rank of the communicator that reported the error, -1 without one */
  int32_t peer;        /* the rank at fault, -1 if none is known */
  int32_t native_code; /* error code of the external library, 0 if none */
  char message[1024];  /* what, where, what to do; UTF-8, always terminated */
} sluice_error_info_t;

SLUICE_EXPORT void sluice_error_info_init(sluice_error_info_t* out_info, size_t struct_size);
/* Copies the details of this thread's last failed call; SLUICE_OK and an empty message if none failed. Thread-safe. */
SLUICE_EXPORT void sluice_error_last(sluice_error_info_t* out_info);
/* Returns "INVALID_ARGUMENT" and so on; "UNKNOWN" for other values. Immutable string. */
SLUICE_EXPORT const char* sluice_status_name(sluice_status_t status);

/* ---- version ----------------------------------------------------------------------------------------------------- */

/* Returns the version of the loaded library, which may be newer than these headers. Thread-safe. */
SLUICE_EXPORT void sluice_version(int32_t* out_major, int32_t* out_minor, int32_t* out_patch);
/* Returns one immutable line with the version, the compiler and the components that were compiled in. */
SLUICE_EXPORT const char* sluice_build_info(void);

/* ---- log --------------------------------------------------------------------------------------------------------- */

enum { SLUICE_LOG_ERROR = 0, SLUICE_LOG_WARN = 1, SLUICE_LOG_INFO = 2, SLUICE_LOG_DEBUG = 3 };
/* The library may call this function from any of its threads. The function must not call back into Sluice. `message` is
 * borrowed for the call. */
typedef void (*sluice_log_fn_t)(void* user, int32_t level, const char* message);
/* Replaces the process-wide log callback. NULL disables logging, which is the default. Messages above `max_level` are
 * not formatted. Setup-only. */
SLUICE_EXPORT void sluice_set_log(sluice_log_fn_t fn, void* user, int32_t max_level);

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

/* DLPack's type codes and device types, so that a `DLTensor*` may be passed as a `sluice_tensor_t*` unchanged. */
enum { SLUICE_TYPE_INT = 0, SLUICE_TYPE_UINT = 1, SLUICE_TYPE_FLOAT = 2, SLUICE_TYPE_BFLOAT = 4 };
enum { SLUICE_DEVICE_CPU = 1, SLUICE_DEVICE_CUDA = 2 };

/* The layout of DLTensor (DLPack 1.x). Shapes and strides are in elements; strides NULL means row-major. Borrowed. */
typedef struct sluice_tensor_s {
  void* data;
  int32_t device_type; /* SLUICE_DEVICE_* */
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code; /* SLUICE_TYPE_* */
  uint8_t type_bits;
  uint16_t type_lanes; /* 1 */
  int64_t* shape;      /* [ndim] */
  int64_t* strides;    /* [ndim] or NULL */
  uint64_t byte_offset;
} sluice_tensor_t;

/* Element types of configs. */
enum {
  SLUICE_DTYPE_F32 = 1,
  SLUICE_DTYPE_BF16 = 2,
  SLUICE_DTYPE_F16 = 3,
  SLUICE_DTYPE_F64 = 4, /* only with gemm "ref", for finite differences */
  SLUICE_DTYPE_I32 = 5,
  SLUICE_DTYPE_I64 = 6
};

/* ---- growing structs --------------------------------------------------------------------------------------------- */

/* Header of a typed optional block that is chained to a config. This header file assigns the types; an unknown type is
 * an error. */
typedef struct sluice_ext_header_s {
  int32_t type;
  int32_t reserved; /* 0 */
  const struct sluice_ext_header_s* next;
} sluice_ext_header_t;

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* The library calls both only on the calling thread. `allocate` returns memory aligned to 64 bytes, or NULL. */
typedef void* (*sluice_allocate_fn_t)(void* user, uint64_t bytes);
typedef void (*sluice_free_fn_t)(void* user, void* data, uint64_t bytes);

/* A stream of the host (cudaStream_t); NULL on a CPU. */
typedef void* sluice_stream_t;

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_BASE_H_ */
