/* Decisions as JSON: what was answered, by kind of layer and size of the batch. */
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/tune/json.h"
#include "backend/tune/tuner.h"

#define FORM      1
#define WHAT      "decisions"
#define MOST_ROWS 4294967296.0

#define CHECK(condition, ...) \
  if (!(condition)) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, __VA_ARGS__)

/* ---- writing ---- */

typedef struct text_s {
  char* data;
  uint64_t room, used;
} text_t;

__attribute__((format(printf, 2, 3))) static void add(text_t* text, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  uint64_t left = text->used < text->room ? text->room - text->used : 0;
  int length = vsnprintf(left > 0 ? text->data + text->used : NULL, left, format, arguments);
  va_end(arguments);
  if (length > 0) text->used += (uint64_t)length;
}

static const char* const mode_names[] = {"deferred", "per_chunk"};

static void add_answer(text_t* text, uint64_t layer, int64_t rows, int32_t pick, const char** separator) {
  add(text, "%s\n  {\"layer\": \"%016" PRIx64 "\", \"rows\": %lld, \"num_chunks\": %d, \"wgrad_mode\": \"%s\"}",
      *separator, layer, (long long)rows, sluice_pick_chunks(pick), mode_names[sluice_pick_wgrad(pick)]);
  *separator = ",";
}

static const sluice_tuner_table_t* table_of(const sluice_tuner_t* tuner, uint64_t layer) {
  const sluice_tuner_table_t* table = tuner->tables;
  while (table != NULL && table->layer != layer) table = table->next;
  return table;
}

uint64_t sluice_tuner_write(const sluice_tuner_t* tuner, char* data, uint64_t room) {
  text_t text = {data, data == NULL ? 0 : room, 0};
  const char* separator = "";
  add(&text, "{\"sluice_decisions\": %d, \"answers\": [", FORM);
  for (const sluice_tuner_table_t* t = tuner == NULL ? NULL : tuner->tables; t != NULL; t = t->next) {
    for (int32_t b = 0; b < SLUICE_SEARCH_BUCKETS; ++b) {
      const sluice_spot_t* spot = &t->search.spots[b];
      if (spot->state == SLUICE_SPOT_ANSWERED) add_answer(&text, t->layer, spot->rows, spot->pick, &separator);
    }
  }
  for (int32_t i = 0; tuner != NULL && i < tuner->num_imports; ++i) { /* of layers that did not come yet */
    const sluice_import_t* import = &tuner->imports[i];
    if (table_of(tuner, import->layer) == NULL)
      add_answer(&text, import->layer, import->rows, import->pick, &separator);
  }
  add(&text, "]}\n");
  return text.used;
}

/* ---- reading ---- */

static int is_text(const sluice_json_t* node, const char* text) {
  return node->kind == SLUICE_JSON_STRING && strlen(text) == (size_t)node->text_length &&
         memcmp(text, node->text, strlen(text)) == 0;
}

static sluice_status_t read_answer(const sluice_json_t* node, int32_t number, sluice_import_t* out) {
  CHECK(node->kind == SLUICE_JSON_OBJECT, WHAT ": answer %d must be an object", number);
  for (const sluice_json_t* c = node->child; c != NULL; c = c->next) {
    CHECK(sluice_json_is_named(c, "layer") || sluice_json_is_named(c, "rows") ||
              sluice_json_is_named(c, "num_chunks") || sluice_json_is_named(c, "wgrad_mode"),
          WHAT ": unknown field \"%.*s\" in answer %d; known are layer, rows, num_chunks and wgrad_mode",
          c->name_length, c->name, number);
  }
  const sluice_json_t *layer = sluice_json_member(node, "layer"), *rows = sluice_json_member(node, "rows");
  const sluice_json_t *chunks = sluice_json_member(node, "num_chunks"), *mode = sluice_json_member(node, "wgrad_mode");
  CHECK(layer != NULL && layer->kind == SLUICE_JSON_STRING && layer->text_length == 16,
        WHAT ": layer of answer %d must be 16 hexadecimal digits, the kind of layer it is for", number);
  char digits[17], *end = NULL;
  memcpy(digits, layer->text, 16);
  digits[16] = '\0';
  out->layer = strtoull(digits, &end, 16);
  CHECK(end == digits + 16, WHAT ": layer of answer %d is \"%s\"; it must be 16 hexadecimal digits", number, digits);
  CHECK(rows != NULL && rows->kind == SLUICE_JSON_NUMBER && rows->number >= 1 && rows->number <= MOST_ROWS &&
            rows->number == floor(rows->number),
        WHAT ": rows of answer %d must be a whole number in [1, 2^32]", number);
  out->rows = (int64_t)rows->number;
  int32_t size = 0;
  CHECK(chunks != NULL && chunks->kind == SLUICE_JSON_NUMBER, WHAT ": num_chunks of answer %d is missing", number);
  while (size < SLUICE_SEARCH_SIZES && sluice_search_sizes[size] != chunks->number) ++size;
  CHECK(size < SLUICE_SEARCH_SIZES, WHAT ": num_chunks of answer %d is %g; known are 1, 2, 3, 4, 6, 8, 12 and 16",
        number, chunks->number);
  CHECK(mode == NULL || is_text(mode, mode_names[0]) || is_text(mode, mode_names[1]),
        WHAT ": wgrad_mode of answer %d must be \"deferred\" or \"per_chunk\"", number);
  out->pick = size + (mode != NULL && is_text(mode, mode_names[1]) ? SLUICE_SEARCH_SIZES : 0);
  return SLUICE_OK;
}

static sluice_status_t find_answers(const sluice_json_t* root, const sluice_json_t** out_answers) {
  CHECK(root->kind == SLUICE_JSON_OBJECT, WHAT ": the outermost value must be an object");
  const sluice_json_t* form = sluice_json_member(root, "sluice_decisions");
  CHECK(form != NULL && form->kind == SLUICE_JSON_NUMBER,
        WHAT ": they begin with \"sluice_decisions\": %d, the form that they are written in", FORM);
  CHECK(form->number == FORM, WHAT ": form %g; this version reads form %d: leave the file out, and let it be made anew",
        form->number, FORM);
  *out_answers = sluice_json_member(root, "answers");
  CHECK(*out_answers != NULL && (*out_answers)->kind == SLUICE_JSON_ARRAY && root->count == 2,
        WHAT ": besides the form there is exactly \"answers\", an array");
  return SLUICE_OK;
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
    sluice_tuner_table_t* table = tuner->tables;
    while (table != NULL && table->layer != import->layer) table = table->next;
    if (table != NULL) sluice_search_answer(&table->search, import->rows, import->pick);
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
