// SPDX-License-Identifier: Apache-2.0
/* Templates as bytes: written templates read back, and anything else is rejected. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/hash.h"
#include "backend/base/test/refused.h"
#include "backend/schedule/serial/serial.h"
#include "backend/schedule/template/template.h"

static uint32_t next_random(uint32_t* state) { return (*state = *state * 1664525u + 1013904223u) >> 8; }

static sluice_template_t* random_template(uint32_t* seed) {
  static const uint8_t of_m[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  for (;;) {
    sluice_template_spec_t spec = {.num_chunks = 1 + (int32_t)(next_random(seed) % 9)};
    spec.direction = (int32_t)(next_random(seed) % 2), spec.gated = (int32_t)(next_random(seed) % 2);
    spec.single_rank = next_random(seed) % 4 == 0, spec.keep = spec.direction == SLUICE_FORWARD;
    spec.dgrad = spec.direction == SLUICE_BACKWARD, spec.wgrad_mode = (int32_t)(next_random(seed) % 2);
    spec.wgrad = spec.dgrad ? (int32_t)(next_random(seed) % 3) : 0;
    spec.reuse_saved = (int32_t)(next_random(seed) % 2), spec.bounded = (int32_t)(next_random(seed) % 2);
    spec.dedup = spec.single_rank ? 0 : (int32_t)(next_random(seed) % 3);
    spec.chunks_by_experts = next_random(seed) % 4 == 0;
    spec.grouped = !spec.single_rank && next_random(seed) % 2;
    spec.shares_act = (int32_t)(next_random(seed) % 2), spec.low_rank = (int32_t)(next_random(seed) % 2);
    spec.experts_first = (int32_t)(next_random(seed) % 2);
    for (int32_t i = 0; i < spec.num_chunks; ++i) {
      spec.restore_input[i] = (uint8_t)(next_random(seed) % 3),
      spec.restore_pre_activation[i] = of_m[next_random(seed) % 3];
    }
    sluice_template_t* t = NULL;
    if (sluice_template_build(&spec, sluice_process_allocator(), &t) == SLUICE_OK) return t;
  }
}

static unsigned char* written(const sluice_template_t* t, uint64_t* out_bytes) {
  *out_bytes = sluice_schedule_write(t, NULL, 0);
  unsigned char* data = malloc(*out_bytes);
  assert_int_equal(sluice_schedule_write(t, data, *out_bytes), *out_bytes);
  return data;
}

TEST(Template_WrittenAndRead_IsTheSame) {
  uint32_t seed = 3;
  for (int i = 0; i < 300; ++i) {
    sluice_template_t *t = random_template(&seed), *again = NULL;
    uint64_t bytes = 0, bytes_again = 0;
    unsigned char* data = written(t, &bytes);
    if (sluice_schedule_read(data, bytes, sluice_process_allocator(), &again) != SLUICE_OK) {
      fail_msg("%s", last_message());
    }
    assert_true(again->hash == t->hash && again->comm_hash == t->comm_hash);
    unsigned char* data_again = written(again, &bytes_again);
    assert_int_equal(bytes, bytes_again);
    assert_memory_equal(data, data_again, bytes);
    free(data), free(data_again);
    sluice_template_destroy(t, sluice_process_allocator());
    sluice_template_destroy(again, sluice_process_allocator());
  }
}

static void reseal(unsigned char* data, uint64_t bytes) {
  const uint64_t sum = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, data, bytes > 8 ? bytes - 8 : 0);
  for (int i = 0; i < 8 && bytes >= 8; ++i) data[bytes - 8 + (uint64_t)i] = (unsigned char)(sum >> (8 * i));
}

/* Whether the message names a field or a hazard. */
static int names_a_field(const char* message) {
  static const char* const words[] = {
      "must be in",        "the bytes end before", "checksum",         "bytes follow the end", "num_deps is",
      "schedule refused:", "restore polic",        "callback experts", "a backward computes",  "number of chunks",
      "dedup is",          "chunks_by_experts is", "grouped is",       "low_rank is"};
  for (size_t i = 0; i < sizeof words / sizeof words[0]; ++i) {
    if (strstr(message, words[i]) != NULL) return 1;
  }
  return 0;
}

/* Changed, truncated, extended and spliced bytes, half of them with a matching checksum. */
TEST(Reader_ChangedBytes_AreRefusedByName) {
  int64_t inputs = getenv("SLUICE_FULL") != NULL ? 1000000 : 20000, refused = 0;
  uint32_t seed = 11;
  sluice_template_t* t = NULL;
  unsigned char *data = NULL, *bent = malloc(1 << 16);
  uint64_t bytes = 0;
  for (int64_t i = 0; i < inputs; ++i) {
    if (i % 50 == 0) {
      free(data);
      sluice_template_destroy(t, sluice_process_allocator());
      t = random_template(&seed);
      data = written(t, &bytes);
      assert_true(bytes < (1 << 15));
    }
    uint64_t length = bytes;
    memcpy(bent, data, bytes);
    uint32_t kind = next_random(&seed) % 8;
    if (kind == 0) length = next_random(&seed) % (bytes + 1);
    if (kind == 1) length += 1 + next_random(&seed) % 64, memset(bent + bytes, (int)next_random(&seed) & 255, 64);
    for (uint32_t k = 0; kind > 1 && k <= next_random(&seed) % 4; ++k) {
      uint64_t at = next_random(&seed) % (bytes / 4) * 4;
      uint32_t value = kind == 2 ? next_random(&seed) << 8 : next_random(&seed) % 8;
      if (kind == 3) value = (uint32_t)-1 - value;
      for (int b = 0; b < 4; ++b) bent[at + (uint64_t)b] = (unsigned char)(value >> (8 * b));
    }
    if (i % 2 == 0) reseal(bent, length);
    sluice_template_t* read = NULL;
    unsigned char* exact = malloc(length); /* exact size, so that a sanitizer sees reads beyond it */
    memcpy(exact, bent, length);
    sluice_status_t status = sluice_schedule_read(exact, length, sluice_process_allocator(), &read);
    free(exact);
    if (status == SLUICE_OK) { /* changed into another valid template, or not changed at all */
      assert_non_null(read);
      sluice_template_destroy(read, sluice_process_allocator());
      continue;
    }
    assert_null(read);
    ++refused;
    if (!names_a_field(last_message())) fail_msg("no field named: %s", last_message());
  }
  printf("fuzz inputs: %lld, refused: %lld\n", (long long)inputs, (long long)refused);
  assert_true(refused > inputs / 2);
  free(data), free(bent);
  sluice_template_destroy(t, sluice_process_allocator());
}

static int32_t find(const sluice_template_t* t, int32_t kind, int32_t chunk) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    if (t->ops[i].kind == kind && t->ops[i].chunk == chunk) return i;
  }
  fail_msg("no op %s of chunk %d", sluice_op_name(kind), chunk);
  return -1;
}

TEST(Reader_TemplateWithoutAnEdge_IsRefusedWithOpSlotChunkAndEdge) {
  sluice_template_spec_t spec = {.num_chunks = 4, .keep = 1};
  for (int32_t i = 0; i < 4; ++i) {
    spec.restore_input[i] = SLUICE_RESTORE_OFFLOAD, spec.restore_pre_activation[i] = SLUICE_RESTORE_RECOMPUTE; /* S3 */
  }
  sluice_template_t *t = NULL, *read = NULL;
  assert_int_equal(sluice_template_build(&spec, sluice_process_allocator(), &t), SLUICE_OK);
  const int32_t later = find(t, SLUICE_OP_UNPACK, 2), earlier = find(t, SLUICE_OP_COPY_OUT, 0);
  sluice_op_t* op = &t->ops[later];
  int32_t* deps = t->deps + op->first_dep;
  int32_t place = 0;
  while (place < op->num_deps && deps[place] != earlier) ++place;
  assert_true(place < op->num_deps); /* the edge that guards slot 0 of T_DI */
  deps[place] = deps[op->num_deps - 1];
  --op->num_deps, --t->num_deps;
  uint64_t bytes = 0;
  unsigned char* data = written(t, &bytes);
  assert_int_equal(sluice_schedule_read(data, bytes, sluice_process_allocator(), &read), SLUICE_E_INVALID_ARGUMENT);
  assert_null(read);
  char want[256];
  snprintf(want, sizeof want,
           "schedule refused: write-after-read on slot 0 of T_DI: op %d (unpack of chunk 2) does not wait for op %d "
           "(copy_out of chunk 0); the edge from the second to the first is missing",
           later, earlier);
  assert_string_equal(last_message(), want);
  free(data);
  sluice_template_destroy(t, sluice_process_allocator());
}

/* Small templates whose ops all read the largest possible rings: the checker's lists must have enough space. */
TEST(Reader_ManyReadsOfWholeRings_StaysInItsMemory) {
  sluice_template_spec_t spec = {.num_chunks = 2};
  sluice_template_t *t = NULL, *read = NULL;
  assert_int_equal(sluice_template_build(&spec, sluice_process_allocator(), &t), SLUICE_OK);
  t->ring[SLUICE_T_ROUTE] = SLUICE_MAX_CHUNKS; /* a forward does not use it */
  for (int32_t i = 0; i < t->num_ops; ++i) {
    sluice_op_t* op = &t->ops[i];
    while (op->num_reads < SLUICE_OP_MAX_ACCESSES) op->reads[op->num_reads++] = (sluice_slot_ref_t){SLUICE_T_ROUTE, -1};
  }
  uint64_t bytes = 0;
  unsigned char* data = written(t, &bytes);
  if (sluice_schedule_read(data, bytes, sluice_process_allocator(), &read) == SLUICE_OK) assert_non_null(read);
  free(data);
  sluice_template_destroy(t, sluice_process_allocator());
  sluice_template_destroy(read, sluice_process_allocator());
}

TEST(Reader_AnOlderForm_SaysWhichItWants) {
  uint32_t seed = 7;
  uint64_t bytes = 0;
  sluice_template_t *t = random_template(&seed), *read = NULL;
  unsigned char* data = written(t, &bytes);
  data[4] = 5; /* a form that had no groups */
  reseal(data, bytes);
  assert_int_equal(sluice_schedule_read(data, bytes, sluice_process_allocator(), &read), SLUICE_E_INVALID_ARGUMENT);
  assert_string_equal(last_message(), "schedule: form is 5; it must be in [9, 9]");
  free(data);
  sluice_template_destroy(t, sluice_process_allocator());
}

TEST(Json_OfATemplate_NamesItsOps) {
  uint32_t seed = 5;
  sluice_template_t* t = random_template(&seed);
  uint64_t length = sluice_schedule_write_json(t, NULL, 0);
  char* text = malloc(length + 1);
  assert_int_equal(sluice_schedule_write_json(t, text, length + 1), length);
  assert_int_equal(strlen(text), length);
  for (int32_t i = 0; i < t->num_ops; ++i) assert_non_null(strstr(text, sluice_op_name(t->ops[i].kind)));
  int64_t depth = 0;
  for (const char* p = text; *p != '\0'; ++p) {
    depth += (*p == '{' || *p == '[') - (*p == '}' || *p == ']');
    assert_true(depth >= 0);
  }
  assert_int_equal(depth, 0);
  char small[64];
  assert_int_equal(sluice_schedule_write_json(t, small, sizeof small), length); /* truncated, not overrun */
  free(text);
  sluice_template_destroy(t, sluice_process_allocator());
}
