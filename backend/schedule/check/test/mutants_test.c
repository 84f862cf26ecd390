// SPDX-License-Identifier: Apache-2.0
/* The hazard checker finds every mutant of every form: a dependency deleted, two slots of a ring merged, a read
 * removed, a lane changed, exchanges swapped, a group broken, a release removed, added or moved. */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "backend/schedule/check/finding.h"
#include "backend/schedule/check/releases.h"
#include "backend/schedule/template/template.h"
#include "backend/schedule/test/forms.h"
#include "third_party/bazel/test.h"

#define MAX_WORKERS        16
#define BOTH_SPECS_UP_TO   3 /* n: mutants are also judged under the specs of other forms */
#define LARGEST_BY_DEFAULT 6
#define LARGEST            32

enum { DEPENDENCY, SLOTS, READ, LANE, EXCHANGES, GROUP, DROPPED, ADDED, MOVED, KINDS };

/* The checker cannot distinguish the forms of a class, so they have the same mutants: one form is mutated. */
typedef struct class_s {
  sluice_template_t* t;
  int64_t mutants;
} class_t;

typedef struct score_s {
  int64_t templates, classes;
  int64_t mutants, killed;
  int64_t stood_for; /* mutants of all templates, not only of one per class */
  int64_t by_kind[KINDS];
  int32_t releases_up_to;           /* releases are mutated in templates of up to this many chunks */
  int64_t rings_of_one, idle_slots; /* no mutants: rings that cannot be shorter, and slots that no chunk uses */
  class_t* seen;                    /* the classes of the current n */
  int64_t num_seen, max_seen;
  sluice_template_t* mutant; /* space for a mutant with the current n */
  char failure[FORM_TEXT_BYTES + 256];
} score_t;

/* Copies the template to other memory, where its parts can be changed. */
static sluice_template_t* copy_into(const sluice_template_t* t, sluice_template_t* copy) {
  memcpy(copy, t, t->bytes);
  ptrdiff_t shift = (char*)copy - (const char*)t;
  copy->ops = (sluice_op_t*)(void*)((char*)t->ops + shift);
  copy->deps = (int32_t*)(void*)((char*)t->deps + shift);
  copy->homes = (sluice_slot_ref_t*)(void*)((char*)t->homes + shift);
  return copy;
}

static sluice_template_t* copy_of(const sluice_template_t* t, score_t* score) { return copy_into(t, score->mutant); }

static void note_failure(score_t* score, const sluice_template_t* t, const char* what, int32_t a, int32_t b) {
  if (score->failure[0] != '\0') return;
  char form[FORM_TEXT_BYTES];
  describe_form(t, form, sizeof form);
  snprintf(score->failure, sizeof score->failure, "%s %d %d of %s", what, a, b, form);
}

/* ---- judging ---- */

static sluice_finding_t finding_of(const sluice_template_t* t, score_t* score) {
  sluice_finding_t finding = {.hazard = SLUICE_HAZARD_NONE};
  if (sluice_schedule_check(t, sluice_process_allocator(), &finding) != SLUICE_OK)
    note_failure(score, t, "no check", 0, 0);
  return finding;
}

/* Changes fields that only the builder reads. With them the checker must find the same, and hence in every form of a
 * class. */
static void flip_what_builders_read(sluice_template_spec_t* spec) {
  spec->gated ^= 1, spec->wgrad_mode ^= 1, spec->reuse_saved ^= 1, spec->bounded ^= 1;
  spec->shares_act ^= 1, spec->grouped ^= 1, spec->experts_first ^= 1;
  if (spec->direction == SLUICE_BACKWARD && spec->dedup != SLUICE_DEDUPLICATE_NODES) spec->dedup ^= 1;
}

static void forget_what_builders_read(sluice_template_spec_t* spec) {
  spec->gated = spec->wgrad_mode = spec->reuse_saved = spec->bounded = spec->shares_act = 0;
  spec->grouped = 0, spec->experts_first = 0;
  if (spec->direction == SLUICE_BACKWARD && spec->dedup != SLUICE_DEDUPLICATE_NODES) spec->dedup = 0;
}

static int is_same_under_other_specs(sluice_template_t* mutant, const sluice_finding_t* finding, score_t* score) {
  flip_what_builders_read(&mutant->spec);
  sluice_finding_t other = finding_of(mutant, score);
  flip_what_builders_read(&mutant->spec);
  return memcmp(&other, finding, sizeof other) == 0;
}

static void judge(const sluice_template_t* t, sluice_template_t* mutant, score_t* score, int kind, const char* what,
                  int32_t a, int32_t b) {
  ++score->mutants;
  ++score->by_kind[kind];
  sluice_finding_t finding = finding_of(mutant, score);
  /* A mutant of another kind must be found without the help of releases that its change has made wrong. */
  if (kind < DROPPED && finding.hazard >= SLUICE_HAZARD_DOUBLE_RELEASE) {
    (void)sluice_template_mark_releases(mutant);
    finding = finding_of(mutant, score);
  }
  char text[512] = "";
  sluice_finding_describe(mutant, &finding, text, sizeof text);
  if (finding.hazard == SLUICE_HAZARD_NONE || text[0] == '\0') {
    note_failure(score, t, what, a, b);
    return;
  }
  if (t->spec.num_chunks <= BOTH_SPECS_UP_TO && !is_same_under_other_specs(mutant, &finding, score)) {
    note_failure(score, t, "found, but not in all forms of its class:", a, b);
  }
  ++score->killed;
}

/* ---- mutants ---- */

static void delete_dependencies(const sluice_template_t* t, score_t* score) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    for (int32_t d = 0; d < t->ops[i].num_deps; ++d) {
      sluice_template_t* mutant = copy_of(t, score);
      int32_t at = t->ops[i].first_dep + d, last = t->ops[i].first_dep + t->ops[i].num_deps - 1;
      mutant->deps[at] = t->deps[last];
      --mutant->ops[i].num_deps;
      judge(t, mutant, score, DEPENDENCY, "dependency deleted: op, place", i, d);
    }
  }
}

static void move_refs(sluice_slot_ref_t* refs, int32_t count, int32_t tensor, int32_t from, int32_t to) {
  for (int32_t i = 0; i < count; ++i) {
    if (refs[i].tensor == tensor && refs[i].slot == from) refs[i].slot = (int16_t)to;
  }
}

/* Whether an op touches this slot. */
static int is_touched(const sluice_template_t* t, int32_t tensor, int32_t slot) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    const sluice_op_t* op = &t->ops[i];
    if (sluice_slot_is_among(op->reads, op->num_reads, tensor, slot)) return 1;
    if (sluice_slot_is_among(op->writes, op->num_writes, tensor, slot)) return 1;
  }
  return 0;
}

static int is_home(const sluice_template_t* t, int32_t tensor, int32_t slot) {
  for (int32_t other = 0; other < SLUICE_T_COUNT; ++other) {
    if (other == SLUICE_T_KEPT_DI || other == SLUICE_T_KEPT_M) continue; /* slots are reached through T_DI and T_M */
    for (int32_t i = 0; i < t->spec.num_chunks; ++i) {
      sluice_slot_ref_t home = sluice_template_home(t, other, i);
      if (home.tensor == tensor && home.slot == slot) return 1;
    }
  }
  return 0;
}

/* Slots of the tensor that are the home of a chunk of this template and that an op touches. */
static int32_t used_slots(const sluice_template_t* t, int32_t tensor, int32_t* out_slots) {
  int32_t used = 0;
  for (int32_t slot = 0; slot < t->ring[tensor]; ++slot) {
    if (is_touched(t, tensor, slot) && is_home(t, tensor, slot)) out_slots[used++] = slot;
  }
  return used;
}

static void merge_slots(const sluice_template_t* t, score_t* score, int32_t tensor, int32_t from, int32_t to) {
  sluice_template_t* mutant = copy_of(t, score);
  for (int32_t i = 0; i < t->num_ops; ++i) {
    move_refs(mutant->ops[i].reads, mutant->ops[i].num_reads, tensor, from, to);
    move_refs(mutant->ops[i].writes, mutant->ops[i].num_writes, tensor, from, to);
  }
  move_refs(mutant->homes, SLUICE_T_COUNT * t->spec.num_chunks, tensor, from, to);
  char what[64];
  snprintf(what, sizeof what, "slots of %s share a place:", sluice_tensor_kind_name(tensor));
  judge(t, mutant, score, SLOTS, what, from, to);
}

/* Two slots become one, as in a ring with one slot less, and dependencies stay. Merges each pair of used slots; in
 * rings with more than 8, each slot with the next, and the last with the first. */
static void shrink_rings(const sluice_template_t* t, score_t* score) {
  for (int32_t tensor = 0; tensor < SLUICE_T_COUNT; ++tensor) {
    int32_t slots[SLUICE_MAX_CHUNKS], used = used_slots(t, tensor, slots);
    score->rings_of_one += t->ring[tensor] == 1;
    score->idle_slots += t->ring[tensor] - used;
    for (int32_t i = 0; i < used; ++i) {
      for (int32_t j = i + 1; j < used; ++j) {
        if (used <= 8 || j == i + 1 || (i == 0 && j == used - 1)) merge_slots(t, score, tensor, slots[j], slots[i]);
      }
    }
  }
}

static void drop_accesses(const sluice_template_t* t, score_t* score) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    sluice_op_rule_t rule = sluice_op_rule(t->ops[i].kind, &t->spec);
    for (int32_t r = 0; r < rule.num_reads; ++r) {
      sluice_template_t* mutant = copy_of(t, score);
      sluice_op_t* op = &mutant->ops[i];
      int32_t chunk = op->chunk < 0 ? 0 : op->chunk, kept = 0;
      int16_t tensor = sluice_template_home(t, rule.reads[r], chunk).tensor;
      for (int32_t k = 0; k < op->num_reads; ++k) {
        if (op->reads[k].tensor != tensor) op->reads[kept++] = op->reads[k];
      }
      op->num_reads = kept;
      judge(t, mutant, score, READ, "read dropped: op, tensor", i, tensor);
    }
  }
}

static void move_lanes(const sluice_template_t* t, score_t* score) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    sluice_template_t* mutant = copy_of(t, score);
    mutant->ops[i].lane = (uint8_t)((t->ops[i].lane + 1) % SLUICE_NUM_LANES);
    judge(t, mutant, score, LANE, "lane moved: op, lane", i, t->ops[i].lane);
  }
}

/* Two consecutive exchanges of one rank are swapped; the other ranks keep the template. */
static void swap_exchanges(const sluice_template_t* t, score_t* score) {
  int32_t last = -1;
  for (int32_t i = 0; i < t->num_ops; ++i) {
    if (!sluice_op_is_exchange(t->ops[i].kind)) continue;
    if (last >= 0) {
      sluice_template_t* mutant = copy_of(t, score);
      sluice_op_t op = mutant->ops[i];
      mutant->ops[i].kind = mutant->ops[last].kind, mutant->ops[i].chunk = mutant->ops[last].chunk;
      mutant->ops[last].kind = op.kind, mutant->ops[last].chunk = op.chunk;
      ++score->mutants, ++score->by_kind[EXCHANGES];
      if (sluice_schedule_same_exchanges(t, mutant)) {
        note_failure(score, t, "exchanges swapped: ops", last, i);
      } else {
        ++score->killed;
      }
    }
    last = i;
  }
}

/* Waits for a group become waits for the exchange that opens it; one of its two exchanges leaves the group; or both
 * leave, while the other ranks keep the group. */
static void break_groups(const sluice_template_t* t, score_t* score) {
  for (int32_t d = 0; d < t->num_deps; ++d) {
    if (t->ops[t->deps[d]].group != SLUICE_GROUP_CLOSES) continue;
    sluice_template_t* mutant = copy_of(t, score);
    --mutant->deps[d];
    judge(t, mutant, score, GROUP, "group is not waited for to its end: dependency", d, t->deps[d]);
  }
  for (int32_t i = 0; i < t->num_ops; ++i) {
    if (t->ops[i].group == SLUICE_GROUP_NONE) continue;
    sluice_template_t* mutant = copy_of(t, score);
    mutant->ops[i].group = SLUICE_GROUP_NONE;
    judge(t, mutant, score, GROUP, "half of a group: op", i, 0);
    if (t->ops[i].group != SLUICE_GROUP_OPENS) continue;
    mutant->ops[i + 1].group = SLUICE_GROUP_NONE;
    ++score->mutants, ++score->by_kind[GROUP];
    if (sluice_schedule_same_exchanges(t, mutant)) {
      note_failure(score, t, "group dropped: op", i, 0);
    } else {
      ++score->killed;
    }
  }
}

static int has_access(const sluice_op_t* op, int32_t bit) {
  return bit < SLUICE_OP_MAX_ACCESSES ? bit < op->num_reads : bit - SLUICE_OP_MAX_ACCESSES < op->num_writes;
}

static sluice_slot_ref_t access_of(const sluice_op_t* op, int32_t bit) {
  return bit < SLUICE_OP_MAX_ACCESSES ? op->reads[bit] : op->writes[bit - SLUICE_OP_MAX_ACCESSES];
}

static void judge_releases(const sluice_template_t* t, score_t* score, int kind, int32_t op, int32_t bit, int32_t to) {
  sluice_template_t* mutant = copy_of(t, score);
  mutant->ops[op].releases ^= 1 << bit;
  if (to >= 0) mutant->ops[to / 16].releases |= 1 << to % 16;
  judge(t, mutant, score, kind, "release dropped, added or moved: op, access", op, bit);
}

/* The nearest op in this direction with an access of the same slot that does not free it: op * 16 + bit; -1: none. */
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

/* Removes each release, or moves it to the previous or next op that touches the slot. Makes each other access a
 * release, which frees a slot twice, too early, or one that the pass must not free. */
static void change_releases(const sluice_template_t* t, score_t* score) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    for (int32_t bit = 0; bit < 16; ++bit) {
      if (!has_access(&t->ops[i], bit)) continue;
      int is_set = t->ops[i].releases >> bit & 1;
      judge_releases(t, score, is_set ? DROPPED : ADDED, i, bit, -1);
      for (int32_t step = -1; is_set && step <= 1; step += 2) {
        int32_t to = nearest(t, i, access_of(&t->ops[i], bit), step);
        if (to >= 0) judge_releases(t, score, MOVED, i, bit, to);
      }
    }
  }
}

static void mutate(const sluice_template_t* t, score_t* score) {
  delete_dependencies(t, score);
  shrink_rings(t, score);
  drop_accesses(t, score);
  move_lanes(t, score);
  swap_exchanges(t, score);
  break_groups(t, score);
  if (t->spec.num_chunks <= score->releases_up_to) change_releases(t, score);
}

/* ---- classes ---- */

static int is_same_to_the_checker(const sluice_template_t* a, const sluice_template_t* b) {
  if (a->num_ops != b->num_ops || a->num_deps != b->num_deps || memcmp(a->ring, b->ring, sizeof a->ring) != 0) return 0;
  sluice_template_spec_t of_a = a->spec, of_b = b->spec;
  forget_what_builders_read(&of_a);
  forget_what_builders_read(&of_b);
  return memcmp(&of_a, &of_b, sizeof of_a) == 0 && memcmp(a->ops, b->ops, (size_t)a->num_ops * sizeof *a->ops) == 0 &&
         memcmp(a->deps, b->deps, (size_t)a->num_deps * sizeof *a->deps) == 0 &&
         memcmp(a->homes, b->homes, (size_t)SLUICE_T_COUNT * (size_t)a->spec.num_chunks * sizeof *a->homes) == 0;
}

static class_t* class_of(const sluice_template_t* t, score_t* score) {
  for (int64_t i = 0; i < score->num_seen; ++i) {
    if (is_same_to_the_checker(score->seen[i].t, t)) return &score->seen[i];
  }
  return NULL;
}

static class_t* add_class(const sluice_template_t* t, score_t* score) {
  if (score->num_seen == score->max_seen) {
    score->max_seen = 2 * score->max_seen + 64;
    score->seen = realloc(score->seen, (size_t)score->max_seen * sizeof *score->seen);
  }
  class_t* added = &score->seen[score->num_seen++];
  added->t = copy_into(t, malloc(t->bytes));
  return added;
}

static void visit(const sluice_template_t* t, void* user) {
  score_t* score = user;
  if (score->failure[0] != '\0') return;
  ++score->templates;
  class_t* of_t = class_of(t, score);
  if (of_t == NULL) {
    int64_t before = score->mutants;
    mutate(t, score);
    of_t = add_class(t, score);
    of_t->mutants = score->mutants - before;
    ++score->classes;
  }
  score->stood_for += of_t->mutants;
}

/* ---- all n, by as many threads as there are cores ---- */

typedef struct worker_s {
  pthread_t thread;
  _Atomic int32_t* next_n; /* shared by all workers; counts down from the largest n */
  score_t score;
} worker_t;

static void mutate_all_of(int32_t n, score_t* score) {
  score->mutant = malloc(sluice_template_bytes(n, 1));
  for (int32_t policy = 0; policy < 9; ++policy) for_each_form(n, policy, 0, visit, score);
  for (uint32_t seed = 1; seed <= 3; ++seed) for_each_form(n, 9, seed * 131u + (uint32_t)n, visit, score);
  for (int64_t i = 0; i < score->num_seen; ++i) free(score->seen[i].t);
  score->num_seen = 0;
  free(score->mutant);
}

static void* work(void* argument) {
  worker_t* worker = argument;
  for (int32_t n = (*worker->next_n)--; n >= 1; n = (*worker->next_n)--) mutate_all_of(n, &worker->score);
  free(worker->score.seen);
  return NULL;
}

static void add_score(score_t* sum, const score_t* one) {
  sum->templates += one->templates, sum->classes += one->classes;
  sum->mutants += one->mutants, sum->killed += one->killed, sum->stood_for += one->stood_for;
  for (int kind = 0; kind < KINDS; ++kind) sum->by_kind[kind] += one->by_kind[kind];
  sum->rings_of_one += one->rings_of_one, sum->idle_slots += one->idle_slots;
}

static void print_score(const score_t* score, int32_t largest) {
  static const char* const kinds[KINDS] = {"dependency deleted", "slots merged",      "read dropped",
                                           "lane moved",         "exchanges swapped", "group broken",
                                           "release dropped",    "release added",     "release moved"};
  printf("mutants: %lld, killed: %lld (", (long long)score->mutants, (long long)score->killed);
  for (int kind = 0; kind < KINDS; ++kind) {
    printf("%s%s %lld", kind > 0 ? ", " : "", kinds[kind], (long long)score->by_kind[kind]);
  }
  printf("), n <= %d, of releases %d\n", largest, score->releases_up_to);
  printf("of %lld templates, each another to the checker, which stand for %lld mutants of %lld forms\n",
         (long long)score->classes, (long long)score->stood_for, (long long)score->templates);
  printf("no mutants: %lld rings of one slot, %lld slots that no chunk of their template uses\n",
         (long long)score->rings_of_one, (long long)score->idle_slots);
}

TEST(Mutants_OfEveryForm_AreAllKilled) {
  const int is_full = getenv("SLUICE_FULL") != NULL;
  const int32_t largest = is_full ? LARGEST : LARGEST_BY_DEFAULT;
  _Atomic int32_t next_n = largest;
  static worker_t workers[MAX_WORKERS];
  long count = sysconf(_SC_NPROCESSORS_ONLN);
  count = count < 1 ? 1 : count > MAX_WORKERS ? MAX_WORKERS : count;
  score_t sum = {.releases_up_to = is_full ? 8 : 4};
  for (long i = 0; i < count; ++i) {
    workers[i] = (worker_t){.next_n = &next_n, .score = {.releases_up_to = sum.releases_up_to}};
    assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
  }
  for (long i = 0; i < count; ++i) {
    pthread_join(workers[i].thread, NULL);
    add_score(&sum, &workers[i].score);
  }
  for (long i = 0; i < count; ++i) {
    if (workers[i].score.failure[0] != '\0') fail_msg("survivor: %s", workers[i].score.failure);
  }
  print_score(&sum, largest);
  assert_int_equal(sum.killed, sum.mutants);
  for (int kind = 0; kind < KINDS; ++kind) assert_true(sum.by_kind[kind] > 100);
}
