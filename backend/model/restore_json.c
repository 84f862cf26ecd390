// SPDX-License-Identifier: Apache-2.0
#include "backend/model/restore_json.h"

#include "backend/base/text.h"
#include "backend/model/restore.h"

static const char* truth(int value) { return value ? "true" : "false"; }

static void add_policy(sluice_text_t* text, int32_t policy) {
  const sluice_restore_t* r = sluice_restore(policy);
  sluice_text_add(text, "  {\"name\": \"%s\", \"number\": %d, \"input\": %s, \"pre_activation\": %s, ", r->name, policy,
                  truth(sluice_restore_is_for(policy, SLUICE_T_DI)), truth(sluice_restore_is_for(policy, SLUICE_T_M)));
  sluice_text_add(text, "\"device_rows\": %d, \"host_rows\": %d, \"exchanges\": %d, \"gemms\": %d}", r->device_rows,
                  r->host_rows, r->exchanges, r->gemms);
}

static void add_set(sluice_text_t* text, const sluice_restore_set_t* set) {
  sluice_text_add(text, "  {\"name\": \"%s\", \"input\": \"%s\", \"pre_activation\": \"%s\"}", set->name,
                  sluice_restore_name(set->restore_input), sluice_restore_name(set->restore_pre_activation));
}

uint64_t sluice_restore_write_json(char* data, uint64_t room) {
  sluice_text_t text = sluice_text(data, room);
  sluice_text_add(&text, "{\"policies\": [\n");
  for (int32_t policy = 0; policy < SLUICE_NUM_RESTORES; ++policy) {
    if (policy > 0) sluice_text_add(&text, ",\n");
    add_policy(&text, policy);
  }
  sluice_text_add(&text, "],\n \"sets\": [\n");
  for (int32_t i = 0; i < SLUICE_NUM_RESTORE_SETS; ++i) {
    if (i > 0) sluice_text_add(&text, ",\n");
    add_set(&text, &sluice_restore_sets[i]);
  }
  sluice_text_add(&text, "]}\n");
  return text.used;
}
