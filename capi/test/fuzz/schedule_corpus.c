// SPDX-License-Identifier: Apache-2.0
/* Writes the corpus of schedule_fuzz into a folder: a schedule for each variant of the form.
 *
 *   bazel run //capi/test/fuzz:schedule_corpus -- $PWD/capi/test/fuzz/corpus/schedule */
#include <stdio.h>
#include <stdlib.h>

#include "backend/schedule/serial/serial.h"
#include "backend/schedule/template/template.h"

typedef struct seed_s {
  const char* name;
  sluice_template_spec_t spec;
} seed_t;

static const seed_t seeds[] = {
    {"forward_one_rank", {.direction = SLUICE_FORWARD, .num_chunks = 1, .keep = 1, .single_rank = 1}},
    {"forward_two_chunks", {.direction = SLUICE_FORWARD, .num_chunks = 2, .keep = 1, .gated = 1, .bounded = 1}},
    {"forward_dedup", {.direction = SLUICE_FORWARD, .num_chunks = 2, .keep = 1, .dedup = SLUICE_DEDUPLICATE_RANKS}},
    {"forward_two_levels",
     {.direction = SLUICE_FORWARD, .num_chunks = 1, .keep = 1, .dedup = SLUICE_DEDUPLICATE_NODES}},
    {"forward_by_experts", {.direction = SLUICE_FORWARD, .num_chunks = 2, .keep = 1, .chunks_by_experts = 1}},
    {"forward_grouped", {.direction = SLUICE_FORWARD, .num_chunks = 3, .keep = 1, .grouped = 1}},
    {"callback", {.direction = SLUICE_FORWARD, .num_chunks = 2, .keep = 1, .callback = 1}},
    {"backward_low_rank", {.direction = SLUICE_BACKWARD, .num_chunks = 2, .dgrad = 1, .wgrad = 1, .low_rank = 1}},
    {"backward_two_chunks",
     {.direction = SLUICE_BACKWARD, .num_chunks = 2, .dgrad = 1, .wgrad = 1, .gated = 1, .reuse_saved = 1}},
    {"backward_wgrad", {.direction = SLUICE_BACKWARD, .num_chunks = 1, .wgrad = 1}},
    {"backward_gradients_first",
     {.direction = SLUICE_BACKWARD,
      .num_chunks = 2,
      .dgrad = 1,
      .wgrad = 1,
      .experts_first = 1,
      .restore_input = {SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_REDISPATCH}}},
};

static int write_seed(const char* folder, const seed_t* seed) {
  char path[4096];
  sluice_template_t* t = NULL;
  if (sluice_template_build(&seed->spec, sluice_process_allocator(), &t) != SLUICE_OK) return 0;
  const uint64_t bytes = sluice_schedule_write(t, NULL, 0);
  unsigned char* data = malloc(bytes);
  int good = data != NULL && sluice_schedule_write(t, data, bytes) == bytes;
  good = good && snprintf(path, sizeof path, "%s/%s", folder, seed->name) < (int)sizeof path;
  FILE* file = good ? fopen(path, "wb") : NULL;
  good = file != NULL && fwrite(data, 1, bytes, file) == bytes;
  if (file != NULL) good = fclose(file) == 0 && good;
  free(data);
  sluice_template_destroy(t, sluice_process_allocator());
  return good;
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  for (size_t i = 0; i < sizeof seeds / sizeof seeds[0]; ++i) {
    if (write_seed(argv[1], &seeds[i])) continue;
    fprintf(stderr, "%s: not written\n", seeds[i].name);
    return 1;
  }
  return 0;
}
