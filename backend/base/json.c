// SPDX-License-Identifier: Apache-2.0
#include "backend/base/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/c_locale.h"

#define MAX_DEPTH 16
/* Sluice or its user writes these texts. No other text may make the reader slow: the names of one object are compared
 * pairwise. */
#define MAX_BYTES   (UINT64_C(1) << 24)
#define MAX_MEMBERS 256

typedef struct reader_s {
  const char* text;
  const char* at;
  const char* end;
  const char* what;
  sluice_json_tree_t* tree;
  int32_t depth;
} reader_t;

static sluice_status_t fail(const reader_t* r, const char* problem) {
  int line = 1, column = 1;
  for (const char* p = r->text; p < r->at; ++p) {
    column = *p == '\n' ? 1 : column + 1;
    line += *p == '\n';
  }
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: line %d, column %d: %s", r->what, line, column, problem);
}

static void skip_space(reader_t* r) {
  while (r->at < r->end && (*r->at == ' ' || *r->at == '\n' || *r->at == '\t' || *r->at == '\r')) ++r->at;
}

static int take(reader_t* r, char wanted) {
  skip_space(r);
  if (r->at == r->end || *r->at != wanted) return 0;
  ++r->at;
  return 1;
}

static sluice_status_t read_string(reader_t* r, const char** out_text, int32_t* out_length) {
  if (!take(r, '"')) return fail(r, "a string in double quotes is expected here");
  const char* first = r->at;
  for (; r->at < r->end && *r->at != '"'; ++r->at) {
    if (*r->at == '\\') return fail(r, "escapes in strings are not used here: write the character itself");
    if ((unsigned char)*r->at < ' ')
      return fail(r, "a string must end on the line where it begins, with a double quote");
  }
  if (r->at == r->end) return fail(r, "the text ends inside a string");
  *out_text = first;
  *out_length = (int32_t)(r->at - first);
  ++r->at;
  return SLUICE_OK;
}

static int take_word(reader_t* r, const char* word) {
  size_t length = strlen(word);
  if ((size_t)(r->end - r->at) < length || memcmp(r->at, word, length) != 0) return 0;
  r->at += length;
  return 1;
}

static sluice_status_t read_number(reader_t* r, sluice_json_t* node) {
  char copy[64];
  size_t length = 0;
  while (r->at + length < r->end && length + 1 < sizeof copy && r->at[length] != 0 &&
         strchr("+-.eE0123456789", r->at[length]) != NULL) {
    copy[length] = r->at[length];
    ++length;
  }
  copy[length] = '\0';
  char* stop = copy;
  double value = length == 0 || copy[0] == '+' || copy[0] == '.' ? 0 : strtod(copy, &stop);
  if (stop == copy || *stop != '\0' || !isfinite(value)) return fail(r, "a value is expected here");
  r->at += length;
  node->kind = SLUICE_JSON_NUMBER;
  node->number = value;
  return SLUICE_OK;
}

/* At least one comma per value after the first: an upper bound that sizes the tree once, so that nodes never move. */
static int32_t most_nodes(const char* text, uint64_t length) {
  int64_t count = 2;
  for (uint64_t i = 0; i < length; ++i) count += text[i] == ',' || text[i] == '[' || text[i] == '{';
  return (int32_t)(count < (1 << 24) ? count : 1 << 24);
}

static sluice_status_t read_value(reader_t* r, sluice_json_t* node);

static sluice_status_t new_child(reader_t* r, sluice_json_t* parent, sluice_json_t** last, sluice_json_t** out) {
  if (r->tree->used == r->tree->capacity) return fail(r, "too many values");
  sluice_json_t* child = &r->tree->nodes[r->tree->used++];
  if (*last == NULL) {
    parent->child = child;
  } else {
    (*last)->next = child;
  }
  *last = child;
  ++parent->count;
  *out = child;
  return SLUICE_OK;
}

static int same_name(const sluice_json_t* a, const sluice_json_t* b) {
  return a->name_length == b->name_length && memcmp(a->name, b->name, (size_t)a->name_length) == 0;
}

static sluice_status_t read_member(reader_t* r, sluice_json_t* object, sluice_json_t* child) {
  if (object->count > MAX_MEMBERS) return fail(r, "this object has too many members");
  SLUICE_TRY(read_string(r, &child->name, &child->name_length));
  for (const sluice_json_t* c = object->child; c != child; c = c->next) {
    if (same_name(c, child)) return fail(r, "this object has two members of this name");
  }
  if (!take(r, ':')) return fail(r, "a colon is expected here");
  return read_value(r, child);
}

static sluice_status_t read_children(reader_t* r, sluice_json_t* node, char close) {
  sluice_json_t *last = NULL, *child = NULL;
  if (take(r, close)) return SLUICE_OK;
  if (++r->depth > MAX_DEPTH) return fail(r, "nested too deep");
  do {
    SLUICE_TRY(new_child(r, node, &last, &child));
    SLUICE_TRY(node->kind == SLUICE_JSON_OBJECT ? read_member(r, node, child) : read_value(r, child));
  } while (take(r, ','));
  --r->depth;
  if (take(r, close)) return SLUICE_OK;
  return fail(r, close == ']' ? "a comma or ] is expected here" : "a comma or } is expected here");
}

static sluice_status_t read_value(reader_t* r, sluice_json_t* node) {
  skip_space(r);
  if (r->at == r->end) return fail(r, "the text ends where a value is expected");
  if (*r->at == '"') {
    node->kind = SLUICE_JSON_STRING;
    return read_string(r, &node->text, &node->text_length);
  }
  if (*r->at == '{' || *r->at == '[') {
    node->kind = *r->at == '{' ? SLUICE_JSON_OBJECT : SLUICE_JSON_ARRAY;
    ++r->at;
    return read_children(r, node, node->kind == SLUICE_JSON_OBJECT ? '}' : ']');
  }
  if (take_word(r, "null")) return SLUICE_OK;
  node->kind = SLUICE_JSON_BOOL;
  if (take_word(r, "false")) return SLUICE_OK;
  node->number = 1;
  if (take_word(r, "true")) return SLUICE_OK;
  return read_number(r, node);
}

sluice_status_t sluice_json_parse(const char* text, uint64_t length, const char* what, sluice_json_tree_t* out_tree) {
  memset(out_tree, 0, sizeof *out_tree);
  if (length > MAX_BYTES) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: the text has %llu bytes; at most %llu are read", what,
                       (unsigned long long)length, (unsigned long long)MAX_BYTES);
  }
  reader_t r = {text, text, text + length, what, out_tree, 0};
  out_tree->capacity = most_nodes(text, length);
  out_tree->nodes =
      sluice_alloc_zeroed(sluice_process_allocator(), (uint64_t)out_tree->capacity * sizeof(sluice_json_t), what);
  if (out_tree->nodes == NULL) return sluice_alloc_status();
  out_tree->used = 1;
  sluice_c_locale_t locale = sluice_c_locale_enter();
  sluice_status_t status = read_value(&r, &out_tree->nodes[0]);
  sluice_c_locale_leave(locale);
  skip_space(&r);
  if (status == SLUICE_OK && r.at != r.end) status = fail(&r, "nothing may follow the outermost value");
  if (status != SLUICE_OK) sluice_json_free(out_tree);
  return status;
}

void sluice_json_free(sluice_json_tree_t* tree) {
  sluice_free(sluice_process_allocator(), tree->nodes, (uint64_t)tree->capacity * sizeof(sluice_json_t));
  memset(tree, 0, sizeof *tree);
}

int sluice_json_is_named(const sluice_json_t* node, const char* name) {
  return strlen(name) == (size_t)node->name_length && memcmp(node->name, name, (size_t)node->name_length) == 0;
}

int sluice_json_is_text(const sluice_json_t* node, const char* text) {
  return node->kind == SLUICE_JSON_STRING && strlen(text) == (size_t)node->text_length &&
         memcmp(text, node->text, strlen(text)) == 0;
}

const sluice_json_t* sluice_json_member(const sluice_json_t* object, const char* name) {
  for (const sluice_json_t* c = object->child; c != NULL; c = c->next) {
    if (sluice_json_is_named(c, name)) return c;
  }
  return NULL;
}
