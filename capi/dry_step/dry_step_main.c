// SPDX-License-Identifier: Apache-2.0
/* sluice-dry-step NAME=NUMBER ...: writes the calls of one training step on fake GPUs as JSON. `sluice simulate
 * --device` runs this program. Names are the members of sluice_dry_step_t. Exit status: 0, or 2 with a line that states
 * the error. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "capi/dry_step/dry_step.h"

static int refuse(const char* what, const char* word) {
  fprintf(stderr, "sluice-dry-step: %s%s\n", what, word);
  return 2;
}

int main(int argc, char** argv) {
  sluice_dry_step_t step = {.ranks = 1, .chunks = 1, .seed = 7};
  const struct {
    const char* name;
    int64_t* value;
  } members[] = {
      {"ranks", &step.ranks},
      {"tokens", &step.tokens},
      {"model_width", &step.model_width},
      {"hidden_width", &step.hidden_width},
      {"experts", &step.experts},
      {"top_k", &step.top_k},
      {"chunks", &step.chunks},
      {"seed", &step.seed},
      {"deduplicate", &step.deduplicate},
      {"device_bytes", &step.device_bytes},
  };
  for (int i = 1; i < argc; ++i) {
    const char* equals = strchr(argv[i], '=');
    char* end = NULL;
    int64_t* value = NULL;
    for (size_t m = 0; m < sizeof members / sizeof members[0] && equals != NULL; ++m) {
      const size_t length = strlen(members[m].name);
      if (length == (size_t)(equals - argv[i]) && strncmp(argv[i], members[m].name, length) == 0) {
        value = members[m].value;
      }
    }
    if (value == NULL) return refuse("NAME=NUMBER is wanted, with a known name, not ", argv[i]);
    *value = strtoimax(equals + 1, &end, 10);
    if (end == equals + 1 || *end != '\0') return refuse("no number: ", argv[i]);
  }
  const sluice_status_t status = sluice_dry_step_run(&step, stdout);
  if (status == SLUICE_OK && fflush(stdout) == 0) return 0;
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  return refuse(status == SLUICE_OK ? "the record cannot be written" : why.message, "");
}
