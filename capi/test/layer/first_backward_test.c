// SPDX-License-Identifier: Apache-2.0
/* In the first backward of a layer, the pages of its weight gradients are populated early, as in later backwards.
 * Counts page faults of the calling thread, with measured pages and without. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* RUSAGE_THREAD */
#endif
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "capi/test/rig/rig.h"
#include "third_party/bazel/test.h"

enum { MIB = 1 << 20, WIDTH = 1024, EXPERTS = 4, PAGE = 4096 };
enum { MATRIX = WIDTH * WIDTH * 4, BYTES = 2 * EXPERTS * MATRIX, WAITS = 1 << 20 };

static unsigned char* gradients; /* of w1, then of w2, expert by expert */
static int32_t waited;

static int is_gradient(const void* data) {
  return (const unsigned char*)data >= gradients && (const unsigned char*)data < gradients + BYTES;
}

static int32_t pages_there(void) {
  static unsigned char state[BYTES / PAGE];
  assert_int_equal(mincore(gradients, BYTES, state), 0);
  int32_t found = 0;
  for (int32_t i = 0; i < BYTES / PAGE; ++i) found += state[i] & 1;
  return found;
}

/* Delays the first GEMM that writes a weight gradient until all pages are populated, as a GEMM of real size would. */
static int32_t multiply(void* user, const sluice_host_gemm_args_t* g) {
  (void)user;
  for (int32_t i = 0; is_gradient(g->c) && !waited && i < WAITS && pages_there() < BYTES / PAGE; ++i) sched_yield();
  waited |= is_gradient(g->c);
  for (int64_t m = 0; m < g->m; ++m) {
    for (int64_t n = 0; n < g->n; ++n) {
      float sum = 0, *c = (float*)g->c + m * g->c_row_stride + n * g->c_col_stride;
      for (int64_t k = 0; k < g->k; ++k) {
        sum += ((const float*)g->a)[m * g->a_row_stride + k * g->a_col_stride] *
               ((const float*)g->b)[k * g->b_row_stride + n * g->b_col_stride];
      }
      *c = sum + (g->beta != 0 ? *c : 0);
    }
  }
  return 0;
}

static void open_layer(rig_t* rig) {
  memset(rig, 0, sizeof *rig);
  rig->world_size = 1;
  DEFAULTS(sluice_context_config, config);
  config.gemm = "host", config.host_gemm = multiply;
  assert_int_equal(sluice_context_create(&config, NULL, &rig->context), SLUICE_OK);
  sluice_moe_config_t layer = rig_config();
  layer.model_width = layer.hidden_width = WIDTH, layer.num_experts = EXPERTS;
  layer.gated = layer.bias = 0, layer.num_chunks = 1;
  assert_int_equal(rig_open_layer(rig, &layer), SLUICE_OK);
}

static void place_gradients(rig_t* rig) {
  for (int32_t e = 0; e < EXPERTS; ++e) {
    rig->grad_list[0][e].data = gradients + (size_t)e * MATRIX;
    rig->grad_list[2][e].data = gradients + (size_t)(EXPERTS + e) * MATRIX;
  }
}

/* Runs a step; returns the page faults of this thread in the backward. */
static long step(rig_t* rig) {
  sluice_step_t* step = NULL;
  struct rusage before, after;
  assert_int_equal(rig_forward(rig, &step), SLUICE_OK);
  assert_int_equal(getrusage(RUSAGE_THREAD, &before), 0);
  assert_int_equal(rig_backward(rig, step), SLUICE_OK);
  assert_int_equal(getrusage(RUSAGE_THREAD, &after), 0);
  sluice_step_drop(step);
  return after.ru_minflt - before.ru_minflt;
}

static void skip_where_it_cannot(void) {
#if defined(__SANITIZE_THREAD__)
  skip_because("ThreadSanitizer: its own pages of what is touched are counted too");
#endif
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) < 2) skip_because("one core");
  if (sysconf(_SC_PAGESIZE) != PAGE || madvise(gradients, PAGE, 23 /* MADV_POPULATE_WRITE */) != 0) {
    skip_because("this kernel brings no pages in on demand");
  }
}

TEST(FirstBackward_FreshGradients_WaitsForFewPages) {
  static rig_t rig;
  gradients = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(gradients != MAP_FAILED);
  (void)madvise(gradients, BYTES, MADV_NOHUGEPAGE); /* every page faults separately */
  skip_where_it_cannot();
  open_layer(&rig);
  place_gradients(&rig);
  const long first = step(&rig);
  assert_true(waited);
  static unsigned char kept[BYTES];
  memcpy(kept, gradients, BYTES);
  const long settled = step(&rig);
  print_message("page faults of a backward: %ld, settled %ld, pages of gradients %d\n", first, settled, BYTES / PAGE);
  assert_true(first - settled < BYTES / PAGE / 4);
  assert_memory_equal(kept, gradients, BYTES);
  rig_close(&rig);
  munmap(gradients, BYTES);
}

int main(int argc, char** argv) {
  const int is_measured = argc > 1 && strcmp(argv[1], "measured") == 0;
  setenv("SLUICE_HUGE_PAGES", is_measured ? "" : "0", 1);
  setenv("SLUICE_CACHE_DIR", "/dev/null", 1); /* no earlier measurements are read */
  return run_cases(NULL, NULL);
}
