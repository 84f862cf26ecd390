// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/decisions_json.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/json.h"
#include "backend/base/log.h"
#include "backend/base/text.h"
#include "backend/model/restore.h"
#include "backend/model/words.h"
#include "backend/plan/plan.h"
#include "backend/tune/search/search.h"

#define FORM      3 /* form 1 had no policies: it is still read, with a log line; form 2 named them differently */
#define WHAT      "decisions"
#define MOST_ROWS 4294967296.0

/* ---- writing ---- */

static const char* const mode_names[] = {"deferred", "per_chunk"};

/* The answer of a plan includes its policies. deduplicate -1: the form of exchanges is not decided, or not open. */
static void add_plan(sluice_text_t* text, uint64_t layer, int64_t rows, const sluice_racing_plan_t* plan,
                     int32_t deduplicate, int32_t is_grouped, const char** separator) {
  sluice_text_add(text,
                  "%s\n  {\"layer\": \"%016" PRIx64 "\", \"rows\": %lld, \"num_chunks\": %d, \"wgrad_mode\": \"%s\"",
                  *separator, layer, (long long)rows, plan->num_chunks, mode_names[plan->wgrad_mode]);
  if (plan->restore_input >= 0) {
    sluice_text_add(text, ", \"restore_input\": \"%s\", \"restore_pre_activation\": \"%s\"",
                    sluice_restore_name(plan->restore_input), sluice_restore_name(plan->restore_pre_activation));
  }
  if (deduplicate >= 0) sluice_text_add(text, ", \"deduplicate\": \"%s\"", sluice_deduplicate_word(deduplicate));
  if (is_grouped) sluice_text_add(text, ", \"grouped\": true");
  sluice_text_add(text, "}");
  *separator = ",";
}

/* If the layer leaves the deduplication open, the answer includes it, and whether exchanges are grouped. */
static void add_answer(sluice_text_t* text, const sluice_tuner_table_t* t, const sluice_spot_t* spot,
                       const char** separator) {
  int32_t pick = spot->pick, form = SLUICE_FORM_PLAIN, deduplicate = -1;
  const int32_t decided = sluice_grouping_answer_of(&t->grouping, spot->rows, pick, &form);
  if (t->grouping.config.tells_plain && decided >= 0) {
    pick = decided;
    deduplicate = sluice_tuner_deduplication_of(&t->work, form);
  }
  const sluice_racing_plan_t plan = {sluice_search_chunks(&t->search, pick), -1, -1, sluice_pick_wgrad(pick)};
  add_plan(text, t->layer, spot->rows, &plan, deduplicate, deduplicate >= 0 && form == SLUICE_FORM_GROUPED, separator);
}

static void add_races(sluice_text_t* text, const sluice_tuner_table_t* table, const char** separator) {
  for (int32_t i = 0; i < SLUICE_TUNER_RACES; ++i) {
    const sluice_plan_race_t* race = &table->races[i].race;
    if (table->races[i].key == 0 || !race->is_settled) continue;
    add_plan(text, table->layer, table->races[i].size_rows, &race->plans[race->pick], -1, 0, separator);
  }
}

static sluice_tuner_table_t* table_of(const sluice_tuner_t* tuner, uint64_t layer) {
  sluice_tuner_table_t* table = tuner->tables;
  while (table != NULL && table->layer != layer) table = table->next;
  return table;
}

uint64_t sluice_tuner_write(const sluice_tuner_t* tuner, char* data, uint64_t room) {
  sluice_text_t text = sluice_text(data, room);
  const char* separator = "";
  sluice_text_add(&text, "{\"sluice_decisions\": %d, \"answers\": [", FORM);
  for (const sluice_tuner_table_t* t = tuner == NULL ? NULL : tuner->tables; t != NULL; t = t->next) {
    for (int32_t b = 0; b < SLUICE_SEARCH_BUCKETS; ++b) {
      const sluice_spot_t* spot = &t->search.spots[b];
      if (t->restore_set != 0) continue; /* a strategy of several: files do not hold these */
      if (!sluice_spot_is_worth_keeping(spot)) continue;
      add_answer(&text, t, spot, &separator);
    }
    add_races(&text, t, &separator);
  }
  for (int32_t i = 0; tuner != NULL && i < tuner->num_imports; ++i) { /* for layers that have not been created yet */
    const sluice_import_t* import = &tuner->imports[i];
    if (table_of(tuner, import->layer) != NULL) continue;
    const sluice_racing_plan_t chunks = {import->num_chunks, -1, -1, sluice_pick_wgrad(import->pick)};
    add_plan(&text, import->layer, import->rows, import->plan.num_chunks > 0 ? &import->plan : &chunks,
             import->deduplicate, import->is_grouped, &separator);
  }
  sluice_text_add(&text, "]}\n");
  return text.used;
}

/* ---- reading ---- */

/* The number of a policy, also from "by chunk"; -1 if the node names none. */
static int32_t read_policy(const sluice_json_t* node, int32_t tensor) {
  if (node == NULL || node->kind != SLUICE_JSON_STRING) return -1;
  if (sluice_json_is_text(node, sluice_restore_name(SLUICE_RESTORE_BY_CHUNK))) return SLUICE_RESTORE_BY_CHUNK;
  return sluice_restore_find(node->text, (size_t)node->text_length, tensor);
}

/* Reads both policies or none. */
static sluice_status_t read_policies(const sluice_json_t* node, int32_t number, sluice_racing_plan_t* out) {
  const sluice_json_t* di = sluice_json_member(node, "restore_input");
  const sluice_json_t* m = sluice_json_member(node, "restore_pre_activation");
  const int is_given = di != NULL || m != NULL;
  const char* by_chunk = sluice_restore_name(SLUICE_RESTORE_BY_CHUNK);
  char known[SLUICE_RESTORE_TEXT_BYTES];
  out->restore_input = read_policy(di, SLUICE_T_DI);
  out->restore_pre_activation = read_policy(m, SLUICE_T_M);
  SLUICE_TRY(SLUICE_REQUIRE(!is_given || out->restore_input >= 0,
                            WHAT ": restore_input of answer %d is none of %s, nor \"%s\"", number,
                            sluice_restore_names(SLUICE_T_DI, known), by_chunk));
  SLUICE_TRY(SLUICE_REQUIRE(!is_given || out->restore_pre_activation >= 0,
                            WHAT ": restore_pre_activation of answer %d is none of %s, nor \"%s\"", number,
                            sluice_restore_names(SLUICE_T_M, known), by_chunk));
  return SLUICE_OK;
}

/* Reads the deduplication, and whether exchanges are grouped, of answers without a plan. */
static sluice_status_t read_form(const sluice_json_t* node, int32_t number, sluice_import_t* out) {
  const sluice_json_t *way = sluice_json_member(node, "deduplicate"), *grouped = sluice_json_member(node, "grouped");
  out->deduplicate = -1;
  for (int32_t i = SLUICE_DEDUPLICATE_NONE; way != NULL && i <= SLUICE_DEDUPLICATE_NODES; ++i) {
    if (sluice_json_is_text(way, sluice_deduplicate_word(i))) out->deduplicate = i;
  }
  SLUICE_TRY(SLUICE_REQUIRE(way == NULL || out->deduplicate >= 0,
                            WHAT ": deduplicate of answer %d must be \"none\", \"ranks\" or \"nodes\"", number));
  SLUICE_TRY(SLUICE_REQUIRE(way == NULL || out->plan.restore_input < 0,
                            WHAT ": answer %d has deduplicate and policies; an answer with policies is a plan, which "
                                 "leaves deduplicate out",
                            number));
  SLUICE_TRY(SLUICE_REQUIRE(
      grouped == NULL || (way != NULL && grouped->kind == SLUICE_JSON_BOOL),
      WHAT ": grouped of answer %d must be true or false, and needs deduplicate in the same answer", number));
  out->is_grouped = grouped != NULL && grouped->number != 0;
  return SLUICE_OK;
}

static sluice_status_t read_answer(const sluice_json_t* node, int32_t number, sluice_import_t* out) {
  static const char* const known[] = {
      "layer", "rows", "num_chunks", "wgrad_mode", "restore_input", "restore_pre_activation", "deduplicate", "grouped"};
  /* clears the rest of a refused file, which other ranks may not have read: ranks compare imports */
  *out = (sluice_import_t){0};
  SLUICE_TRY(SLUICE_REQUIRE(node->kind == SLUICE_JSON_OBJECT, WHAT ": answer %d must be an object", number));
  for (const sluice_json_t* c = node->child; c != NULL; c = c->next) {
    size_t i = 0;
    while (i < sizeof known / sizeof known[0] && !sluice_json_is_named(c, known[i])) ++i;
    SLUICE_TRY(SLUICE_REQUIRE(
        i < sizeof known / sizeof known[0],
        WHAT
        ": unknown field \"%.*s\" in answer %d; known are layer, rows, num_chunks, wgrad_mode, restore_input, "
        "restore_pre_activation, deduplicate and grouped",
        c->name_length, c->name, number));
  }
  const sluice_json_t *layer = sluice_json_member(node, "layer"), *rows = sluice_json_member(node, "rows");
  const sluice_json_t *chunks = sluice_json_member(node, "num_chunks"), *mode = sluice_json_member(node, "wgrad_mode");
  SLUICE_TRY(SLUICE_REQUIRE(layer != NULL && layer->kind == SLUICE_JSON_STRING && layer->text_length == 16,
                            WHAT ": layer of answer %d must be 16 hexadecimal digits, the kind of layer it is for",
                            number));
  char digits[17], *end = NULL;
  memcpy(digits, layer->text, 16);
  digits[16] = '\0';
  out->layer = strtoull(digits, &end, 16);
  SLUICE_TRY(SLUICE_REQUIRE(end == digits + 16, WHAT ": layer of answer %d is \"%s\"; it must be 16 hexadecimal digits",
                            number, digits));
  SLUICE_TRY(SLUICE_REQUIRE(rows != NULL && rows->kind == SLUICE_JSON_NUMBER && rows->number >= 1 &&
                                rows->number <= MOST_ROWS && rows->number == floor(rows->number),
                            WHAT ": rows of answer %d must be a whole number in [1, 2^32]", number));
  out->rows = (int64_t)rows->number;
  int32_t per_chunk = mode != NULL && sluice_json_is_text(mode, mode_names[1]);
  SLUICE_TRY(SLUICE_REQUIRE(chunks != NULL && chunks->kind == SLUICE_JSON_NUMBER,
                            WHAT ": num_chunks of answer %d is missing", number));
  SLUICE_TRY(SLUICE_REQUIRE(mode == NULL || per_chunk || sluice_json_is_text(mode, mode_names[0]),
                            WHAT ": wgrad_mode of answer %d must be \"deferred\" or \"per_chunk\"", number));
  SLUICE_TRY(read_policies(node, number, &out->plan));
  SLUICE_TRY(read_form(node, number, out));
  SLUICE_TRY(SLUICE_REQUIRE(
      chunks->number >= 1 && chunks->number <= SLUICE_MAX_CHUNKS && chunks->number == floor(chunks->number),
      WHAT ": num_chunks of answer %d is %g; it must be a whole number in [1, %d]", number, chunks->number,
      SLUICE_MAX_CHUNKS));
  if (out->plan.restore_input >= 0) {
    out->plan.num_chunks = (int32_t)chunks->number, out->plan.wgrad_mode = per_chunk;
    return SLUICE_OK;
  }
  out->plan = (sluice_racing_plan_t){0, -1, -1, 0};
  out->num_chunks = (int32_t)chunks->number;
  out->pick = sluice_search_size_of(out->num_chunks) + (per_chunk ? SLUICE_SEARCH_SIZES : 0);
  return SLUICE_OK;
}

static sluice_status_t find_answers(const sluice_json_t* root, const sluice_json_t** out_answers) {
  SLUICE_TRY(SLUICE_REQUIRE(root->kind == SLUICE_JSON_OBJECT, WHAT ": the outermost value must be an object"));
  const sluice_json_t* form = sluice_json_member(root, "sluice_decisions");
  SLUICE_TRY(SLUICE_REQUIRE(form != NULL && form->kind == SLUICE_JSON_NUMBER,
                            WHAT ": they must begin with \"sluice_decisions\": %d, the version of their format", FORM));
  SLUICE_TRY(SLUICE_REQUIRE(
      form->number == FORM || form->number == 1,
      WHAT ": format version %g; this library reads versions 1 and %d: remove the file, and it is written again",
      form->number, FORM));
  if (form->number != FORM) {
    sluice_log(
        SLUICE_LOG_WARN,
        WHAT ": format version 1, which has no plans of memory budgets: these are chosen again; version %d is written",
        FORM);
  }
  *out_answers = sluice_json_member(root, "answers");
  SLUICE_TRY(SLUICE_REQUIRE(*out_answers != NULL && (*out_answers)->kind == SLUICE_JSON_ARRAY && root->count == 2,
                            WHAT ": the only other field must be \"answers\", an array"));
  return SLUICE_OK;
}

void sluice_tuner_take_import(sluice_tuner_table_t* table, const sluice_import_t* import) {
  if (import->plan.num_chunks > 0) return; /* of a plan: computed once a plan exists */
  const sluice_search_config_t* c = &table->search.config;
  int32_t size = import->pick % SLUICE_SEARCH_SIZES;
  if (size < c->min_size || size > c->max_size || sluice_search_chunks(&table->search, size) != import->num_chunks) {
    sluice_log(SLUICE_LOG_WARN, WHAT ": layers %016llx cannot run %d chunks: that answer is ignored",
               (unsigned long long)import->layer, import->num_chunks);
    return;
  }
  const int32_t form = import->deduplicate < 0
                           ? SLUICE_FORM_PLAIN
                           : sluice_tuner_form_of(&table->work, import->deduplicate, import->is_grouped);
  if (!sluice_grouping_has(&table->grouping, form)) {
    sluice_log(SLUICE_LOG_WARN, WHAT ": layers %016llx cannot run with deduplicate \"%s\"%s: that answer is ignored",
               (unsigned long long)import->layer, sluice_deduplicate_word(import->deduplicate),
               import->is_grouped ? " and groups" : "");
    return;
  }
  sluice_search_answer(&table->search, import->rows, import->pick);
  if (import->deduplicate >= 0)
    sluice_grouping_answer(&table->grouping, &table->search, import->rows, import->pick, form);
}

static sluice_status_t grow(sluice_tuner_t* tuner, int32_t more) {
  int32_t wanted = tuner->num_imports + more;
  if (wanted <= tuner->max_imports) return SLUICE_OK;
  sluice_import_t* imports =
      sluice_alloc_zeroed(tuner->allocator, (uint64_t)wanted * sizeof *imports, "imported decisions");
  if (imports == NULL) return sluice_alloc_status();
  if (tuner->num_imports > 0) memcpy(imports, tuner->imports, (size_t)tuner->num_imports * sizeof *imports);
  sluice_free(tuner->allocator, tuner->imports, (uint64_t)tuner->max_imports * sizeof *imports);
  tuner->imports = imports;
  tuner->max_imports = wanted;
  return SLUICE_OK;
}

static sluice_status_t take(sluice_tuner_t* tuner, const sluice_json_t* root) {
  const sluice_json_t* answers = NULL;
  SLUICE_TRY(find_answers(root, &answers));
  SLUICE_TRY(grow(tuner, answers->count));
  int32_t number = 0;
  for (const sluice_json_t* a = answers->child; a != NULL; a = a->next, ++number) {
    SLUICE_TRY(read_answer(a, number, &tuner->imports[tuner->num_imports + number]));
  }
  for (int32_t i = 0; i < number; ++i) {
    const sluice_import_t* import = &tuner->imports[tuner->num_imports + i];
    sluice_tuner_table_t* table = table_of(tuner, import->layer);
    if (table != NULL) sluice_tuner_take_import(table, import);
  }
  tuner->num_imports += number;
  sluice_tuner_update_state(tuner);
  return SLUICE_OK;
}

sluice_status_t sluice_tuner_read(sluice_tuner_t* tuner, const char* text, uint64_t length) {
  sluice_json_tree_t tree;
  SLUICE_TRY(sluice_json_parse(text, length, WHAT, &tree));
  sluice_status_t status = take(tuner, &tree.nodes[0]);
  sluice_json_free(&tree);
  return status;
}
