// SPDX-License-Identifier: Apache-2.0
/* If no plan fits, the error names the cheapest change, and the layer runs with this change. */

#include "capi/test/world/budget_suite.h"
#include "capi/test/world/checks.h"
#include "third_party/bazel/test.h"

static const budget_suite_t suite = {.run = world_run};

static int32_t restore_of(const char* name) {
  static const char* const names[] = {"keep", "offload", "redispatch", "recompute"};
  for (int32_t i = 0; i < 4; ++i) {
    if (strncmp(name, names[i], strlen(names[i])) == 0) return i;
  }
  fail_msg("no policy: %s", name);
  return -1;
}

/* Applies the advice of the error. Returns the number of changes. */
static int apply_advice(const char* message, case_t* c) {
  int changed = 0, chunks = 0, was = 0, outstanding = 0;
  const char* text = strstr(message, "raise memory_budget to that, or ");
  if (text == NULL) fail_msg("no advice: %s", message);
  const char* at = strstr(text, "take ");
  if (at != NULL && sscanf(at, "take %d chunks (not %d)", &chunks, &was) == 2) {
    assert_int_equal(was, c->num_chunks);
    c->num_chunks = chunks, ++changed;
  }
  at = strstr(text, "the policy ");
  if (at != NULL) {
    c->restore_input = restore_of(strstr(at, "T_DI ") + 5),
    c->restore_pre_activation = restore_of(strstr(at, "T_M ") + 4);
    ++changed;
  }
  at = strstr(text, "allow at most ");
  if (at != NULL) {
    assert_int_equal(sscanf(at, "allow at most %d outstanding forwards (max_outstanding is %d)", &outstanding, &was),
                     2);
    assert_int_equal(was, c->outstanding);
    c->outstanding = c->max_outstanding = outstanding, ++changed;
  }
  return changed;
}

static void read_refusal(const case_t* c, char* message, size_t size) {
  result_t got;
  world_run(c, &got);
  for (int32_t r = 0; r < c->world_size; ++r) {
    assert_int_equal(got.status[r], SLUICE_E_OVER_BUDGET);
    assert_string_equal(got.message[r], got.message[0]); /* all ranks get the same text */
  }
  snprintf(message, size, "%s", got.message[0]);
  world_free(&got);
}

TEST(Budget_FixedNOrPolicy_ErrorNamesTheChangeThatFits) {
  static const struct {
    int32_t chunks, input, pre_activation, outstanding; /* fixed by the config */
    int32_t open_chunks, open_policy;                   /* the budget is the smallest if these are open */
    const char* advice;
  } rows[] = {
      {1, SLUICE_RESTORE_ADAPTIVE, SLUICE_RESTORE_ADAPTIVE, 1, 1, 0, "or take "},
      {1, SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE, 1, 1, 0, "chunks (not 1)"},
      {4, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, 3, 0, 1, "or take the policy S4: T_DI redispatch, T_M recompute"},
      {0, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_ADAPTIVE, 1, 0, 1, "or take the policy "},
      {1, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, 1, 1, 1, " with the policy "},
  };
  char message[1024];
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
    case_t c = budget_base_case(), open;
    c.num_chunks = rows[i].chunks, c.restore_input = rows[i].input, c.restore_pre_activation = rows[i].pre_activation;
    c.outstanding = c.max_outstanding = rows[i].outstanding;
    open = c;
    if (rows[i].open_chunks) open.num_chunks = 0;
    if (rows[i].open_policy) open.restore_input = open.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
    c.budget = budget_smallest(&suite, open);
    assert_true(c.budget < budget_smallest(&suite, c));
    read_refusal(&c, message, sizeof message);
    if (strstr(message, rows[i].advice) == NULL) fail_msg("row %d: %s", (int)i, message);
    assert_int_equal(apply_advice(message, &c), rows[i].open_chunks + rows[i].open_policy);
    budget_check(&suite, c);
  }
}

/* n and policy are fixed: the error names the most forwards that fit. */
TEST(Budget_TooManyOutstanding_ErrorNamesTheMostThatFit) {
  char message[1024];
  for (int32_t n = 1; n <= 4; n += 3) {
    case_t c = budget_base_case();
    c.num_chunks = n, c.restore_input = SLUICE_RESTORE_REDISPATCH, c.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
    c.outstanding = c.max_outstanding = 2;
    c.budget = budget_smallest(&suite, c) + 8;
    c.outstanding = c.max_outstanding = 5;
    read_refusal(&c, message, sizeof message);
    case_t told = c;
    assert_int_equal(apply_advice(message, &told), 1);
    if (told.num_chunks != n) fail_msg("%s", message);
    assert_int_equal(told.outstanding, 2);
    budget_check(&suite, told);
    told.outstanding = told.max_outstanding = 3;
    assert_true(budget_smallest(&suite, told) > c.budget);
  }
}

/* Neither n nor policy is fixed: only the batch can change. */
TEST(Budget_NothingHeldFast_ErrorNamesTheTokensThatFit) {
  char message[1024];
  case_t c = budget_base_case();
  c.budget = 1;
  read_refusal(&c, message, sizeof message);
  if (strstr(message, "raise memory_budget to that: not even one token at a time fits") == NULL)
    fail_msg("%s", message);
  c.budget = budget_smallest(&suite, c) - 40000;
  read_refusal(&c, message, sizeof message);
  const char* text = strstr(message, ", or pass at most ");
  long long tokens = 0, now = 0;
  if (text == NULL || sscanf(text, ", or pass at most %lld tokens at a time (%lld now)", &tokens, &now) != 2) {
    fail_msg("%s", message);
  }
  assert_true(now == 96 && tokens > 0 && tokens < now);
  for (int32_t r = 0; r < c.world_size; ++r) c.tokens[r] = c.tokens[r] < tokens ? c.tokens[r] : tokens;
  budget_check(&suite, c);
  c.tokens[0] = tokens + 1;
  assert_true(budget_smallest(&suite, c) > c.budget);
}
