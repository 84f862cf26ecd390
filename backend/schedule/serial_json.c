#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "backend/schedule/serial.h"

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

static void add_refs(text_t* text, const char* name, const sluice_slot_ref_t* refs, int32_t count) {
  add(text, ", \"%s\": [", name);
  for (int32_t i = 0; i < count; ++i) {
    add(text, "%s[\"%s\", %d]", i > 0 ? ", " : "", sluice_tensor_kind_name(refs[i].tensor), refs[i].slot);
  }
  add(text, "]");
}

static void add_policies(text_t* text, const char* name, const uint8_t* restore, int32_t n) {
  static const char* const names[] = {"keep", "offload", "redispatch", "recompute"};
  add(text, ",\n \"%s\": [", name);
  for (int32_t i = 0; i < n; ++i) add(text, "%s\"%s\"", i > 0 ? ", " : "", names[restore[i] & 3]);
  add(text, "]");
}

static void add_op(text_t* text, const sluice_template_t* t, int32_t index) {
  static const char* const lanes[SLUICE_NUM_LANES] = {"compute", "comm", "copy_out", "copy_in"};
  const sluice_op_t* op = &t->ops[index];
  add(text, "%s\n  {\"op\": %d, \"kind\": \"%s\", \"lane\": \"%s\", \"chunk\": %d", index > 0 ? "," : "", index,
      sluice_op_name(op->kind), lanes[op->lane], op->chunk);
  add_refs(text, "reads", op->reads, op->num_reads);
  add_refs(text, "writes", op->writes, op->num_writes);
  add(text, ", \"waits_for\": [");
  for (int32_t d = 0; d < op->num_deps; ++d) add(text, "%s%d", d > 0 ? ", " : "", t->deps[op->first_dep + d]);
  add(text, "]}");
}

uint64_t sluice_schedule_write_json(const sluice_template_t* t, char* data, uint64_t room) {
  text_t text = {data, data == NULL ? 0 : room, 0};
  const sluice_template_spec_t* s = &t->spec;
  add(&text, "{\"form\": 1, \"direction\": \"%s\", \"num_chunks\": %d, \"single_rank\": %d, \"keep\": %d,\n",
      s->direction == SLUICE_FORWARD ? "forward" : "backward", s->num_chunks, s->single_rank, s->keep);
  add(&text, " \"callback\": %d, \"gated\": %d, \"input_half\": %d, \"weight_half\": %d, \"wgrad_mode\": %d,\n",
      s->callback, s->gated, s->input_half, s->weight_half, s->wgrad_mode);
  add(&text,
      " \"only\": %d, \"reuse_saved\": %d, \"bounded\": %d, \"hash\": \"%016" PRIx64 "\", \"comm_hash\": \"%016" PRIx64
      "\"",
      s->only, s->reuse_saved, s->bounded, t->hash, t->comm_hash);
  add_policies(&text, "restore_di", s->restore_di, s->num_chunks);
  add_policies(&text, "restore_m", s->restore_m, s->num_chunks);
  add(&text, ",\n \"rings\": {");
  int first = 1;
  for (int32_t i = 0; i < SLUICE_T_COUNT; ++i) {
    if (t->ring[i] == 0) continue;
    add(&text, "%s\"%s\": %d", first ? "" : ", ", sluice_tensor_kind_name(i), t->ring[i]);
    first = 0;
  }
  add(&text, "},\n \"ops\": [");
  for (int32_t i = 0; i < t->num_ops; ++i) add_op(&text, t, i);
  add(&text, "\n ]}\n");
  return text.used;
}
