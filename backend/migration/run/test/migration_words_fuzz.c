// SPDX-License-Identifier: Apache-2.0
/* Control messages and chunks of a migration. Rank 1 of three moves to a new epoch, and the input chooses what the
 * other two send: correct announcements, handshakes and chunks, refusals, damaged messages and arbitrary bytes. If the
 * move commits, the received bytes are those sent for it; if not, the host's memory is unchanged. No call waits.
 *
 * Input: a byte of what this rank does (refuses, reads early, marks still), a byte of how many messages come before the
 * early read, then messages: a byte with peer and kind, and the bytes of that kind. */
#include <string.h>

#include "backend/comm/test/said.h"
#include "backend/migration/protocol.h"
#include "backend/migration/run/wire.h"
#include "sluice/migration.h"
#include "third_party/fuzz/target.h"

enum { WORLD = 3, RANK = 1, ARRIVING = 5000, LEAVING = 300, CHUNK = 4096, MOST_BYTES = 600 };
enum { ANNOUNCES = 0, IS_READY, AGREES, REFUSES, SENDS_CHUNK, SAYS_ANYTHING, ENDS, SENDS_DAMAGED };

#define EPOCH UINT64_C(7)

static said_t said;
static uint8_t from_0[ARRIVING], from_2[ARRIVING], to_0[LEAVING], to_2[LEAVING];
static sluice_move_word_t announced[WORLD]; /* the announcement that this rank has sent to each */
static int32_t num_chunks[WORLD];           /* sent by each peer, correct or damaged */
static uint32_t kinds[WORLD];               /* a bit for each kind that a peer has sent */

static uint8_t right[WORLD][ARRIVING], untouched[ARRIVING];

static void fill(void) {
  memset(untouched, 0xee, sizeof untouched);
  for (int32_t i = 0; i < WORLD * ARRIVING; ++i) right[i / ARRIVING][i % ARRIVING] = (uint8_t)(i * 13 + 3);
}

/* Whether both peers have sent their chunks and a message of this kind. */
static int has_all(uint32_t kind) {
  return num_chunks[0] == 2 && num_chunks[2] == 2 && (kinds[0] & kinds[2] & 1u << kind) != 0;
}

/* A peer's announcement has the hashes of this rank's, exchanged. The other ranks leave once no more of them is needed
 * or can come, so that later waits fail at once. */
static void hear(said_t* s, const sluice_outgoing_t* out) {
  sluice_move_word_t word;
  if (out->frame.tag != SLUICE_MOVE_WORD_TAG || out->frame.head_bytes != sizeof word) return;
  memcpy(&word, out->head, sizeof word);
  if (word.kind == SLUICE_MOVE_WORD_ANNOUNCE) announced[out->peer] = word;
  const int is_last = out->peer == WORLD - 1;
  if (is_last && word.kind == SLUICE_MOVE_SAY_READY && !has_all(IS_READY)) said_all_leave(s);
  if (is_last && (word.kind == SLUICE_MOVE_SAY_AGREE || word.kind == SLUICE_MOVE_SAY_REFUSE)) said_all_leave(s);
}

static void say_word(int32_t peer, const sluice_move_word_t* word) {
  said_message(&said, peer, SLUICE_MOVE_WORD_TAG, word, sizeof *word, NULL, 0);
}

/* Sends the peer's next chunk. The item's id is the peer's number. XORs byte `at` of the head, if there is one. */
static void say_chunk(int32_t peer, size_t at, uint8_t with) {
  const uint64_t offset = (uint64_t)num_chunks[peer] * CHUNK;
  if (offset >= ARRIVING) return;
  const uint64_t bytes = ARRIVING - offset < CHUNK ? ARRIVING - offset : CHUNK;
  sluice_move_chunk_head_t head = {.magic = SLUICE_MOVE_MAGIC, .epoch = EPOCH, .item = (uint64_t)peer, .bytes = bytes};
  if (at < sizeof head) ((uint8_t*)&head)[at] ^= with;
  said_message(&said, peer, sluice_move_chunk_tag(SLUICE_MIGRATION_STILL), &head, sizeof head, right[peer] + offset,
               bytes);
  ++num_chunks[peer];
}

/* Sends the next message of the input. Returns the number of bytes that it takes. */
static size_t say_next(const uint8_t* data, size_t size) {
  const int32_t peer = (data[0] & 1) != 0 ? 2 : 0;
  const size_t room = size - 1;
  sluice_move_word_t word = {.magic = SLUICE_MOVE_MAGIC, .epoch = EPOCH};
  kinds[peer] |= 1u << (data[0] >> 1 & 7);
  switch (data[0] >> 1 & 7) {
    case ANNOUNCES:
      word.kind = SLUICE_MOVE_WORD_ANNOUNCE;
      word.leaves = announced[peer].arrives, word.arrives = announced[peer].leaves;
      say_word(peer, &word);
      return 1;
    case IS_READY: word.kind = SLUICE_MOVE_SAY_READY, say_word(peer, &word); return 1;
    case AGREES: word.kind = SLUICE_MOVE_SAY_AGREE, say_word(peer, &word); return 1;
    case REFUSES:
      word.kind = SLUICE_MOVE_SAY_REFUSE;
      word.status = room > 0 ? data[1] : 0, word.rank = room > 1 ? (int8_t)data[2] : 0;
      memset(word.reason, 'r', sizeof word.reason); /* without a terminator */
      say_word(peer, &word);
      return 1 + (room < 2 ? room : 2);
    case SENDS_CHUNK: say_chunk(peer, MOST_BYTES, 0); return 1;
    case SENDS_DAMAGED:
      say_chunk(peer, room > 0 ? data[1] : 0, room > 1 ? data[2] : 1);
      return 1 + (room < 2 ? room : 2);
    case ENDS: {
      const sluice_frame_t frame = {.kind = (data[0] & 16) != 0 ? SLUICE_FRAME_LOST : SLUICE_FRAME_LEAVES,
                                    .tag = room > 0 ? data[1] : 0};
      said_frame(&said, peer, &frame);
      return 1 + (room < 1 ? room : 1);
    }
    default: { /* any head, over a valid message or alone, with any tag */
      const size_t bytes = room > 3 ? (size_t)data[1] | (size_t)(data[2] & 3) << 8 : 0;
      const size_t head = bytes < room - 3 ? bytes : room > 3 ? room - 3 : 0;
      if (room <= 3) return size;
      word.kind = data[3] & 31;
      memcpy(&word, data + 4, head < sizeof word ? head : sizeof word);
      const uint64_t tag = (data[0] & 32) != 0 ? (uint64_t)data[3] : SLUICE_MOVE_WORD_TAG;
      const uint64_t whole = (data[0] & 16) != 0 ? sizeof word : head < SLUICE_MESSAGE_MAX_HEAD_BYTES ? head : 0;
      uint8_t raw[SLUICE_MESSAGE_MAX_HEAD_BYTES] = {0};
      memcpy(raw, (data[0] & 16) != 0 ? (const uint8_t*)&word : data + 4, whole);
      said_message(&said, peer, tag, raw, whole, data + 4, (data[0] & 64) != 0 ? head : 0);
      return 4 + head;
    }
  }
}

static void check(sluice_status_t status) {
  int is_in_place = 1, is_untouched = 1;
  for (int32_t peer = 0; peer < WORLD; peer += 2) {
    const uint8_t* place = peer == 0 ? from_0 : from_2;
    is_in_place &= memcmp(place, right[peer], ARRIVING) == 0;
    is_untouched &= memcmp(place, untouched, ARRIVING) == 0;
  }
  if (status == SLUICE_OK) FUZZ_CHECK(is_in_place);
  if (status != SLUICE_OK) FUZZ_CHECK(is_untouched);
  fuzz_num_taken += status == SLUICE_OK;
}

static sluice_status_t move(sluice_migration_t* m, const uint8_t* data, size_t size) {
  const sluice_migration_span_t in[] = {{from_0, ARRIVING, SLUICE_MIGRATION_STILL, 0},
                                        {from_2, ARRIVING, SLUICE_MIGRATION_STILL, 0}};
  const sluice_migration_span_t out[] = {{to_0, LEAVING, SLUICE_MIGRATION_STILL, 0},
                                         {to_2, LEAVING, SLUICE_MIGRATION_AT_COMMIT, 0}};
  const sluice_migration_item_t items[] = {{0, 0, SLUICE_MIGRATION_ARRIVES, &in[0], 1, 0},
                                           {2, 2, SLUICE_MIGRATION_ARRIVES, &in[1], 1, 0},
                                           {8, 0, SLUICE_MIGRATION_LEAVES, &out[0], 1, 0},
                                           {9, 2, SLUICE_MIGRATION_LEAVES, &out[1], 1, 0}};
  const int32_t does = data[0], early = data[1];
  size_t at = 2;
  int32_t is_there;
  if (sluice_migration_begin(m, EPOCH, items, 4) != SLUICE_OK) return SLUICE_E_PEER_REFUSED;
  for (int32_t i = 0; i < early && at < size; ++i) at += say_next(data + at, size - at);
  if ((does & 2) != 0) {
    uint8_t copy[ARRIVING];
    const sluice_migration_span_t to = {copy, ARRIVING, SLUICE_MIGRATION_STILL, 0};
    if (sluice_migration_read_early(m, 0, 0, &to, 1, &is_there) == SLUICE_OK && is_there) {
      FUZZ_CHECK(memcmp(copy, right[0], ARRIVING) == 0);
    }
  }
  if ((does & 4) != 0) (void)(sluice_migration_mark_still(m, 9, 2) == SLUICE_OK);
  while (at < size) at += say_next(data + at, size - at);
  if (!has_all(ANNOUNCES)) said_all_leave(&said);
  return sluice_migration_commit(m, (does & 1) != 0 ? "has no room" : NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sluice_migration_t* m;
  const sluice_migration_config_t config = {.struct_size = sizeof config, .chunk_bytes = CHUNK};
  if (size < 2) return 0;
  said_init(&said, RANK, WORLD, UINT64_C(50000));
  said.heard = hear;
  if (untouched[0] == 0) fill();
  memcpy(from_0, untouched, ARRIVING), memcpy(from_2, untouched, ARRIVING);
  memset(announced, 0, sizeof announced), memset(num_chunks, 0, sizeof num_chunks);
  memset(kinds, 0, sizeof kinds);
  FUZZ_CHECK(sluice_migration_create(&said.base, &config, &m) == SLUICE_OK);
  const sluice_status_t status = move(m, data, size);
  check(status);
  if (status != SLUICE_OK) {
    uint64_t epoch;
    (void)(sluice_migration_settle(m, NULL, &epoch) == SLUICE_OK);
  }
  sluice_migration_destroy(m);
  sluice_comm_release(&said.base);
  return 0;
}
