// SPDX-License-Identifier: Apache-2.0
/* Fuzzes heads, tables and lists between stages: rank 1 of three runs batches of two micro-batches. The input defines
 * what its peers send: valid activations, gradients, ends of batches, stops, wait notes and orders, damaged ones, and
 * any bytes. A successful batch has received exactly what was sent; every other batch fails, and no call blocks.
 *
 * Input: the policy and what callbacks do; the number of messages before the first batch; then messages, each beginning
 * with a byte for peer and kind. The remaining ones are sent when this rank runs its first forward. The peers leave
 * when this rank has reported the end of the last batch, or stops a batch, or waits. */
#include <string.h>

#include "backend/comm/test/said.h"
#include "backend/pipeline/policy.h"
#include "backend/pipeline/run/wire.h"
#include "sluice/pipeline.h"
#include "third_party/fuzz/target.h"

enum { WORLD = 3, RANK = 1, MICRO_BATCHES = 2, ELEMENTS = 6, BATCHES = 2 };
enum { SENDS_TENSORS = 0, IS_DONE, STOPS, IS_WAITING, ORDERS, SENDS_DAMAGED, SAYS_ANYTHING, ENDS };

static const sluice_pipeline_batch_t batch = {.struct_size = sizeof batch, .num_micro_batches = MICRO_BATCHES};
static said_t said;
static sluice_pipeline_t* pipeline;
static const uint8_t* input;
static size_t input_left;
static int32_t num_sent[WORLD]; /* tensors that each peer sent, valid or not */
static uint64_t program;        /* of this rank's batches, as it told the others */
static int32_t is_clean;        /* only messages that a stage can send were sent */
static int32_t does, num_wrong;
static int64_t shape[] = {ELEMENTS};
static float result[ELEMENTS];
static volatile uint8_t touched;

typedef struct payload_s {
  sluice_tensor_t tensor;
  int64_t shape;
  uint8_t gap[8];
  float data[16];
} payload_t;

static float element(int32_t peer, int32_t number, int32_t at) { return (float)(peer * 100 + number * 10 + at); }

/* ---- what the peers send ---- */

static sluice_stage_head_t head_of(int32_t kind, int32_t number) {
  return (sluice_stage_head_t){.magic = SLUICE_STAGE_MAGIC,
                               .kind = kind,
                               .batch = (uint64_t)(1 + number / MICRO_BATCHES),
                               .program = program,
                               .num_micro_batches = MICRO_BATCHES,
                               .num_tensors = 1,
                               .about = -1,
                               .word = (uint64_t)number};
}

/* Sends the next activation from rank 0, or gradient from rank 2, with the byte at `at` of head and table changed. */
static void say_tensors(int32_t peer, size_t at, uint8_t with) {
  const int32_t number = num_sent[peer]++;
  struct {
    sluice_stage_head_t head;
    payload_t payload;
  } m;
  memset(&m, 0, sizeof m);
  const sluice_stage_op_t op = {.kind = peer == 0 ? SLUICE_STAGE_SEND_ACTIVATION : SLUICE_STAGE_SEND_GRADIENT,
                                .micro_batch = number % MICRO_BATCHES,
                                .virtual_stage = peer};
  m.head = head_of(SLUICE_STAGE_HEAD_TENSORS, number);
  m.payload.tensor = (sluice_tensor_t){
      .device_type = SLUICE_DEVICE_CPU, .ndim = 1, .type_code = SLUICE_TYPE_FLOAT, .type_bits = 32, .type_lanes = 1};
  m.payload.shape = ELEMENTS;
  for (int32_t i = 0; i < ELEMENTS; ++i) m.payload.data[i] = element(peer, number, i);
  if (at < sizeof m.head + sizeof m.payload.tensor + sizeof m.payload.shape) ((uint8_t*)&m)[at] ^= with;
  said_message(&said, peer, sluice_stage_tag(m.head.batch, &op), &m.head, sizeof m.head, &m.payload, sizeof m.payload);
}

static void say_control(int32_t peer, const void* head, uint64_t head_bytes, const void* payload, uint64_t bytes) {
  said_message(&said, peer, SLUICE_STAGE_CONTROL_TAG, head, head_bytes, payload, bytes);
}

static size_t say_anything(int32_t peer, const uint8_t* data, size_t size) {
  uint8_t head[SLUICE_MESSAGE_MAX_HEAD_BYTES] = {0};
  if (size < 4) return size;
  const size_t room = size - 4, most = data[1] < room ? data[1] : room, split = data[2] < most ? data[2] : most;
  const sluice_stage_op_t op = {.kind = peer == 0 ? SLUICE_STAGE_SEND_ACTIVATION : SLUICE_STAGE_SEND_GRADIENT,
                                .micro_batch = data[3] & 1,
                                .virtual_stage = peer};
  const sluice_stage_head_t right = head_of(data[3] >> 1 & 7, data[3] >> 4 & 3);
  const uint64_t tag = (data[0] & 16) != 0 ? sluice_stage_tag(1, &op) : SLUICE_STAGE_CONTROL_TAG;
  memcpy(head, &right, sizeof right);
  memcpy(head + ((data[0] & 32) != 0 ? 0 : sizeof right), data + 4, split);
  const size_t bytes = split + ((data[0] & 32) != 0 ? 0 : sizeof right);
  said_message(&said, peer, tag, head, bytes, data + 4 + split, most - split);
  return 4 + most;
}

/* Sends the next message; returns the number of input bytes used. */
static size_t say_next(const uint8_t* data, size_t size) {
  const int32_t peer = (data[0] & 1) != 0 ? 2 : 0, kind = data[0] >> 1 & 7;
  const uint8_t a = size > 1 ? data[1] : 0, b = size > 2 ? data[2] : 0;
  const size_t two = size < 3 ? size : 3;
  sluice_stage_head_t head = head_of(0, (data[0] >> 4 & 1) * MICRO_BATCHES);
  if (kind != SENDS_TENSORS && kind != IS_DONE && kind != IS_WAITING) is_clean = 0;
  switch (kind) {
    case SENDS_TENSORS: say_tensors(peer, SIZE_MAX, 0); return 1;
    case SENDS_DAMAGED: say_tensors(peer, a, b); return two;
    case IS_DONE: {
      const struct {
        sluice_stage_times_t times;
        double note[2];
      } done = {{0.5, 0.5, 0.5, 0.5, 8}, {1.0, 2.0}};
      head.kind = SLUICE_STAGE_HEAD_DONE;
      say_control(peer, &head, sizeof head, &done, sizeof done);
      return 1;
    }
    case STOPS: {
      struct {
        sluice_stage_head_t head;
        sluice_stage_reason_t reason;
      } stop;
      uint64_t tags[16];
      memset(&stop, 'r', sizeof stop); /* a reason without a terminator */
      stop.head = head;
      stop.head.kind = SLUICE_STAGE_HEAD_STOP;
      stop.reason.status = (int8_t)a, stop.reason.rank = (int8_t)b, stop.reason.is_final = b & 1;
      const sluice_stage_op_t op = {.kind = SLUICE_STAGE_SEND_ACTIVATION, .micro_batch = b & 1, .virtual_stage = peer};
      for (int32_t i = 0; i < 16; ++i) tags[i] = sluice_stage_tag(1, &op) + (uint64_t)(i * (b >> 4));
      say_control(peer, &stop, sizeof stop, tags, (a & 15u) * sizeof *tags);
      return two;
    }
    case IS_WAITING:
    case ORDERS:
      head.kind = kind == ORDERS ? SLUICE_STAGE_HEAD_ORDER : SLUICE_STAGE_HEAD_WAITING;
      head.about = (int8_t)a;
      say_control(peer, &head, sizeof head, NULL, 0);
      return size < 2 ? size : 2;
    case ENDS: {
      const sluice_frame_t frame = {.kind = (data[0] & 16) != 0 ? SLUICE_FRAME_LOST : SLUICE_FRAME_LEAVES, .tag = a};
      said_frame(&said, peer, &frame);
      return size < 2 ? size : 2;
    }
    default: return say_anything(peer, data, size);
  }
}

static void say(size_t most) {
  for (size_t i = 0; i < most && input_left > 0; ++i) {
    const size_t taken = say_next(input, input_left);
    input += taken, input_left -= taken;
  }
}

static void hear(said_t* s, const sluice_outgoing_t* out) {
  sluice_stage_head_t head;
  if (out->frame.head_bytes < sizeof head) return;
  memcpy(&head, out->head, sizeof head);
  const int is_last = head.kind == SLUICE_STAGE_HEAD_DONE && head.batch == BATCHES;
  if (out->peer == WORLD - 1 && (is_last || head.kind == SLUICE_STAGE_HEAD_STOP)) said_all_leave(s);
  if (head.kind == SLUICE_STAGE_HEAD_WAITING) said_all_leave(s);
}

/* ---- this rank's stage ---- */

static void check_given(int32_t peer, const sluice_stage_call_t* call, const sluice_stage_tensors_t* given) {
  if (given == NULL || given->num_tensors == 0) return;
  for (int32_t t = 0; t < given->num_tensors; ++t) { /* everything that the tensor describes must be readable */
    const sluice_tensor_t* tensor = &given->tensors[t];
    uint64_t bytes = (uint64_t)tensor->type_bits * tensor->type_lanes;
    for (int32_t d = 0; d < tensor->ndim; ++d) bytes *= (uint64_t)tensor->shape[d];
    for (uint64_t i = 0; i < bytes / 8 && tensor->data != NULL; ++i) touched ^= ((const uint8_t*)tensor->data)[i];
  }
  if (!is_clean) return;
  const int32_t number = (int32_t)given->word;
  const float* data = given->tensors[0].data;
  num_wrong += given->num_tensors != 1 || number % MICRO_BATCHES != call->micro_batch;
  for (int32_t i = 0; i < ELEMENTS; ++i) num_wrong += data[i] != element(peer, number, i);
}

static void give(sluice_stage_tensors_t* out_result) {
  static sluice_tensor_t tensor;
  tensor = (sluice_tensor_t){.data = result,
                             .device_type = SLUICE_DEVICE_CPU,
                             .ndim = 1,
                             .type_code = SLUICE_TYPE_FLOAT,
                             .type_bits = 32,
                             .type_lanes = 1,
                             .shape = shape};
  out_result->tensors = &tensor;
  out_result->num_tensors = 1;
}

static sluice_status_t forward(void* user, const sluice_stage_call_t* call, sluice_stage_tensors_t* out_result,
                               sluice_host_failure_t* out_failure) {
  void* kept = NULL;
  (void)user, (void)out_failure;
  check_given(0, call, call->input);
  if ((does & 1) != 0 && sluice_pipeline_keep(pipeline, call->input, &kept) == SLUICE_OK)
    sluice_pipeline_give_back(kept);
  say(SIZE_MAX);
  give(out_result);
  return (does & 2) != 0 && call->micro_batch == 1 ? SLUICE_E_EXTERNAL : SLUICE_OK;
}

static sluice_status_t backward(void* user, const sluice_stage_call_t* call, sluice_stage_tensors_t* out_result,
                                sluice_host_failure_t* out_failure) {
  (void)user, (void)out_failure;
  check_given(2, call, call->output_grad);
  give(out_result);
  return SLUICE_OK;
}

/* The others answer as their own stages: in a record of the handshake `stage` follows the refusal. */
static void answer(int32_t rank, void* record, uint64_t bytes) {
  if (bytes > 512) memcpy((char*)record + sizeof(sluice_refusal_t), &rank, sizeof rank);
}

static sluice_status_t open_pipeline(void) {
  static const int32_t policies[] = {SLUICE_POLICY_1F1B, SLUICE_POLICY_BACKWARD_FIRST, SLUICE_POLICY_GPIPE,
                                     SLUICE_POLICY_MESSAGE_DRIVEN};
  const sluice_pipeline_callbacks_t callbacks = {
      .struct_size = sizeof callbacks, .forward = forward, .backward = backward};
  sluice_pipeline_config_t config;
  sluice_pipeline_config_init(&config, sizeof config);
  config.policy = sluice_policy_name(policies[does >> 2 & 3]);
  config.in_flight = 2;
  said_init(&said, RANK, WORLD, UINT64_C(100000));
  said.answer = answer;
  return sluice_pipeline_create(&config, &said.base, &callbacks, NULL, &pipeline);
}

static void note_program(said_t* s, const sluice_outgoing_t* out) {
  sluice_stage_head_t head;
  if (out->frame.head_bytes >= sizeof head) {
    memcpy(&head, out->head, sizeof head);
    program = head.program;
  }
  said_all_leave(s);
}

/* Runs a batch without peers to learn the program's hash. */
static uint64_t find_program(void) {
  program = 0;
  FUZZ_CHECK(open_pipeline() == SLUICE_OK);
  said.heard = note_program;
  (void)(sluice_pipeline_run_batch(pipeline, &batch) == SLUICE_OK);
  sluice_pipeline_destroy(pipeline);
  sluice_comm_release(&said.base);
  return program;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static uint64_t programs[4];
  if (size < 2) return 0;
  does = data[0];
  input_left = 0;
  uint64_t* known = &programs[does >> 2 & 3];
  if (*known == 0) *known = find_program();
  program = *known;
  input = data + 2, input_left = size - 2;
  memset(num_sent, 0, sizeof num_sent);
  is_clean = 1, num_wrong = 0;
  FUZZ_CHECK(open_pipeline() == SLUICE_OK);
  said.heard = hear;
  say(data[1]);
  for (int32_t i = 0; i < BATCHES; ++i) {
    const sluice_status_t status = sluice_pipeline_run_batch(pipeline, &batch);
    FUZZ_CHECK(num_wrong == 0);
    fuzz_num_taken += status == SLUICE_OK;
    if (status != SLUICE_OK) break;
  }
  sluice_pipeline_destroy(pipeline);
  sluice_comm_release(&said.base);
  return 0;
}
