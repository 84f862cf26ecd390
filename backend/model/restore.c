// SPDX-License-Identifier: Apache-2.0
#include "backend/model/restore.h"

#include <string.h>

#include "backend/base/text.h"

#define DI SLUICE_RESTORES_DI
#define M  SLUICE_RESTORES_M

static const sluice_restore_t no_policy = {.name = "unknown", .word = "unknown"};

static const sluice_restore_t restores[SLUICE_NUM_RESTORES] = {
    [SLUICE_RESTORE_KEEP] = {.name = "keep", .word = "keep", .tensors = DI | M, .device_rows = 1},
    [SLUICE_RESTORE_OFFLOAD] = {.name = "offload", .word = "offload", .tensors = DI | M, .host_rows = 1},
    [SLUICE_RESTORE_REDISPATCH] = {.name = "redispatch", .word = "re-dispatch", .tensors = DI, .exchanges = 1},
    [SLUICE_RESTORE_RECOMPUTE] = {.name = "recompute", .word = "recompute", .tensors = M, .gemms = 1},
};

const sluice_restore_set_t sluice_restore_sets[SLUICE_NUM_RESTORE_SETS] = {
    {"none", SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP},
    {"S1", SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD},
    {"S2", SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_OFFLOAD},
    {"S3", SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE},
    {"S4", SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE},
};

const sluice_restore_t* sluice_restore(int32_t policy) {
  return policy >= 0 && policy < SLUICE_NUM_RESTORES ? &restores[policy] : &no_policy;
}

sluice_restore_mean_t sluice_restore_mean(const uint8_t* policies, int32_t num_chunks) {
  int32_t copies = 0, exchanges = 0, gemms = 0;
  for (int32_t i = 0; i < num_chunks; ++i) {
    const sluice_restore_t* restore = sluice_restore(policies[i]);
    copies += restore->host_rows, exchanges += restore->exchanges, gemms += restore->gemms;
  }
  const double n = num_chunks;
  return (sluice_restore_mean_t){copies / n, exchanges / n, gemms / n};
}

const char* sluice_restore_name(int32_t policy) {
  return policy == SLUICE_RESTORE_BY_CHUNK ? "by chunk" : sluice_restore(policy)->name;
}

int sluice_restore_is_for(int32_t policy, int32_t tensor) {
  return (sluice_restore(policy)->tensors & (tensor == SLUICE_T_DI ? DI : M)) != 0;
}

int sluice_restore_fits_callback(int32_t restore_input, int32_t restore_pre_activation) {
  if (sluice_restore_is_computed_again(restore_pre_activation)) return 1;
  return sluice_restore_is_kept(restore_input) && sluice_restore_is_kept(restore_pre_activation);
}

int32_t sluice_restore_least(int32_t tensor) {
  int32_t policy = 0;
  while (!sluice_restore_is_for(policy, tensor) || sluice_restore_is_stored(policy)) ++policy;
  return policy;
}

int32_t sluice_restore_find(const char* name, size_t length, int32_t tensor) {
  for (int32_t policy = 0; policy < SLUICE_NUM_RESTORES; ++policy) {
    const char* known = restores[policy].name;
    if (!sluice_restore_is_for(policy, tensor) || strlen(known) != length) continue;
    if (memcmp(known, name, length) == 0) return policy;
  }
  return -1;
}

/* ---- text for messages ---- */

static void add_name(sluice_text_t* text, int32_t policy) { sluice_text_add(text, "\"%s\"", restores[policy].name); }

static void add_word(sluice_text_t* text, int32_t policy) {
  sluice_text_add(text, "%s (%d)", restores[policy].word, policy);
}

/* Lists the policies of `tensor` for which `question` is true (NULL: all), each written by `add`: "a, b LAST c". */
static void add_list(sluice_text_t* text, int32_t tensor, sluice_restore_question_t question,
                     void (*add)(sluice_text_t*, int32_t), const char* last) {
  int32_t listed[SLUICE_NUM_RESTORES], count = 0;
  for (int32_t policy = 0; policy < SLUICE_NUM_RESTORES; ++policy) {
    if (sluice_restore_is_for(policy, tensor) && (question == NULL || question(policy))) listed[count++] = policy;
  }
  for (int32_t i = 0; i < count; ++i) {
    sluice_text_add(text, "%s", i == 0 ? "" : i == count - 1 ? last : ", ");
    add(text, listed[i]);
  }
}

const char* sluice_restore_choices(int32_t tensor, char text[SLUICE_RESTORE_TEXT_BYTES]) {
  sluice_text_t out = sluice_text(text, SLUICE_RESTORE_TEXT_BYTES);
  add_list(&out, tensor, NULL, add_word, " and ");
  return text;
}

const char* sluice_restore_names(int32_t tensor, char text[SLUICE_RESTORE_TEXT_BYTES]) {
  sluice_text_t out = sluice_text(text, SLUICE_RESTORE_TEXT_BYTES);
  add_list(&out, tensor, NULL, add_name, " and ");
  return text;
}

const char* sluice_restore_callback_choices(char text[SLUICE_RESTORE_TEXT_BYTES]) {
  sluice_text_t out = sluice_text(text, SLUICE_RESTORE_TEXT_BYTES);
  sluice_text_add(&out, "restore_pre_activation ");
  add_list(&out, SLUICE_T_M, sluice_restore_is_kept, add_word, " or ");
  sluice_text_add(&out, " with restore_input ");
  add_list(&out, SLUICE_T_DI, sluice_restore_is_kept, add_word, " or ");
  sluice_text_add(&out, ", or restore_pre_activation ");
  add_list(&out, SLUICE_T_M, sluice_restore_is_computed_again, add_word, " or ");
  return text;
}

const char* sluice_restore_set_name(int32_t restore_input, int32_t restore_pre_activation) {
  for (int32_t i = 0; i < SLUICE_NUM_RESTORE_SETS; ++i) {
    const sluice_restore_set_t* set = &sluice_restore_sets[i];
    if (set->restore_input == restore_input && set->restore_pre_activation == restore_pre_activation) return set->name;
  }
  return NULL;
}

/* ---- the table as JSON ---- */

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
