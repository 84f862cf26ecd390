// SPDX-License-Identifier: Apache-2.0
/* Reads the fields of a call of the list. */
#include "call.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INT, WIDE, WORD, NAME, TOKENS, POLICIES };

typedef struct field_s {
  const char* name;
  int kind;
  size_t offset;
  const char* words; /* of WORD, in the order of the enum */
} field_t;

static const char policy_words[] = "keep offload redispatch recompute open";

#define FIELD(kind, member, words) \
  { #member, kind, offsetof(call_t, member), words }

static const field_t fields[] = {
    FIELD(NAME, id, NULL),
    FIELD(NAME, family, NULL),
    FIELD(INT, ranks, NULL),
    FIELD(TOKENS, tokens, NULL),
    FIELD(WIDE, width, NULL),
    FIELD(WIDE, hidden, NULL),
    FIELD(INT, experts, NULL),
    FIELD(INT, topk, NULL),
    FIELD(WORD, dtype, "f32 bf16 f16 f64"),
    FIELD(WORD, activation, "identity relu gelu gelu_tanh silu relu2 swiglu"),
    FIELD(WORD, gated, "no halves interleaved"),
    FIELD(INT, bias, NULL),
    FIELD(WORD, device, "cpu cuda"),
    FIELD(WORD, gemm, "ref native"),
    FIELD(WORD, comm, "local nccl"),
    FIELD(INT, threads, NULL),
    FIELD(INT, chunks, NULL),
    FIELD(WORD, cut, "tokens rows"),
    FIELD(POLICIES, input, policy_words),
    FIELD(POLICIES, middle, policy_words),
    FIELD(WORD, wgrad, "deferred per_chunk"),
    FIELD(WIDE, ceiling, NULL),
    FIELD(INT, deduplicate, NULL),
    FIELD(WORD, api, "layer parts"),
    FIELD(INT, callback, NULL),
    FIELD(WORD, plan, "none own budget"),
    FIELD(INT, percent, NULL),
    FIELD(INT, separate_wgrad, NULL),
    FIELD(INT, outstanding, NULL),
    FIELD(INT, steps, NULL),
    FIELD(INT, repeat, NULL),
    FIELD(INT, restore, NULL),
    FIELD(INT, reuse, NULL),
    FIELD(INT, eval, NULL),
    FIELD(INT, capture, NULL),
    FIELD(NAME, frozen, NULL),
    FIELD(INT, accumulate, NULL),
    FIELD(INT, grad_f32, NULL),
    FIELD(INT, transposed, NULL),
    FIELD(INT, ids32, NULL),
    FIELD(WORD, owners, "even uneven scattered"),
    FIELD(INT, drop_every, NULL),
    FIELD(INT, hot, NULL),
    FIELD(INT, same_every, NULL),
    FIELD(INT, seed, NULL),
};
enum { NUM_FIELDS = sizeof fields / sizeof fields[0] };

static void set_defaults(call_t* c) {
  memset(c, 0, sizeof *c);
  c->ranks = 1, c->width = 11, c->hidden = 19, c->experts = 12, c->topk = 2, c->threads = 1, c->chunks = 1;
  c->input.count = c->middle.count = 1;
  c->percent = 100, c->outstanding = 1, c->steps = 1, c->hot = -1, c->seed = 1;
  c->activation = GELU;
}

static int word_index(const char* words, const char* word, size_t length) {
  int index = 0;
  for (const char* at = words; *at != '\0'; ++index) {
    size_t size = strcspn(at, " ");
    if (size == length && strncmp(at, word, length) == 0) return index;
    at += size + (at[size] == ' ');
  }
  return -1;
}

static int read_list(const field_t* f, const char* value, call_t* out) {
  int32_t count = 0;
  policies_t* policies = (policies_t*)((char*)out + f->offset);
  for (const char* at = value; *at != '\0'; ++count) {
    size_t size = strcspn(at, ",");
    if (f->kind == TOKENS) {
      if (count == CALL_MAX_RANKS) return 0;
      char* end = NULL;
      out->tokens[count] = strtoll(at, &end, 10);
      if (end != at + size || size == 0 || out->tokens[count] < 0) return 0;
    } else {
      if (count == CALL_MAX_CHUNKS) return 0;
      policies->of[count] = word_index(f->words, at, size);
      if (policies->of[count] < 0) return 0;
    }
    at += size + (at[size] == ',');
  }
  if (f->kind == POLICIES) policies->count = count;
  return count > 0;
}

static int read_value(const field_t* f, const char* value, call_t* out) {
  char *to = (char*)out + f->offset, *end = NULL;
  switch (f->kind) {
    case INT: *(int32_t*)to = (int32_t)strtol(value, &end, 10); return *value != '\0' && *end == '\0';
    case WIDE: *(int64_t*)to = strtoll(value, &end, 10); return *value != '\0' && *end == '\0';
    case WORD: *(int32_t*)to = word_index(f->words, value, strlen(value)); return *(int32_t*)to >= 0;
    case NAME: return snprintf(to, CALL_NAME, "%s", value) < CALL_NAME && *value != '\0';
    default: return read_list(f, value, out);
  }
}

static int read_pair(char* pair, call_t* out, char* why, size_t why_bytes) {
  char* equals = strchr(pair, '=');
  for (int i = 0; equals != NULL && i < NUM_FIELDS; ++i) {
    if (strlen(fields[i].name) != (size_t)(equals - pair) ||
        strncmp(pair, fields[i].name, (size_t)(equals - pair)) != 0)
      continue;
    if (read_value(&fields[i], equals + 1, out)) return 1;
    snprintf(why, why_bytes, "field %s does not take \"%s\"", fields[i].name, equals + 1);
    return 0;
  }
  snprintf(why, why_bytes, "\"%s\" is no field of a call (README.md lists them)", pair);
  return 0;
}

static int is_whole(const call_t* c) {
  const int32_t by_input = c->input.count, by_middle = c->middle.count;
  return c->id[0] != '\0' && c->family[0] != '\0' && c->ranks >= 1 && c->ranks <= CALL_MAX_RANKS &&
         c->experts <= CALL_MAX_EXPERTS && c->steps >= 1 && c->outstanding >= 1 && c->outstanding <= 4 &&
         (by_input == 1 || by_input == c->chunks) && (by_middle == 1 || by_middle == c->chunks);
}

int call_parse(const char* line, call_t* out, char* why, size_t why_bytes) {
  char text[1024], *state = NULL;
  set_defaults(out);
  if (snprintf(text, sizeof text, "%s", line) >= (int)sizeof text) {
    snprintf(why, why_bytes, "the line is longer than %d", (int)sizeof text - 1);
    return 0;
  }
  for (char* pair = strtok_r(text, " \t\r\n", &state); pair != NULL; pair = strtok_r(NULL, " \t\r\n", &state)) {
    if (!read_pair(pair, out, why, why_bytes)) return 0;
  }
  if (is_whole(out)) return 1;
  snprintf(why, why_bytes,
           "a call needs id and family, at most %d ranks, %d experts, 4 outstanding, a policy or as many "
           "as chunks",
           CALL_MAX_RANKS, CALL_MAX_EXPERTS);
  return 0;
}

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
