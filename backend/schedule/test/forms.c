// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/test/forms.h"

#include <stdio.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/schedule/template/template.h"

uint32_t next_random(uint32_t* state) { return *state = *state * 1664525u + 1013904223u; }

const uint8_t restore_pre_activation_choices[3] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD,
                                                   SLUICE_RESTORE_RECOMPUTE};

sluice_template_spec_t spec_with(int32_t n, int32_t policy, uint32_t seed) {
  sluice_template_spec_t spec = {.num_chunks = n, .keep = 1};
  for (int32_t i = 0; i < n; ++i) {
    int32_t p = policy < 9 ? policy : (int32_t)(next_random(&seed) >> 16) % 9;
    spec.restore_input[i] = (uint8_t)(p % 3);
    spec.restore_pre_activation[i] = restore_pre_activation_choices[p / 3];
  }
  return spec;
}

static int any_offloaded(const uint8_t* restore, int32_t n) {
  int any = 0;
  for (int32_t i = 0; i < n; ++i) any |= sluice_restore_is_offloaded(restore[i]);
  return any;
}

static int any_sent_again(const uint8_t* restore, int32_t n) {
  int any = 0;
  for (int32_t i = 0; i < n; ++i) any |= sluice_restore_is_sent_again(restore[i]);
  return any;
}

/* An invalid spec must be refused before anything is built. */
static void fail_of_builder(void) { fail_msg("%s", last_message()); }

int64_t for_each_form(int32_t n, int32_t policy, uint32_t seed, visit_fn_t visit, void* user) {
  int64_t seen = 0;
  for (int32_t bits = 0; bits < 2 * 2 * 2 * 2 * 2 * 2 * 2 * 3 * 2 * 2 * 2 * 2 * 4 * 2; ++bits) {
    sluice_template_spec_t spec = spec_with(n, policy, seed);
    int32_t x = bits;
    spec.direction = x % 2, x /= 2;
    spec.wgrad_mode = x % 2, x /= 2;
    spec.single_rank = x % 2, x /= 2;
    spec.gated = x % 2, x /= 2;
    spec.callback = x % 2, x /= 2;
    spec.reuse_saved = x % 2, x /= 2;
    spec.bounded = x % 2, x /= 2;
    spec.dedup = x % 3, x /= 3;
    spec.chunks_by_experts = (int16_t)(x % 2), x /= 2;
    spec.shares_act = x % 2, x /= 2;
    spec.grouped = (int16_t)(x % 2), x /= 2;
    spec.low_rank = x % 2, x /= 2;
    spec.experts_first = x % 2, x /= 2;
    /* Only the order of exchanges and what unpacks them changes, and only where rows are sent again. */
    if (spec.experts_first && spec.direction == SLUICE_FORWARD && (spec.grouped || spec.dedup)) continue;
    if (spec.experts_first && (spec.single_rank || spec.low_rank || spec.reuse_saved || spec.callback || n > 6 ||
                               !any_sent_again(spec.restore_input, n)))
      continue;
    /* Only ops of the compute lane write and read T_LOW, so combinations with forms of exchanges add nothing. */
    if (spec.low_rank && (spec.grouped || spec.dedup || spec.chunks_by_experts || spec.reuse_saved)) continue;
    if (spec.grouped && (n < 3 || (n > 9 && n < 64))) continue; /* n < 3: no pair; slots repeat every four chunks */
    if (spec.shares_act && !any_offloaded(spec.restore_pre_activation, n)) continue; /* no effect */
    static const int32_t halves[4][2] = {{1, SLUICE_WGRAD_CALL_NOW},
                                         {1, SLUICE_WGRAD_CALL_NONE},
                                         {1, SLUICE_WGRAD_CALL_LATER},
                                         {0, SLUICE_WGRAD_CALL_NOW}};
    if (spec.direction == SLUICE_FORWARD) {
      if (x > 1 || spec.wgrad_mode || spec.reuse_saved) continue; /* for a backward only */
      if (x == 1) {                                               /* a forward that keeps nothing for a backward */
        spec.keep = 0;
        memset(spec.restore_input, 0, sizeof spec.restore_input);
        memset(spec.restore_pre_activation, 0, sizeof spec.restore_pre_activation);
      }
    } else {
      spec.keep = 0;
      spec.dgrad = halves[x][0], spec.wgrad = halves[x][1];
    }
    sluice_template_t* t = NULL;
    sluice_status_t status = sluice_template_build(&spec, sluice_process_allocator(), &t);
    if (status == SLUICE_E_INTERNAL) fail_of_builder();
    if (status != SLUICE_OK) continue;
    visit(t, user);
    ++seen;
    sluice_template_destroy(t, sluice_process_allocator());
  }
  return seen;
}

void describe_form(const sluice_template_t* t, char* text, size_t bytes) {
  const sluice_template_spec_t* s = &t->spec;
  int used = snprintf(text, bytes,
                      "direction %d n %d single %d keep %d callback %d gated %d halves %d %d wgrad %d reuse %d bounded "
                      "%d dedup %d cut %d shares %d grouped %d low %d first %d policies",
                      s->direction, s->num_chunks, s->single_rank, s->keep, s->callback, s->gated, s->dgrad, s->wgrad,
                      s->wgrad_mode, s->reuse_saved, s->bounded, s->dedup, s->chunks_by_experts, s->shares_act,
                      s->grouped, s->low_rank, s->experts_first);
  for (int32_t i = 0; i < s->num_chunks && (size_t)used < bytes; ++i) {
    used += snprintf(text + used, bytes - (size_t)used, " %d%d", s->restore_input[i], s->restore_pre_activation[i]);
  }
}
