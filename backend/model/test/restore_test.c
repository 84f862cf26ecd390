// SPDX-License-Identifier: Apache-2.0
/* The table of restore policies describes each completely. */

#include "backend/model/restore.h"
#include "third_party/bazel/test.h"

TEST(Restore_EveryPolicy_SaysNamesTensorsAndWhatItTakes) {
  for (int32_t policy = 0; policy < SLUICE_NUM_RESTORES; ++policy) {
    const sluice_restore_t* r = sluice_restore(policy);
    if (r->name == NULL || r->word == NULL)
      fail_msg("restore policy %d has no name in backend/model/restore.c", policy);
    if (r->tensors == 0) fail_msg("restore policy %d, %s, is for no tensor", policy, r->name);
    /* Rows are either stored or produced again. */
    const int outlives = r->device_rows + r->host_rows > 0, is_made = r->exchanges + r->gemms > 0;
    if (outlives == is_made) fail_msg("restore policy %d, %s, does not say how rows come back", policy, r->name);
    for (int32_t other = 0; other < policy; ++other) assert_string_not_equal(r->name, sluice_restore(other)->name);
  }
}

TEST(Restore_NumberOfNoPolicy_IsForNothingAndCostsNothing) {
  const int32_t numbers[] = {SLUICE_RESTORE_ADAPTIVE, SLUICE_RESTORE_BY_CHUNK, -77, 255};
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; ++i) {
    assert_string_equal(sluice_restore(numbers[i])->name, "unknown");
    assert_false(sluice_restore_is_for(numbers[i], SLUICE_T_DI) || sluice_restore_is_for(numbers[i], SLUICE_T_M));
    assert_false(sluice_restore_is_stored(numbers[i]) || sluice_restore_is_sent_again(numbers[i]));
    assert_false(sluice_restore_is_computed_again(numbers[i]));
  }
}

TEST(Restore_CallbackExperts_KeepBothOrRunAgain) {
  for (int32_t di = SLUICE_RESTORE_KEEP; di <= SLUICE_RESTORE_REDISPATCH; ++di) {
    assert_int_equal(sluice_restore_fits_callback(di, SLUICE_RESTORE_KEEP), di == SLUICE_RESTORE_KEEP);
    assert_false(sluice_restore_fits_callback(di, SLUICE_RESTORE_OFFLOAD));
    assert_true(sluice_restore_fits_callback(di, SLUICE_RESTORE_RECOMPUTE));
  }
}

TEST(Restore_Find_TakesWholeNamesOfTheTensor) {
  for (int32_t policy = 0; policy < SLUICE_NUM_RESTORES; ++policy) {
    const char* name = sluice_restore_name(policy);
    const int is_di = sluice_restore_is_for(policy, SLUICE_T_DI), is_m = sluice_restore_is_for(policy, SLUICE_T_M);
    assert_int_equal(sluice_restore_find(name, strlen(name), SLUICE_T_DI), is_di ? policy : -1);
    assert_int_equal(sluice_restore_find(name, strlen(name), SLUICE_T_M), is_m ? policy : -1);
    assert_int_equal(sluice_restore_find(name, strlen(name) - 1, SLUICE_T_DI), -1);
  }
  assert_int_equal(sluice_restore_find("keeper", 6, SLUICE_T_DI), -1);
  assert_int_equal(sluice_restore_find("keeper", 4, SLUICE_T_DI), SLUICE_RESTORE_KEEP);
}

/* MPipeMoE Table II: what none and S1 to S4 copy, send and recompute. */
TEST(Restore_NamedSets_AreTableTwo) {
  static const struct {
    const char* name;
    int32_t copies_di, copies_m, exchanges, gemms;
  } table[SLUICE_NUM_RESTORE_SETS] = {
      {"none", 0, 0, 0, 0}, {"S1", 1, 1, 0, 0}, {"S2", 0, 1, 1, 0}, {"S3", 1, 0, 0, 1}, {"S4", 0, 0, 1, 1}};
  for (size_t i = 0; i < SLUICE_NUM_RESTORE_SETS; ++i) {
    const sluice_restore_set_t* set = &sluice_restore_sets[i];
    const sluice_restore_t *di = sluice_restore(set->restore_input), *m = sluice_restore(set->restore_pre_activation);
    assert_string_equal(set->name, table[i].name);
    assert_true(sluice_restore_is_for(set->restore_input, SLUICE_T_DI) &&
                sluice_restore_is_for(set->restore_pre_activation, SLUICE_T_M));
    assert_int_equal(di->host_rows, table[i].copies_di);
    assert_int_equal(m->host_rows, table[i].copies_m);
    assert_int_equal(di->exchanges + m->exchanges, table[i].exchanges);
    assert_int_equal(di->gemms + m->gemms, table[i].gemms);
    assert_string_equal(sluice_restore_set_name(set->restore_input, set->restore_pre_activation), set->name);
  }
  assert_null(sluice_restore_set_name(SLUICE_RESTORE_KEEP, SLUICE_RESTORE_RECOMPUTE));
}
