// SPDX-License-Identifier: Apache-2.0
/* All that callers compile in is recorded in capi/abi/abi.txt. The compiler checks each size, offset, type and value
 * against the headers here, and accepts a repeated declaration only if it is the same. */

#include "sluice/sluice.h"
#include "third_party/bazel/test.h"

#define DECLARATION(...) __VA_ARGS__;
#define STRUCT(type, size)
#define MEMBER(type, member, offset, size, of)
#define CONSTANT(name, value)
#include "capi/test/layout/abi.inc"
#undef DECLARATION
#undef STRUCT
#undef MEMBER
#undef CONSTANT

#define DECLARATION(...)
#define STRUCT(type, size) _Static_assert(sizeof(type) == (size), "the size of " #type " is part of the ABI");
#define MEMBER(type, member, offset, size, of)                                               \
  _Static_assert(offsetof(type, member) == (offset) && sizeof(((type*)0)->member) == (size), \
                 #type "." #member " is part of the ABI");                                   \
  _Static_assert(__builtin_types_compatible_p(__typeof__(((type*)0)->member), of),           \
                 "the type of " #type "." #member " is part of the ABI");
#define CONSTANT(name, value) _Static_assert((name) == (value), #name " is part of the ABI");
#include "capi/test/layout/abi.inc"
#undef STRUCT
#undef MEMBER
#undef CONSTANT

typedef struct line_s {
  const char* type;
  const char* member; /* NULL: the struct itself */
  long long offset;
  long long size;
} line_t;

static const line_t lines[] = {
#define STRUCT(type, size)                     {#type, NULL, 0, size},
#define MEMBER(type, member, offset, size, of) {#type, #member, offset, size},
#define CONSTANT(name, value)
#include "capi/test/layout/abi.inc"
};
enum { NUM_LINES = sizeof lines / sizeof lines[0] };

/* Structs have no gaps: padding is a named member, and the record contains every member. */
TEST(Layout_EveryByte_BelongsToAMember) {
  long long end = 0, size = 0;
  const char* type = "";
  for (int i = 0; i < NUM_LINES; ++i) {
    const line_t* line = &lines[i];
    if (line->member != NULL) {
      if (line->offset != end) fail_msg("%s: bytes %lld to %lld belong to no member", type, end, line->offset);
      end += line->size;
      continue;
    }
    if (end != size) fail_msg("%s: %lld bytes at its end belong to no member", type, size - end);
    end = 0, size = line->size, type = line->type;
  }
  if (end != size) fail_msg("%s: %lld bytes at its end belong to no member", type, size - end);
}

/* An extensible struct begins with its size, as do the layouts of 0.1. */
TEST(Layout_GrowingStructs_BeginWithTheirSize) {
  static const char* const fixed[] = {
      "sluice_tensor_t",         "sluice_ext_header_t",        "sluice_exchange_t",
      "sluice_host_failure_t",   "sluice_host_gemm_args_t",    "sluice_trace_event_t",
      "sluice_plan_candidate_t", "sluice_paper_footprint_t",   "sluice_planner_choice_t",
      "sluice_planner_entry_t",  "sluice_planner_candidate_t", "sluice_tuner_decision_t",
      "sluice_tuner_policy_t",   "sluice_optimizer_tensor_t",  "sluice_stage_tensors_t",
      "sluice_stage_event_t",    "sluice_stages_option_t",     "sluice_stages_edge_t",
      "sluice_stages_link_t",    "sluice_stages_choice_t",     "sluice_stages_other_cut_t",
      "sluice_stages_stage_t",   "sluice_stage_prediction_t",  "sluice_migration_span_t",
      "sluice_migration_item_t", "sluice_layer_move_t",        "sluice_swap_op_t",
      "sluice_swap_layer_t",     "sluice_tuner_form_t"};
  for (int i = 0; i + 1 < NUM_LINES; ++i) {
    if (lines[i].member != NULL) continue;
    int grows = 1;
    for (size_t f = 0; f < sizeof fixed / sizeof fixed[0]; ++f) grows &= strcmp(lines[i].type, fixed[f]) != 0;
    if (grows) assert_string_equal(lines[i + 1].member, "struct_size");
  }
}
