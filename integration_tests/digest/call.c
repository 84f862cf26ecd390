// SPDX-License-Identifier: Apache-2.0
/* Derives what a call of the list wants, and which rank owns an expert. */
#include "call.h"

#include <string.h>

static int has_word(const char* list, const char* word) {
  for (const char* at = list; *at != '\0';) {
    size_t size = strcspn(at, ",");
    if (strlen(word) == size && strncmp(at, word, size) == 0) return 1;
    at += size + (at[size] == ',');
  }
  return 0;
}

wanted_t call_wanted(const call_t* c) {
  const int params = !has_word(c->frozen, "params");
  return (wanted_t){!has_word(c->frozen, "x"),
                    !has_word(c->frozen, "routes"),
                    params && !has_word(c->frozen, "w1"),
                    params && !has_word(c->frozen, "w3"),
                    params && !has_word(c->frozen, "w2"),
                    params && !has_word(c->frozen, "b1"),
                    params && !has_word(c->frozen, "b3"),
                    params && !has_word(c->frozen, "b2")};
}

int32_t call_owner(const call_t* c, int32_t expert) {
  switch (c->owners) {
    case OWNERS_UNEVEN: return expert < c->ranks ? expert : c->ranks - 1;
    case OWNERS_SCATTERED: return (expert * 5 + 1) % c->ranks;
    default: return expert / (c->experts / c->ranks);
  }
}
