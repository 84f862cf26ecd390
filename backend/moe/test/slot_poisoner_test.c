// SPDX-License-Identifier: Apache-2.0
/* Under SLUICE_POISON a slot is NaN from its release on. Here the engine gets unchecked templates that release a slot
 * too early, and the results must show it, on this CPU and on CUDA (fakes). The linker replaces the builder's and the
 * checker's functions with this file's (see BUILD). */

#include "backend/schedule/check/check.h"
#include "backend/schedule/check/releases.h"
#include "capi/test/cuda/fake_rigs.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

static int32_t wanted = -1; /* index of the release to move, among those that can be earlier; -1: none */
static int32_t direction;
static int32_t num_marks; /* releases that can be earlier, in the last template of that direction */

static int reads(const sluice_op_t* op, int32_t tensor, int32_t slot) {
  for (int32_t i = 0; i < op->num_reads; ++i) {
    if (op->reads[i].tensor == tensor && op->reads[i].slot == slot) return 1;
  }
  return 0;
}

static int writes(const sluice_op_t* op, int32_t tensor, int32_t slot) {
  for (int32_t i = 0; i < op->num_writes; ++i) {
    if (op->writes[i].tensor == tensor && op->writes[i].slot == slot) return 1;
  }
  return 0;
}

/* The op that wrote the slot that `index` reads and releases. */
static int32_t writer_of(const sluice_template_t* t, int32_t index, int32_t tensor, int32_t slot) {
  for (int32_t i = index - 1; i >= 0; --i) {
    if (writes(&t->ops[i], tensor, slot)) return i;
  }
  return -1;
}

/* Whether no other op releases the slot in this use: two ops on different lanes release it when both have ended. */
static int frees_alone(const sluice_template_t* t, int32_t index, int32_t writer, int32_t tensor, int32_t slot) {
  for (int32_t i = writer; i < t->num_ops; ++i) {
    const sluice_op_t* op = &t->ops[i];
    if (i > index && writes(op, tensor, slot) && !reads(op, tensor, slot)) return 1; /* the next use */
    if (i != index && sluice_op_releases(op, tensor, slot)) return 0;
  }
  return 1;
}

/* Moves releases by a single op from the last reader of the slot to its writer. */
static void bend(sluice_template_t* t) {
  num_marks = 0;
  for (int32_t i = 0; i < t->num_ops; ++i) {
    sluice_op_t* op = &t->ops[i];
    for (int32_t a = 0; a < op->num_reads; ++a) {
      const sluice_slot_ref_t ref = op->reads[a];
      if (!(op->releases & SLUICE_RELEASES_READ(a)) || ref.slot < 0 || writes(op, ref.tensor, ref.slot)) continue;
      const int32_t writer = writer_of(t, i, ref.tensor, ref.slot);
      if (writer < 0 || !frees_alone(t, i, writer, ref.tensor, ref.slot)) continue;
      if (num_marks++ != wanted) continue;
      op->releases &= ~SLUICE_RELEASES_READ(a);
      sluice_op_t* early = &t->ops[writer];
      for (int32_t w = 0; w < early->num_writes; ++w) {
        if (early->writes[w].tensor == ref.tensor && early->writes[w].slot == ref.slot) {
          early->releases |= SLUICE_RELEASES_WRITE(w);
          break;
        }
      }
    }
  }
}

sluice_status_t __real_sluice_template_build(const sluice_template_spec_t* spec, sluice_allocator_t* allocator,
                                             sluice_template_t** out_template);
sluice_status_t __wrap_sluice_template_build(const sluice_template_spec_t* spec, sluice_allocator_t* allocator,
                                             sluice_template_t** out_template);
sluice_status_t __wrap_sluice_template_build(const sluice_template_spec_t* spec, sluice_allocator_t* allocator,
                                             sluice_template_t** out_template) {
  SLUICE_TRY(__real_sluice_template_build(spec, allocator, out_template));
  if (spec->direction == direction) bend(*out_template);
  return SLUICE_OK;
}

sluice_status_t __wrap_sluice_schedule_check_or_fail(const sluice_template_t* schedule, sluice_allocator_t* memory);
sluice_status_t __wrap_sluice_schedule_check_or_fail(const sluice_template_t* schedule, sluice_allocator_t* memory) {
  (void)schedule, (void)memory;
  return SLUICE_OK;
}

static uint64_t digest_on_this_cpu(const sluice_moe_config_t* config) {
  rig_t rig;
  uint64_t digest = 0;
  const sluice_context_config_t context = own_rig_context(0, 0);
  own_rig_open(&rig, &context, config);
  WORKS(rig_round(&rig, &digest));
  own_rig_close(&rig);
  return digest;
}

/* On fakes, where copies have their own lanes. A fill that is too early is not a hazard, since readers wait for it. */
static uint64_t digest_on_cuda(const sluice_moe_config_t* config) {
  rig_t rig;
  uint64_t digest = 0;
  open_all(&rig, config);
  WORKS(rig_round(&rig, &digest));
  assert_int_equal(close_all(&rig), 0);
  return digest;
}

typedef uint64_t (*digest_fn_t)(const sluice_moe_config_t* config);

/* Tests every release of both directions, for layers that keep, offload and recompute. */
static void every_mark_is_seen(digest_fn_t digest_of) {
  const int32_t policies[][2] = {{SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP},
                                 {SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD},
                                 {SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE}};
  int32_t num_mutants = 0;
  for (int p = 0; p < COUNT(policies); ++p) {
    sluice_moe_config_t config = rig_config();
    config.num_chunks = 3, config.restore_input = policies[p][0], config.restore_pre_activation = policies[p][1];
    for (direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
      wanted = -1;
      const uint64_t want = digest_of(&config);
      const int32_t count = num_marks;
      assert_true(count > 0);
      for (int32_t i = 0; i < count; ++i) {
        wanted = i;
        if (digest_of(&config) == want) {
          fail_msg("policy %d, direction %d: mark %d of %d one op early: nothing shows it", p, direction, i, count);
        }
        ++num_mutants;
      }
    }
  }
  wanted = -1;
  printf("%d releases one op early, each of them seen\n", num_mutants);
}

TEST(Poison_ReleaseBeforeTheLastReader_ShowsInTheResults) { every_mark_is_seen(digest_on_this_cpu); }

TEST(PoisonOnCuda_ReleaseBeforeTheLastReader_ShowsInTheResults) { every_mark_is_seen(digest_on_cuda); }

/* With the builder's own releases no needed slot is filled, and no fill races with an op: two ranks, over NCCL and on
 * one device. */
TEST(PoisonOnCuda_TheMarksAsTheyAre_ResultsWithoutAHazard) {
  wanted = -1;
  for (int is_local = 0; is_local < 2; ++is_local) {
    for (const layer_case_t* c = layer_cases; c->name != NULL; ++c) {
      const char* problem = c->is_small ? c->run(fakes_layer_machine(is_local), 2) : NULL;
      if (problem != NULL) fail_msg("%s: %s", c->name, problem);
    }
  }
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1);
  return run_cases(NULL, NULL);
}
