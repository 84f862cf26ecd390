// SPDX-License-Identifier: Apache-2.0
/* A small reader of JSON into a tree, for machine profiles and decisions. Strings are UTF-8 and point into the caller's
 * text. Escapes, which names and values here never need, are an error with a message. */
#pragma once

#include "backend/base/alloc.h"

typedef enum sluice_json_kind_e {
  SLUICE_JSON_NULL = 0,
  SLUICE_JSON_BOOL,
  SLUICE_JSON_NUMBER,
  SLUICE_JSON_STRING,
  SLUICE_JSON_ARRAY,
  SLUICE_JSON_OBJECT
} sluice_json_kind_t;

typedef struct sluice_json_s {
  int32_t kind;
  int32_t name_length; /* of a member of an object */
  const char* name;    /* not terminated */
  const char* text;    /* of a string, not terminated */
  int32_t text_length;
  int32_t count; /* children */
  double number; /* BOOL: 0 or 1 */
  const struct sluice_json_s* child;
  const struct sluice_json_s* next;
} sluice_json_t;

typedef struct sluice_json_tree_s {
  sluice_json_t* nodes;
  int32_t used, capacity;
} sluice_json_tree_t;

/* text [length], at most 16 MiB, is borrowed while the tree is used; an object has at most 256 members. out_tree: new,
 * release with sluice_json_free; nodes[0] is the root. `what` begins the message ("machine profile"). Errors:
 * INVALID_ARGUMENT with line and column, NO_MEMORY. */
sluice_status_t sluice_json_parse(const char* text, uint64_t length, const char* what, sluice_json_tree_t* out_tree);
void sluice_json_free(sluice_json_tree_t* tree);

int sluice_json_is_named(const sluice_json_t* node, const char* name);
/* Returns whether the node is a string with this text. */
int sluice_json_is_text(const sluice_json_t* node, const char* text);
/* Returns the member, or NULL. Parsing rejects repeated names. */
const sluice_json_t* sluice_json_member(const sluice_json_t* object, const char* name);
