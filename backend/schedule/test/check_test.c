/* The hazard checker: it proves every template that the builder makes, and kills every mutant of one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/schedule/check.h"
#include "backend/schedule/op_rules.h"
#include "backend/schedule/releases.h"

static sluice_allocator_t* memory(void) { return sluice_process_allocator(); }

static uint32_t next_random(uint32_t* state) { return *state = *state * 1664525u + 1013904223u; }

static const uint8_t of_m[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};

/* Policies 0 to 8 are uniform; above, every chunk has its own. */
static sluice_template_spec_t spec_with(int32_t n, int32_t policy, uint32_t seed) {
  sluice_template_spec_t spec = {.num_chunks = n, .keep = 1};
  for (int32_t i = 0; i < n; ++i) {
    int32_t p = policy < 9 ? policy : (int32_t)(next_random(&seed) >> 16) % 9;
    spec.restore_di[i] = (uint8_t)(p % 3);
    spec.restore_m[i] = of_m[p / 3];
  }
  return spec;
}

static const char* finding_text(const sluice_template_t* t, const sluice_finding_t* f) {
  static char text[512];
  sluice_finding_describe(t, f, text, sizeof text);
  return text;
}

/* Two digits per chunk: of T_DI and of T_M. */
static const char* policies_of(const sluice_template_t* t) {
  static char text[SLUICE_MAX_CHUNKS * 3 + 1];
  int used = 0;
  for (int32_t i = 0; i < t->spec.num_chunks; ++i) {
    used += snprintf(text + used, sizeof text - (size_t)used, "%d%d ", t->spec.restore_di[i], t->spec.restore_m[i]);
  }
  return text;
}

static int32_t hazard_of(const sluice_template_t* t, sluice_finding_t* finding) {
  assert_int_equal(sluice_schedule_check(t, memory(), finding), SLUICE_OK);
  return finding->hazard;
}

typedef void (*visit_fn_t)(const sluice_template_t* t, void* user);

/* Both directions, both weight-gradient modes, one rank and several, gated or not, own experts or the host's, saved
 * rows reused or not, under a plan or not, deduplicated or not, chunks cut out of tokens or of rows, gradients now or
 * in halves: all that build. */
static int64_t for_each_form(int32_t n, int32_t policy, uint32_t seed, visit_fn_t visit, void* user) {
  int64_t seen = 0;
  for (int32_t bits = 0; bits < 2 * 2 * 2 * 2 * 2 * 2 * 2 * 2 * 2 * 4; ++bits) {
    sluice_template_spec_t spec = spec_with(n, policy, seed);
    int32_t x = bits;
    spec.direction = x % 2, x /= 2;
    spec.wgrad_mode = x % 2, x /= 2;
    spec.single_rank = x % 2, x /= 2;
    spec.gated = x % 2, x /= 2;
    spec.callback = x % 2, x /= 2;
    spec.reuse_saved = x % 2, x /= 2;
    spec.bounded = x % 2, x /= 2;
    spec.dedup = x % 2, x /= 2;
    spec.cut_rows = x % 2, x /= 2;
    static const int32_t halves[4][2] = {
        {1, SLUICE_WEIGHTS_NOW}, {1, SLUICE_WEIGHTS_NONE}, {1, SLUICE_WEIGHTS_LATER}, {0, SLUICE_WEIGHTS_NOW}};
    if (spec.direction == SLUICE_FORWARD) {
      if (x > 1 || spec.wgrad_mode || spec.reuse_saved) continue; /* mean nothing there */
      if (x == 1) {                                               /* a forward without a backward */
        spec.keep = 0;
        memset(spec.restore_di, 0, sizeof spec.restore_di);
        memset(spec.restore_m, 0, sizeof spec.restore_m);
      }
    } else {
      spec.keep = 0;
      spec.input_half = halves[x][0], spec.weight_half = halves[x][1];
    }
    sluice_template_t* t = NULL;
    if (sluice_template_build(&spec, memory(), &t) != SLUICE_OK) continue;
    visit(t, user);
    ++seen;
    sluice_template_destroy(t, memory());
  }
  return seen;
}

static void prove(const sluice_template_t* t, void* user) {
  (void)user;
  sluice_finding_t finding;
  if (hazard_of(t, &finding) != SLUICE_HAZARD_NONE) {
    fail_msg(
        "direction %d n %d single %d keep %d callback %d gated %d halves %d %d wgrad %d reuse %d bounded %d cut %d "
        "policies "
        "%s: %s",
        t->spec.direction, t->spec.num_chunks, t->spec.single_rank, t->spec.keep, t->spec.callback, t->spec.gated,
        t->spec.input_half, t->spec.weight_half, t->spec.wgrad_mode, t->spec.reuse_saved, t->spec.bounded,
        t->spec.cut_rows, policies_of(t), finding_text(t, &finding));
  }
}

static void Builder_EveryTemplate_IsProved(void** state) {
  (void)state;
  int64_t uniform = 0, mixed = 0;
  for (int32_t n = 1; n <= 32; ++n) {
    for (int32_t policy = 0; policy < 9; ++policy) uniform += for_each_form(n, policy, 0, prove, NULL);
    for (uint32_t seed = 1; seed <= 4; ++seed) mixed += for_each_form(n, 9, seed * 977u + (uint32_t)n, prove, NULL);
  }
  const int32_t large[] = {64, 255, 256};
  for (int i = 0; i < 3; ++i) mixed += for_each_form(large[i], 9, 5, prove, NULL);
  printf("templates proved: %lld (n <= 32 x 9 uniform policies), %lld with mixed policies\n", (long long)uniform,
         (long long)mixed);
  assert_true(uniform > 10000 && mixed > 4000);
}

/* ---- mutants ---- */

enum { DEPENDENCY, SLOTS, READ, LANE, EXCHANGES, DROPPED, ADDED, MOVED, KINDS };

typedef struct tally_s {
  int64_t mutants, killed;
  int64_t by_kind[KINDS];
  int32_t releases_up_to;           /* n: every access has some */
  int64_t rings_of_one, idle_slots; /* that cannot be shrunk, or that no chunk of the template lives in */
} tally_t;

/* A copy whose parts can be changed. */
static sluice_template_t* copy_of(const sluice_template_t* t) {
  sluice_template_t* copy = malloc(t->bytes);
  memcpy(copy, t, t->bytes);
  ptrdiff_t shift = (char*)copy - (const char*)t;
  copy->ops = (sluice_op_t*)(void*)((char*)t->ops + shift);
  copy->deps = (int32_t*)(void*)((char*)t->deps + shift);
  copy->homes = (sluice_slot_ref_t*)(void*)((char*)t->homes + shift);
  return copy;
}

static void judge(const sluice_template_t* t, sluice_template_t* mutant, tally_t* tally, int kind, const char* what,
                  int32_t a, int32_t b) {
  sluice_finding_t finding;
  ++tally->mutants;
  ++tally->by_kind[kind];
  /* It is not the old releases that may give a mutant of anything else away. */
  if (kind < DROPPED && hazard_of(mutant, &finding) >= SLUICE_HAZARD_DOUBLE_RELEASE) {
    (void)sluice_template_mark_releases(mutant);
  }
  if (hazard_of(mutant, &finding) != SLUICE_HAZARD_NONE) {
    ++tally->killed;
    assert_true(finding_text(mutant, &finding)[0] != '\0');
  } else {
    fail_msg(
        "survivor: %s %d %d of direction %d n %d single %d keep %d callback %d gated %d halves %d %d wgrad %d reuse "
        "%d bounded %d cut %d policies %s",
        what, a, b, t->spec.direction, t->spec.num_chunks, t->spec.single_rank, t->spec.keep, t->spec.callback,
        t->spec.gated, t->spec.input_half, t->spec.weight_half, t->spec.wgrad_mode, t->spec.reuse_saved,
        t->spec.bounded, t->spec.cut_rows, policies_of(t));
  }
  free(mutant);
}

static void delete_dependencies(const sluice_template_t* t, tally_t* tally) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    for (int32_t d = 0; d < t->ops[i].num_deps; ++d) {
      sluice_template_t* mutant = copy_of(t);
      int32_t at = t->ops[i].first_dep + d, last = t->ops[i].first_dep + t->ops[i].num_deps - 1;
      mutant->deps[at] = t->deps[last];
      --mutant->ops[i].num_deps;
      judge(t, mutant, tally, DEPENDENCY, "dependency deleted: op, place", i, d);
    }
  }
}

static void move_refs(sluice_slot_ref_t* refs, int32_t count, int32_t tensor, int32_t from, int32_t to) {
  for (int32_t i = 0; i < count; ++i) {
    if (refs[i].tensor == tensor && refs[i].slot == from) refs[i].slot = (int16_t)to;
  }
}

/* Whether an op touches this very slot. */
static int is_touched(const sluice_template_t* t, int32_t tensor, int32_t slot) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    const sluice_op_t* op = &t->ops[i];
    for (int32_t k = 0; k < op->num_reads; ++k) {
      if (op->reads[k].tensor == tensor && (op->reads[k].slot == slot || op->reads[k].slot < 0)) return 1;
    }
    for (int32_t k = 0; k < op->num_writes; ++k) {
      if (op->writes[k].tensor == tensor && (op->writes[k].slot == slot || op->writes[k].slot < 0)) return 1;
    }
  }
  return 0;
}

static int is_home(const sluice_template_t* t, int32_t tensor, int32_t slot) {
  for (int32_t other = 0; other < SLUICE_T_COUNT; ++other) {
    if (other == SLUICE_T_KEPT_DI || other == SLUICE_T_KEPT_M) continue; /* only through T_DI and T_M */
    for (int32_t i = 0; i < t->spec.num_chunks; ++i) {
      sluice_slot_ref_t home = sluice_template_home(t, other, i);
      if (home.tensor == tensor && home.slot == slot) return 1;
    }
  }
  return 0;
}

/* Slots of the tensor that a chunk of this template lives in and that an op touches. */
static int32_t used_slots(const sluice_template_t* t, int32_t tensor, int32_t* out_slots) {
  int32_t used = 0;
  for (int32_t slot = 0; slot < t->ring[tensor]; ++slot) {
    if (is_touched(t, tensor, slot) && is_home(t, tensor, slot)) out_slots[used++] = slot;
  }
  return used;
}

static void merge_slots(const sluice_template_t* t, tally_t* tally, int32_t tensor, int32_t from, int32_t to) {
  sluice_template_t* mutant = copy_of(t);
  for (int32_t i = 0; i < t->num_ops; ++i) {
    move_refs(mutant->ops[i].reads, mutant->ops[i].num_reads, tensor, from, to);
    move_refs(mutant->ops[i].writes, mutant->ops[i].num_writes, tensor, from, to);
  }
  move_refs(mutant->homes, SLUICE_T_COUNT * t->spec.num_chunks, tensor, from, to);
  char what[64];
  snprintf(what, sizeof what, "slots of %s share a place:", sluice_tensor_kind_name(tensor));
  judge(t, mutant, tally, SLOTS, what, from, to);
}

/* Two slots share one place, as in a ring that is one shorter. The dependencies are the old ones. Any two of those in
 * use; in large rings neighbours, and the last with the first. */
static void shrink_rings(const sluice_template_t* t, tally_t* tally) {
  for (int32_t tensor = 0; tensor < SLUICE_T_COUNT; ++tensor) {
    int32_t slots[SLUICE_MAX_CHUNKS], used = used_slots(t, tensor, slots);
    tally->rings_of_one += t->ring[tensor] == 1;
    tally->idle_slots += t->ring[tensor] - used;
    for (int32_t i = 0; i < used; ++i) {
      for (int32_t j = i + 1; j < used; ++j) {
        if (used <= 8 || j == i + 1 || (i == 0 && j == used - 1)) merge_slots(t, tally, tensor, slots[j], slots[i]);
      }
    }
  }
}

static void drop_accesses(const sluice_template_t* t, tally_t* tally) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    sluice_op_rule_t rule = sluice_op_rule(t->ops[i].kind, &t->spec);
    for (int32_t r = 0; r < rule.num_reads; ++r) {
      sluice_template_t* mutant = copy_of(t);
      sluice_op_t* op = &mutant->ops[i];
      int32_t chunk = op->chunk < 0 ? 0 : op->chunk, kept = 0;
      int16_t tensor = sluice_template_home(t, rule.reads[r], chunk).tensor;
      for (int32_t k = 0; k < op->num_reads; ++k) {
        if (op->reads[k].tensor != tensor) op->reads[kept++] = op->reads[k];
      }
      op->num_reads = kept;
      judge(t, mutant, tally, READ, "read dropped: op, tensor", i, tensor);
    }
  }
}

static void move_lanes(const sluice_template_t* t, tally_t* tally) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    sluice_template_t* mutant = copy_of(t);
    mutant->ops[i].lane = (int16_t)((t->ops[i].lane + 1) % SLUICE_NUM_LANES);
    judge(t, mutant, tally, LANE, "lane moved: op, lane", i, t->ops[i].lane);
  }
}

/* Two exchanges that follow each other on one rank change places; the other ranks keep the template. */
static void swap_exchanges(const sluice_template_t* t, tally_t* tally) {
  int32_t last = -1;
  for (int32_t i = 0; i < t->num_ops; ++i) {
    if (!sluice_op_is_exchange(t->ops[i].kind)) continue;
    if (last >= 0) {
      sluice_template_t* mutant = copy_of(t);
      sluice_op_t op = mutant->ops[i];
      mutant->ops[i].kind = mutant->ops[last].kind, mutant->ops[i].chunk = mutant->ops[last].chunk;
      mutant->ops[last].kind = op.kind, mutant->ops[last].chunk = op.chunk;
      ++tally->mutants, ++tally->by_kind[EXCHANGES];
      tally->killed += !sluice_schedule_same_exchanges(t, mutant);
      free(mutant);
    }
    last = i;
  }
}

static int has_access(const sluice_op_t* op, int32_t bit) {
  return bit < SLUICE_OP_MAX_ACCESSES ? bit < op->num_reads : bit - SLUICE_OP_MAX_ACCESSES < op->num_writes;
}

static sluice_slot_ref_t access_of(const sluice_op_t* op, int32_t bit) {
  return bit < SLUICE_OP_MAX_ACCESSES ? op->reads[bit] : op->writes[bit - SLUICE_OP_MAX_ACCESSES];
}

static void judge_releases(const sluice_template_t* t, tally_t* tally, int kind, int32_t op, int32_t bit, int32_t to) {
  sluice_template_t* mutant = copy_of(t);
  mutant->ops[op].releases ^= 1 << bit;
  if (to >= 0) mutant->ops[to / 16].releases |= 1 << to % 16;
  judge(t, mutant, tally, kind, "release dropped, added or moved: op, access", op, bit);
}

/* The nearest access of the same slot in this direction that frees nothing: op * 16 + bit; -1: there is none. */
static int32_t nearest(const sluice_template_t* t, int32_t op, sluice_slot_ref_t ref, int32_t step) {
  for (int32_t i = op + step; i >= 0 && i < t->num_ops; i += step) {
    for (int32_t bit = 0; bit < 16; ++bit) {
      if (!has_access(&t->ops[i], bit) || (t->ops[i].releases >> bit & 1)) continue;
      sluice_slot_ref_t other = access_of(&t->ops[i], bit);
      if (other.tensor == ref.tensor && (other.slot == ref.slot || other.slot < 0 || ref.slot < 0)) return i * 16 + bit;
    }
  }
  return -1;
}

/* Each release left out, or made by the op before or behind that touches the slot; each access releasing that does
 * not, which frees a slot twice, too early, or one that is not the pass's. */
static void change_releases(const sluice_template_t* t, tally_t* tally) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    for (int32_t bit = 0; bit < 16; ++bit) {
      if (!has_access(&t->ops[i], bit)) continue;
      int is_set = t->ops[i].releases >> bit & 1;
      judge_releases(t, tally, is_set ? DROPPED : ADDED, i, bit, -1);
      for (int32_t step = -1; is_set && step <= 1; step += 2) {
        int32_t to = nearest(t, i, access_of(&t->ops[i], bit), step);
        if (to >= 0) judge_releases(t, tally, MOVED, i, bit, to);
      }
    }
  }
}

static void mutate(const sluice_template_t* t, void* user) {
  tally_t* tally = user;
  delete_dependencies(t, tally);
  shrink_rings(t, tally);
  drop_accesses(t, tally);
  move_lanes(t, tally);
  swap_exchanges(t, tally);
  if (t->spec.num_chunks <= tally->releases_up_to) change_releases(t, tally);
}

static void Mutants_OfEveryForm_AreAllKilled(void** state) {
  (void)state;
  tally_t tally = {0};
  int is_full = getenv("SLUICE_FULL") != NULL;
  int32_t largest = is_full ? 32 : 6;
  tally.releases_up_to = is_full ? 8 : 4;
  for (int32_t n = 1; n <= largest; ++n) {
    for (int32_t policy = 0; policy < 9; ++policy) for_each_form(n, policy, 0, mutate, &tally);
    for (uint32_t seed = 1; seed <= 3; ++seed) for_each_form(n, 9, seed * 131u + (uint32_t)n, mutate, &tally);
  }
  printf(
      "mutants: %lld, killed: %lld (dependency deleted %lld, slots merged %lld, read dropped %lld, lane moved %lld, "
      "exchanges swapped %lld, release dropped %lld, added %lld, moved %lld), n <= %d, of releases %d\n",
      (long long)tally.mutants, (long long)tally.killed, (long long)tally.by_kind[DEPENDENCY],
      (long long)tally.by_kind[SLOTS], (long long)tally.by_kind[READ], (long long)tally.by_kind[LANE],
      (long long)tally.by_kind[EXCHANGES], (long long)tally.by_kind[DROPPED], (long long)tally.by_kind[ADDED],
      (long long)tally.by_kind[MOVED], largest, tally.releases_up_to);
  printf("no mutants: %lld rings of one slot, %lld slots that no chunk of their template uses\n",
         (long long)tally.rings_of_one, (long long)tally.idle_slots);
  assert_int_equal(tally.killed, tally.mutants);
  for (int kind = 0; kind < KINDS; ++kind) assert_true(tally.by_kind[kind] > 100);
}

/* ---- the guards of a correct reuse schedule (algorithms.md section 5), each left out once ---- */

static sluice_template_t* build(sluice_template_spec_t spec) {
  sluice_template_t* t = NULL;
  assert_int_equal(sluice_template_build(&spec, memory(), &t), SLUICE_OK);
  return t;
}

static int32_t find(const sluice_template_t* t, int32_t kind, int32_t chunk, int32_t tensor) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    const sluice_op_t* op = &t->ops[i];
    if (op->kind != kind || op->chunk != chunk) continue;
    if (tensor < 0 || (op->num_reads > 0 && op->reads[0].tensor == tensor) || op->writes[0].tensor == tensor) return i;
  }
  fail_msg("no op %s of chunk %d", sluice_op_name(kind), chunk);
  return -1;
}

/* Removes every way by which `later` waits for `earlier`'s lane, then expects the hazard. */
static void forget(sluice_template_spec_t spec, int32_t later_kind, int32_t later_chunk, int32_t earlier_lane,
                   int32_t hazard, const char* text) {
  sluice_template_t* t = build(spec);
  int32_t later = find(t, later_kind, later_chunk, -1), kept = 0;
  sluice_op_t* op = &t->ops[later];
  for (int32_t d = 0; d < op->num_deps; ++d) {
    int32_t dep = t->deps[op->first_dep + d];
    if (t->ops[dep].lane != earlier_lane) t->deps[op->first_dep + kept++] = dep;
  }
  assert_true(kept < op->num_deps);
  op->num_deps = kept;
  sluice_finding_t finding;
  assert_int_equal(hazard_of(t, &finding), hazard);
  if (strstr(finding_text(t, &finding), text) == NULL) fail_msg("%s", finding_text(t, &finding));
  assert_int_equal(sluice_schedule_check_or_fail(t, memory()), SLUICE_E_INVALID_ARGUMENT);
  sluice_template_destroy(t, memory());
}

enum { S1 = 4, S2 = 5, S3 = 7, S4 = 8 }; /* as numbers of spec_with */

static sluice_template_spec_t backward(int32_t n, int32_t policy) {
  sluice_template_spec_t spec = spec_with(n, policy, 0);
  spec.keep = 0, spec.direction = SLUICE_BACKWARD, spec.input_half = 1, spec.weight_half = SLUICE_WEIGHTS_NOW;
  spec.wgrad_mode = 1;
  return spec;
}

/* ---- releases ---- */

static int32_t bit_of(const sluice_op_t* op, int32_t tensor, int writes) {
  for (int32_t i = 0; i < (writes ? op->num_writes : op->num_reads); ++i) {
    if ((writes ? op->writes : op->reads)[i].tensor == tensor) return SLUICE_RELEASES_READ(i) << (writes ? 8 : 0);
  }
  fail_msg("%s does not touch %s", sluice_op_name(op->kind), sluice_tensor_kind_name(tensor));
  return 0;
}

static void assert_found(const sluice_template_t* t, int32_t hazard, const char* format, int32_t a, int32_t b) {
  char want[256];
  sluice_finding_t finding;
  assert_int_equal(hazard_of(t, &finding), hazard);
  snprintf(want, sizeof want, format, a, b);
  assert_string_equal(finding_text(t, &finding), want);
}

static void Releases_TooManyTooFewOrTooEarly_AreNamed(void** state) {
  (void)state;
  sluice_template_t* t = build((sluice_template_spec_t){.num_chunks = 2});
  int32_t first = find(t, SLUICE_OP_UNPACK, 0, -1), last = find(t, SLUICE_OP_GEMM1, 0, -1);
  sluice_op_t *unpack = &t->ops[first], *gemm1 = &t->ops[last], *reduce = &t->ops[find(t, SLUICE_OP_REDUCE, 0, -1)];
  const int32_t early = bit_of(unpack, SLUICE_T_DI, 1), right = bit_of(gemm1, SLUICE_T_DI, 0);
  assert_int_equal(gemm1->releases & right, right);
  gemm1->releases ^= right;
  assert_found(t, SLUICE_HAZARD_NOT_RELEASED,
               "missing release: op %d (gemm1 of chunk 0) is the last to use slot 0 of T_DI and does not free it", last,
               0);
  unpack->releases ^= early;
  assert_found(t, SLUICE_HAZARD_USE_AFTER_RELEASE,
               "use after release: op %d (gemm1 of chunk 0) uses slot 0 of T_DI, which op %d (unpack of chunk 0) has "
               "freed",
               last, first);
  gemm1->releases ^= right;
  assert_found(t, SLUICE_HAZARD_DOUBLE_RELEASE,
               "double release: op %d (gemm1 of chunk 0) frees slot 0 of T_DI, which op %d (unpack of chunk 0) has "
               "freed",
               last, first);
  unpack->releases ^= early;
  reduce->releases |= bit_of(reduce, SLUICE_T_OUT, 1);
  assert_found(t, SLUICE_HAZARD_DOUBLE_RELEASE,
               "double release: op %d (reduce of chunk 0) frees slot 0 of T_OUT, which is not this pass's to free by "
               "then",
               find(t, SLUICE_OP_REDUCE, 0, -1), 0);
  sluice_template_destroy(t, memory());
}

/* A copy and a product read the same rows, and neither waits for the other: the slot is free when both have ended. */
static void Releases_LastReadersOnTwoLanes_AreBoth(void** state) {
  (void)state;
  sluice_template_spec_t spec = spec_with(4, S3, 0);
  sluice_template_t* t = build(spec);
  for (int32_t i = 0; i < 4; ++i) {
    sluice_slot_ref_t home = sluice_template_home(t, SLUICE_T_DI, i);
    const int32_t kinds[] = {SLUICE_OP_COPY_OUT, SLUICE_OP_GEMM1};
    for (int k = 0; k < 2; ++k) {
      sluice_op_t* op = &t->ops[find(t, kinds[k], i, -1)];
      assert_true(sluice_op_releases(op, home.tensor, home.slot));
      op->releases ^= bit_of(op, home.tensor, 0);
      sluice_finding_t finding;
      assert_int_equal(hazard_of(t, &finding), SLUICE_HAZARD_NOT_RELEASED); /* the other alone does not do */
      op->releases ^= bit_of(op, home.tensor, 0);
    }
  }
  sluice_template_destroy(t, memory());
}

static void Guard1_DispatchWaitsForTheSlotsReaders(void** state) {
  (void)state;
  /* In a whole pass the combine in between implies it; without one the edge stands by itself. */
  sluice_template_spec_t spec = {.num_chunks = 4, .only = SLUICE_PART_DISPATCH | SLUICE_PART_EXPERTS};
  forget(spec, SLUICE_OP_UNPACK, 2, SLUICE_LANE_COMPUTE, SLUICE_HAZARD_WRITE_AFTER_READ, "T_DI");
  forget(spec_with(4, S3, 0), SLUICE_OP_UNPACK, 2, SLUICE_LANE_COPY_OUT, SLUICE_HAZARD_WRITE_AFTER_READ, "T_DI");
}

static void Guard2_FirstProductWaitsForTheCopyOfItsSlot(void** state) {
  (void)state;
  forget(spec_with(4, S2, 0), SLUICE_OP_GEMM1, 2, SLUICE_LANE_COPY_OUT, SLUICE_HAZARD_WRITE_AFTER_READ, "T_M");
}

static void Guard3_CopyWaitsForWhatItStores(void** state) {
  (void)state;
  forget(spec_with(2, S2, 0), SLUICE_OP_COPY_OUT, 0, SLUICE_LANE_COMPUTE, SLUICE_HAZARD_READ_AFTER_WRITE, "T_M");
}

static void Guard4_SecondProductWaitsForTheCombine(void** state) {
  (void)state;
  /* In a whole pass the dispatch of the same chunk, which follows that combine, implies it. */
  sluice_template_spec_t spec = spec_with(4, 0, 0);
  spec.bounded = 1, spec.only = SLUICE_PART_EXPERTS | SLUICE_PART_COMBINE;
  forget(spec, SLUICE_OP_GEMM2, 2, SLUICE_LANE_COMM, SLUICE_HAZARD_WRITE_AFTER_READ, "T_DO");
}

static void Guard5_RestoreWaitsForTheSlotsLastReader(void** state) {
  (void)state;
  forget(backward(4, S3), SLUICE_OP_COPY_IN, 2, SLUICE_LANE_COMPUTE, SLUICE_HAZARD_WRITE_AFTER_READ, "T_DI");
  forget(backward(4, S4), SLUICE_OP_UNPACK, 2, SLUICE_LANE_COMPUTE, SLUICE_HAZARD_WRITE_AFTER_READ, "T_DI");
}

static void Guard7_ExchangesAreIssuedAlikeOnAllRanks(void** state) {
  (void)state;
  sluice_template_t* all = build(spec_with(4, 0, 0));    /* T_DI kept: S1 S2 S3 S4 R1 .. */
  sluice_template_t* reuse = build(spec_with(4, S4, 0)); /* slots reused: S1 S2 R1 S3 R2 .. */
  sluice_template_t* other = build(spec_with(4, 2, 0));  /* T_M's policy may differ */
  sluice_template_t* middle = build(spec_with(4, S4, 0));
  assert_false(sluice_schedule_same_exchanges(all, reuse));
  assert_true(sluice_schedule_same_exchanges(reuse, other));
  assert_true(sluice_schedule_same_exchanges(reuse, middle));
  assert_true(all->comm_hash != reuse->comm_hash && reuse->comm_hash == other->comm_hash);
  sluice_template_destroy(all, memory());
  sluice_template_destroy(reuse, memory());
  sluice_template_destroy(other, memory());
  sluice_template_destroy(middle, memory());
}

typedef struct twins_s {
  uint32_t seed;
  int64_t equal, lone; /* lone: no other policy of T_M builds */
} twins_t;

/* Another rank's template: the same but for T_M's policies. */
static void compare_with_twin(const sluice_template_t* t, void* user) {
  twins_t* twins = user;
  sluice_template_spec_t spec = t->spec;
  int differs = 0;
  for (int32_t i = 0; i < spec.num_chunks; ++i) {
    spec.restore_m[i] = of_m[(next_random(&twins->seed) >> 16) % 3];
    differs |= spec.restore_m[i] != t->spec.restore_m[i];
  }
  sluice_template_t* twin = NULL;
  if (!differs || sluice_template_build(&spec, memory(), &twin) != SLUICE_OK) {
    ++twins->lone;
    return;
  }
  if (!sluice_schedule_same_exchanges(t, twin) || t->comm_hash != twin->comm_hash) {
    fail_msg("exchanges differ: direction %d n %d single %d callback %d halves %d %d bounded %d dedup %d cut %d: %s",
             spec.direction, spec.num_chunks, spec.single_rank, spec.callback, spec.input_half, spec.weight_half,
             spec.bounded, spec.dedup, spec.cut_rows, policies_of(t));
  }
  ++twins->equal;
  sluice_template_destroy(twin, memory());
}

static void Exchanges_OfRanksThatDifferInTM_AreEqual(void** state) {
  (void)state;
  twins_t twins = {.seed = 29};
  for (int32_t n = 1; n <= 12; ++n) {
    for (int32_t policy = 0; policy < 9; ++policy) for_each_form(n, policy, 0, compare_with_twin, &twins);
    for (uint32_t seed = 1; seed <= 3; ++seed) for_each_form(n, 9, seed * 61u + (uint32_t)n, compare_with_twin, &twins);
  }
  printf("ranks that differ in T_M's policies: %lld pairs with equal exchanges, %lld templates without a twin\n",
         (long long)twins.equal, (long long)twins.lone);
  assert_true(twins.equal > 10000);
}

static void Guard8_HostCopiesAreOnePerChunk(void** state) {
  (void)state;
  sluice_template_t* t = build(spec_with(3, S1, 0));
  for (int32_t i = 0; i < t->num_ops; ++i) {
    sluice_op_t* op = &t->ops[i];
    if (op->kind == SLUICE_OP_COPY_OUT) op->writes[0].slot = 0; /* the public code keeps one buffer */
  }
  for (int32_t i = 0; i < 3; ++i) {
    t->homes[SLUICE_T_HOST_DI * 3 + i].slot = 0;
    t->homes[SLUICE_T_HOST_M * 3 + i].slot = 0;
  }
  sluice_finding_t finding;
  assert_int_equal(hazard_of(t, &finding), SLUICE_HAZARD_LOST);
  if (strstr(finding_text(t, &finding), "does not hold chunk 0") == NULL) fail_msg("%s", finding_text(t, &finding));
  sluice_template_destroy(t, memory());
}

/* The public code activates chunk 0 only: the others then read rows that nothing has written. */
static void PublicCode_ActivationOfOneChunkOnly_IsFound(void** state) {
  (void)state;
  sluice_template_spec_t spec = spec_with(3, S1, 0);
  spec.gated = 1;
  sluice_template_t* t = build(spec);
  int32_t at = find(t, SLUICE_OP_ACTIVATION, 1, -1);
  t->ops[at].num_writes = 0;
  sluice_finding_t finding;
  assert_int_equal(hazard_of(t, &finding), SLUICE_HAZARD_MISSING_ACCESS);
  t->ops[at] = t->ops[find(t, SLUICE_OP_ACTIVATION, 0, -1)];
  assert_true(hazard_of(t, &finding) != SLUICE_HAZARD_NONE);
  sluice_template_destroy(t, memory());
}

static void Deadlock_WaitForALaterOp_IsFound(void** state) {
  (void)state;
  sluice_template_t* t = build(spec_with(2, 0, 0));
  int32_t first = find(t, SLUICE_OP_GEMM1, 0, -1);
  t->deps[t->ops[first].first_dep] = t->num_ops - 1;
  sluice_finding_t finding;
  assert_int_equal(hazard_of(t, &finding), SLUICE_HAZARD_DEADLOCK);
  if (strstr(finding_text(t, &finding), "is not submitted before it") == NULL)
    fail_msg("%s", finding_text(t, &finding));
  sluice_template_destroy(t, memory());
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Builder_EveryTemplate_IsProved),
      cmocka_unit_test(Mutants_OfEveryForm_AreAllKilled),
      cmocka_unit_test(Releases_TooManyTooFewOrTooEarly_AreNamed),
      cmocka_unit_test(Releases_LastReadersOnTwoLanes_AreBoth),
      cmocka_unit_test(Guard1_DispatchWaitsForTheSlotsReaders),
      cmocka_unit_test(Guard2_FirstProductWaitsForTheCopyOfItsSlot),
      cmocka_unit_test(Guard3_CopyWaitsForWhatItStores),
      cmocka_unit_test(Guard4_SecondProductWaitsForTheCombine),
      cmocka_unit_test(Guard5_RestoreWaitsForTheSlotsLastReader),
      cmocka_unit_test(Guard7_ExchangesAreIssuedAlikeOnAllRanks),
      cmocka_unit_test(Exchanges_OfRanksThatDifferInTM_AreEqual),
      cmocka_unit_test(Guard8_HostCopiesAreOnePerChunk),
      cmocka_unit_test(PublicCode_ActivationOfOneChunkOnly_IsFound),
      cmocka_unit_test(Deadlock_WaitForALaterOp_IsFound),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
