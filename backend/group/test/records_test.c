// SPDX-License-Identifier: Apache-2.0
/* Records of ranks are compared by their table alone, and errors name ranks, fields and values. */

#include "backend/group/records.h"
#include "third_party/bazel/test.h"

typedef struct record_s {
  sluice_refusal_t refusal;
  uint64_t wide, hash;
  int32_t number;
  uint16_t shorter;
  int8_t small;
  uint8_t word, told, forgiven;
} record_t;

static const char* color(int64_t value) { return value == 0 ? "red" : "blue"; }

static int describe_forgiven(const sluice_record_pair_t* pair, char* text, size_t room) {
  const record_t *own = pair->own, *peer = pair->peer;
  if (own->forgiven + peer->forgiven == 1) return 0;
  return snprintf(text, room, "rank %d asks for %d", pair->peer_rank, peer->forgiven);
}

static const sluice_record_field_t fields[] = {
    {SLUICE_RECORD_FIELD(record_t, forgiven), .describe = describe_forgiven},
    {SLUICE_RECORD_FIELD(record_t, wide), .name = "wide"},
    {SLUICE_RECORD_FIELD(record_t, hash), .is_hash = 1, .name = "hash"},
    {SLUICE_RECORD_FIELD(record_t, number), .name = "number"},
    {SLUICE_RECORD_FIELD(record_t, shorter), .name = "shorter"},
    {SLUICE_RECORD_FIELD(record_t, small), .name = "small", .hint = ": take one"},
    {SLUICE_RECORD_FIELD(record_t, word), .name = "color", .word = color},
};

static sluice_records_t of(record_t* data, int32_t rank) {
  return (sluice_records_t){(char*)data, sizeof *data, rank, 3, "painter"};
}

/* The error on each rank of three, of which rank 2 has given `theirs`. */
static void compare(const record_t* theirs, const char* want) {
  record_t data[3];
  memset(data, 0, sizeof data);
  data[2] = *theirs;
  for (int32_t rank = 0; rank < 3; ++rank) {
    const sluice_records_t records = of(data, rank);
    const sluice_status_t status = sluice_records_compare(&records, fields, SLUICE_NUM_FIELDS(fields));
    assert_int_equal(status, want == NULL ? SLUICE_OK : SLUICE_E_MISMATCH);
    if (want == NULL) continue;
    sluice_error_info_t why;
    sluice_error_capture(&why);
    assert_string_equal(why.message, want);
    assert_true(why.rank == rank && why.peer == 2);
  }
}

TEST(Records_OneFieldDiffers_IsNamedWithBothValues) {
  compare(&(record_t){.wide = UINT64_C(1) << 40},
          "painter: wide is 1099511627776 on rank 2 and 0 on rank 0; give all ranks the same");
  compare(&(record_t){.hash = UINT64_C(0xf000000000000abc)},
          "painter: hash is 0xf000000000000abc on rank 2 and 0 on rank 0; give all ranks the same");
  compare(&(record_t){.number = -5}, "painter: number is -5 on rank 2 and 0 on rank 0; give all ranks the same");
  compare(&(record_t){.shorter = 40000},
          "painter: shorter is 40000 on rank 2 and 0 on rank 0; give all ranks the same");
  compare(&(record_t){.small = -1}, "painter: small is -1 on rank 2 and 0 on rank 0: take one");
  compare(&(record_t){.word = 1}, "painter: color is blue on rank 2 and red on rank 0; give all ranks the same");
}

TEST(Records_SeveralFieldsDiffer_TheFirstOfTheTableIsNamed) {
  compare(&(record_t){.small = 7, .number = 3, .word = 1},
          "painter: number is 3 on rank 2 and 0 on rank 0; give all ranks the same");
}

/* Also a difference that its field takes for none, which does not hide the next one. */
TEST(Records_DifferInWhatIsNotCompared_Agree) {
  compare(&(record_t){.told = 9}, NULL);
  compare(&(record_t){.forgiven = 1}, NULL);
  compare(&(record_t){.forgiven = 1, .number = 3},
          "painter: number is 3 on rank 2 and 0 on rank 0; give all ranks the same");
  compare(&(record_t){.forgiven = 2}, "painter: rank 2 asks for 2");
}

TEST(Records_ARankRefuses_IsNamedWithItsReason) {
  record_t data[3];
  memset(data, 0, sizeof data);
  const sluice_records_t records = of(data, 0);
  assert_int_equal(sluice_records_check_refusals(&records, "paints nothing"), SLUICE_OK);
  char reason[400]; /* longer than what a record holds */
  memset(reason, 'x', sizeof reason);
  reason[sizeof reason - 1] = '\0';
  sluice_refusal_note(&data[1].refusal, SLUICE_FAIL(SLUICE_E_STATE, "%s", reason));
  assert_int_equal(sluice_records_check_refusals(&records, "paints nothing"), SLUICE_E_PEER_REFUSED);
  sluice_error_info_t why;
  sluice_error_capture(&why);
  static const char begins[] = "painter: rank 1 paints nothing: STATE: xxx";
  assert_memory_equal(why.message, begins, sizeof begins - 1);
  assert_int_equal(why.peer, 1);
  assert_int_equal(strspn(strchr(why.message, 'x'), "x"), sizeof data->refusal.message - 1);
}
