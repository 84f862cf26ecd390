/* The layouts and values that callers compile into themselves: listed by header in layout/, asserted one by one, and
 * written out to capi/abi/layout.txt, which this test compares. Append only; capi/abi/ABI.md says how.
 *
 *   bazel run //capi/test/layout:layout_test -- --print > layout.txt */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sluice/sluice.h"

#define STRUCT(type, size) _Static_assert(sizeof(type) == (size), "the size of " #type " is part of the ABI");
#define MEMBER(type, member, offset, size)                                                   \
  _Static_assert(offsetof(type, member) == (offset) && sizeof(((type*)0)->member) == (size), \
                 #type "." #member " is part of the ABI");
#define CONSTANT(name, value) _Static_assert((name) == (value), #name " is part of the ABI");
#include "capi/test/layout/all_layouts.inc"
#undef STRUCT
#undef MEMBER
#undef CONSTANT

typedef struct line_s {
  const char* type;   /* NULL: a constant */
  const char* member; /* NULL: the struct itself */
  long long offset;   /* or the value */
  long long size;
} line_t;

/* Structs first, then constants. */
static const line_t lines[] = {
#define STRUCT(type, size)                 {#type, NULL, 0, size},
#define MEMBER(type, member, offset, size) {#type, #member, offset, size},
#define CONSTANT(name, value)
#include "capi/test/layout/all_layouts.inc"
#undef STRUCT
#undef MEMBER
#undef CONSTANT
#define STRUCT(type, size)
#define MEMBER(type, member, offset, size)
#define CONSTANT(name, value) {NULL, #name, value, 0},
#include "capi/test/layout/all_layouts.inc"
#undef STRUCT
#undef MEMBER
#undef CONSTANT
};
enum { NUM_LINES = sizeof lines / sizeof lines[0] };

static int print_line(const line_t* line, char* out, size_t bytes) {
  if (line->type == NULL) return snprintf(out, bytes, "%s = %lld\n", line->member, line->offset);
  if (line->member == NULL) return snprintf(out, bytes, "%s: %lld bytes\n", line->type, line->size);
  return snprintf(out, bytes, "  %lld +%lld %s\n", line->offset, line->size, line->member);
}

static char* print_all(void) {
  char* text = calloc(NUM_LINES, 128);
  char* at = text;
  for (int i = 0; i < NUM_LINES; ++i) at += print_line(&lines[i], at, 128);
  return text;
}

/* Test data lies below the workspace root, where tests run. */
static char* read_text(const char* path) {
  FILE* file = fopen(path, "rb");
  if (file == NULL) fail_msg("%s is not there", path);
  char* text = calloc(1, 1 << 20);
  size_t length = fread(text, 1, (1 << 20) - 1, file);
  fclose(file);
  text[length] = '\0';
  return text;
}

static void Layout_EqualsTheGoldenFile(void** state) {
  (void)state;
  char* now = print_all();
  char* golden = read_text("capi/abi/layout.txt");
  if (strcmp(now, golden) != 0) {
    size_t at = 0;
    while (now[at] == golden[at]) ++at;
    while (at > 0 && now[at - 1] != '\n') --at;
    fail_msg("capi/abi/layout.txt says \"%.*s\", the headers say \"%.*s\"; see capi/abi/ABI.md",
             (int)strcspn(golden + at, "\n"), golden + at, (int)strcspn(now + at, "\n"), now + at);
  }
  free(now);
  free(golden);
}

/* No gap: padding is a named member, and no member is missing from the list. */
static void Layout_EveryByte_BelongsToAMember(void** state) {
  (void)state;
  long long end = 0, size = 0;
  const char* type = "";
  for (int i = 0; i < NUM_LINES; ++i) {
    const line_t* line = &lines[i];
    if (line->type != NULL && line->member != NULL) {
      if (line->offset != end) fail_msg("%s: bytes %lld to %lld belong to no member", type, end, line->offset);
      end += line->size;
      continue;
    }
    if (end != size) fail_msg("%s: %lld bytes at its end belong to no member", type, size - end);
    if (line->type == NULL) break;
    end = 0, size = line->size, type = line->type;
  }
}

/* A struct that grows begins with its size, as the 0.1 layouts do. */
static void Layout_GrowingStructs_BeginWithTheirSize(void** state) {
  (void)state;
  static const char* const fixed[] = {
      "sluice_tensor_t",         "sluice_ext_header_t",        "sluice_exchange_t",
      "sluice_host_failure_t",   "sluice_host_gemm_args_t",    "sluice_trace_event_t",
      "sluice_plan_candidate_t", "sluice_paper_footprint_t",   "sluice_planner_choice_t",
      "sluice_planner_entry_t",  "sluice_planner_candidate_t", "sluice_tuner_decision_t",
      "sluice_tuner_policy_t",   "sluice_optimizer_tensor_t",  "sluice_stage_tensors_t",
      "sluice_stage_event_t",    "sluice_stages_option_t",     "sluice_stages_edge_t",
      "sluice_stages_link_t",    "sluice_stages_choice_t",     "sluice_stages_other_cut_t",
      "sluice_stages_stage_t",   "sluice_stage_prediction_t",  "sluice_migration_span_t",
      "sluice_migration_item_t", "sluice_layer_move_t"};
  for (int i = 0; i + 1 < NUM_LINES && lines[i].type != NULL; ++i) {
    if (lines[i].member != NULL) continue;
    int grows = 1;
    for (size_t f = 0; f < sizeof fixed / sizeof fixed[0]; ++f) grows &= strcmp(lines[i].type, fixed[f]) != 0;
    if (grows) assert_string_equal(lines[i + 1].member, "struct_size");
  }
}

/* Every exported function of the version script stands in since.txt under its node, and nothing else does. */
static void Since_EqualsTheVersionScript(void** state) {
  (void)state;
  char* script = read_text("capi/abi/sluice.lds");
  char* since = read_text("capi/abi/since.txt");
  char* open = strstr(script, "*/");
  char* save = NULL;
  char node[32] = "", wanted[128];
  int exported = 0, listed = 0;
  for (char* word = strtok_r(open != NULL ? open + 2 : script, " \n\t{};", &save); word != NULL;
       word = strtok_r(NULL, " \n\t{};", &save)) {
    if (strncmp(word, "SLUICE_", 7) == 0) {
      snprintf(node, sizeof node, "%s", word + 7);
    } else if (strncmp(word, "sluice_", 7) == 0) {
      ++exported;
      snprintf(wanted, sizeof wanted, "\n%s %s\n", node, word);
      if (strstr(since, wanted) == NULL) fail_msg("capi/abi/since.txt lacks \"%s %s\"", node, word);
    }
  }
  for (const char* at = since; *at != '\0'; at += strcspn(at, "\n") + 1) listed += *at != '#';
  assert_true(exported > 40);
  assert_int_equal(listed, exported);
  free(script);
  free(since);
}

int main(int argc, char** argv) {
  if (argc > 1 && strcmp(argv[1], "--print") == 0) {
    char* text = print_all();
    fputs(text, stdout);
    free(text);
    return 0;
  }
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Layout_EqualsTheGoldenFile),
      cmocka_unit_test(Layout_EveryByte_BelongsToAMember),
      cmocka_unit_test(Layout_GrowingStructs_BeginWithTheirSize),
      cmocka_unit_test(Since_EqualsTheVersionScript),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
