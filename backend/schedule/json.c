// SPDX-License-Identifier: Apache-2.0
/* Templates as JSON for people. */
#include <inttypes.h>

#include "backend/base/text.h"
#include "backend/schedule/schedule.h"

static void add_refs(sluice_text_t* text, const char* name, const sluice_slot_ref_t* refs, int32_t count) {
  sluice_text_add(text, ", \"%s\": [", name);
  for (int32_t i = 0; i < count; ++i) {
    sluice_text_add(text, "%s[\"%s\", %d]", i > 0 ? ", " : "", sluice_tensor_kind_name(refs[i].tensor), refs[i].slot);
  }
  sluice_text_add(text, "]");
}

/* An op that works in place releases through its read. */
static void add_releases(sluice_text_t* text, const sluice_op_t* op) {
  sluice_slot_ref_t refs[2 * SLUICE_OP_MAX_ACCESSES];
  int32_t count = 0;
  for (int32_t i = 0; i < op->num_reads; ++i) {
    if (op->releases & SLUICE_RELEASES_READ(i)) refs[count++] = op->reads[i];
  }
  for (int32_t i = 0; i < op->num_writes; ++i) {
    if (op->releases & SLUICE_RELEASES_WRITE(i)) refs[count++] = op->writes[i];
  }
  add_refs(text, "releases", refs, count);
}

static void add_policies(sluice_text_t* text, const char* name, const uint8_t* restore, int32_t n) {
  sluice_text_add(text, ",\n \"%s\": [", name);
  for (int32_t i = 0; i < n; ++i)
    sluice_text_add(text, "%s\"%s\"", i > 0 ? ", " : "", sluice_restore(restore[i])->name);
  sluice_text_add(text, "]");
}

static void add_op(sluice_text_t* text, const sluice_template_t* t, int32_t index) {
  static const char* const lanes[SLUICE_NUM_LANES] = {"compute", "comm", "copy_out", "copy_in"};
  static const char* const groups[] = {"none", "opens", "closes"};
  const sluice_op_t* op = &t->ops[index];
  sluice_text_add(text, "%s\n  {\"op\": %d, \"kind\": \"%s\", \"lane\": \"%s\", \"chunk\": %d, \"group\": \"%s\"",
                  index > 0 ? "," : "", index, sluice_op_name(op->kind), lanes[op->lane], op->chunk, groups[op->group]);
  add_refs(text, "reads", op->reads, op->num_reads);
  add_refs(text, "writes", op->writes, op->num_writes);
  add_releases(text, op);
  sluice_text_add(text, ", \"waits_for\": [");
  for (int32_t d = 0; d < op->num_deps; ++d)
    sluice_text_add(text, "%s%d", d > 0 ? ", " : "", t->deps[op->first_dep + d]);
  sluice_text_add(text, "]}");
}

uint64_t sluice_schedule_write_json(const sluice_template_t* t, char* data, uint64_t room) {
  sluice_text_t text = sluice_text(data, room);
  const sluice_template_spec_t* s = &t->spec;
  sluice_text_add(&text,
                  "{\"form\": 9, \"direction\": \"%s\", \"num_chunks\": %d, \"single_rank\": %d, \"keep\": %d,\n",
                  s->direction == SLUICE_FORWARD ? "forward" : "backward", s->num_chunks, s->single_rank, s->keep);
  sluice_text_add(&text, " \"callback\": %d, \"gated\": %d, \"dgrad\": %d, \"wgrad\": %d, \"wgrad_mode\": %d,\n",
                  s->callback, s->gated, s->dgrad, s->wgrad, s->wgrad_mode);
  sluice_text_add(
      &text,
      " \"only\": %d, \"reuse_saved\": %d, \"bounded\": %d, \"dedup\": %d, \"chunks_by_experts\": %d,\n "
      "\"shares_act\": %d, \"grouped\": %d, \"low_rank\": %d, \"experts_first\": %d, \"hash\": \"%016" PRIx64
      "\", \"comm_hash\": "
      "\"%016" PRIx64 "\"",
      s->only, s->reuse_saved, s->bounded, s->dedup, s->chunks_by_experts, s->shares_act, s->grouped, s->low_rank,
      s->experts_first, t->hash, t->comm_hash);
  add_policies(&text, "restore_input", s->restore_input, s->num_chunks);
  add_policies(&text, "restore_pre_activation", s->restore_pre_activation, s->num_chunks);
  sluice_text_add(&text, ",\n \"rings\": {");
  int first = 1;
  for (int32_t i = 0; i < SLUICE_T_COUNT; ++i) {
    if (t->ring[i] == 0) continue;
    sluice_text_add(&text, "%s\"%s\": %d", first ? "" : ", ", sluice_tensor_kind_name(i), t->ring[i]);
    first = 0;
  }
  sluice_text_add(&text, "},\n \"ops\": [");
  for (int32_t i = 0; i < t->num_ops; ++i) add_op(&text, t, i);
  sluice_text_add(&text, "\n ]}\n");
  return text.used;
}
