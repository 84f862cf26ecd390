// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/tuner_state.h"

#include <stdio.h>

#include "backend/base/hash.h"

static uint64_t hash_of_imports(const sluice_tuner_t* tuner, uint64_t hash) {
  return tuner->num_imports > 0
             ? sluice_hash_bytes(hash, tuner->imports, (size_t)tuner->num_imports * sizeof *tuner->imports)
             : hash;
}

static uint64_t state_of(const sluice_tuner_t* tuner) {
  uint64_t hash = hash_of_imports(tuner, sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, &tuner->mode, sizeof tuner->mode));
  return tuner->has_machine ? sluice_hash_bytes(hash, &tuner->machine, sizeof tuner->machine) : hash;
}

static void describe(const sluice_tuner_t* tuner, char* text, size_t room) {
  static const char* const modes[] = {"adaptive", "profile", "model"};
  char machine[64] = "no machine", imports[48] = "no imported decisions";
  if (tuner->has_machine) {
    snprintf(machine, sizeof machine, "machine %.32s (%08x)", tuner->machine.name,
             (unsigned)sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, &tuner->machine, sizeof tuner->machine));
  }
  if (tuner->num_imports > 0) {
    snprintf(imports, sizeof imports, "%d imported decisions (%08x)", tuner->num_imports,
             (unsigned)hash_of_imports(tuner, SLUICE_HASH_OF_NOTHING));
  }
  snprintf(text, room, "mode %s, %s, %s", modes[tuner->mode], machine, imports);
}

void sluice_tuner_update_state(sluice_tuner_t* tuner) {
  tuner->base.state = state_of(tuner);
  describe(tuner, tuner->base.words, sizeof tuner->base.words);
}
