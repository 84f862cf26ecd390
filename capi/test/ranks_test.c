/* What W ranks do when one of them refuses, differs, stays away, dies or runs out of memory: every rank gets a status
 * that names who and why, nobody hangs, nothing leaks, and the next call or a new communicator works. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "backend/base/clock.h"
#include "backend/comm/fake/fake_comm.h"
#include "backend/device/fake/fake_device.h"
#include "backend/moe/engine.h"
#include "capi/test/rig.h"

#define MS         UINT64_C(1000000)
#define PATIENT_NS (30000 * MS) /* where nothing should time out: a hang shows as TIMED_OUT */
#define SHORT_NS   (1000 * MS)  /* where the deadline is what is tested */
#define BRIEF_NS   (300 * MS)   /* where passing it is as good as any other end */
#define BOUNDED_NS (20000 * MS) /* "in bounded time", on a busy machine and under sanitizers */
#define MAX_RANKS  4
#define BAD        SLUICE_E_INVALID_ARGUMENT

/* ---- ranks as threads; checks inside them are written down, since cmocka's leave by longjmp ---- */

typedef struct play_s play_t;

typedef struct part_s {
  play_t* play;
  int32_t rank;
  int32_t world_size;
  sluice_comm_t* comm; /* what the context uses */
  sluice_comm_t* fake; /* the same, where faults are planned */
  rig_t rig;
  char failure[1024]; /* the first */
} part_t;

struct play_s {
  void (*run)(part_t* me);
  const void* scene; /* of the test */
  int32_t world_size;
  uint64_t timeout_ns;
  int32_t with_fakes;
  sluice_local_group_t* group;
  sluice_local_group_t* second; /* for after a loss */
  pthread_barrier_t barrier;    /* only where no rank can have left before */
  part_t parts[MAX_RANKS];
};

static void note(part_t* me, int line, const char* format, ...) __attribute__((format(printf, 3, 4)));
static void note(part_t* me, int line, const char* format, ...) {
  if (me->failure[0] != '\0') return;
  int used = snprintf(me->failure, sizeof me->failure, "rank %d, line %d: ", me->rank, line);
  va_list args;
  va_start(args, format);
  vsnprintf(me->failure + used, sizeof me->failure - (size_t)used, format, args);
  va_end(args);
}

#define EXPECT(condition) \
  if (!(condition)) note(me, __LINE__, "%s (last error: %s)", #condition, last_message())
#define STATUS(call, status, text) expect_status(me, __LINE__, #call, (call), (status), (text))
#define WORKS(call)                STATUS(call, SLUICE_OK, "")

static void expect_status(part_t* me, int line, const char* call, sluice_status_t got, sluice_status_t want,
                          const char* text) {
  const char* message = got == SLUICE_OK ? "" : last_message();
  if (got == want && (want == SLUICE_OK || strstr(message, text) != NULL)) return;
  note(me, line, "%s gave %s \"%s\", want %s naming \"%s\"", call, sluice_status_name(got), message,
       sluice_status_name(want), text);
}

static sluice_comm_t* make_comm(part_t* me, sluice_local_group_t* group, uint64_t timeout_ns) {
  sluice_comm_config_t config;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = me->rank, config.world_size = me->world_size, config.timeout_ns = timeout_ns;
  sluice_comm_t* comm = NULL;
  WORKS(sluice_comm_create_local(group, &config, &comm));
  return comm;
}

static void* part_main(void* argument) {
  part_t* me = argument;
  me->comm = make_comm(me, me->play->group, me->play->timeout_ns);
  if (me->play->with_fakes) {
    sluice_comm_t* inner = me->comm;
    WORKS(sluice_fake_comm_create(inner, &me->fake));
    sluice_comm_destroy(inner);
    me->comm = me->fake;
  }
  me->play->run(me);
  if (me->rig.context != NULL) rig_close(&me->rig);
  EXPECT(atomic_load(&me->rig.heap.live_bytes) == 0);
  EXPECT(atomic_load(&me->rig.heap.live_blocks) == 0);
  sluice_comm_destroy(me->comm);
  return NULL;
}

static void perform(play_t* play) {
  pthread_t threads[MAX_RANKS];
  if (play->timeout_ns == 0) play->timeout_ns = PATIENT_NS;
  assert_int_equal(sluice_local_group_create(play->world_size, &play->group), SLUICE_OK);
  assert_int_equal(sluice_local_group_create(play->world_size, &play->second), SLUICE_OK);
  pthread_barrier_init(&play->barrier, NULL, (unsigned)play->world_size);
  for (int32_t r = 0; r < play->world_size; ++r) {
    memset(&play->parts[r], 0, sizeof play->parts[r]);
    play->parts[r].play = play, play->parts[r].rank = r, play->parts[r].world_size = play->world_size;
    assert_int_equal(pthread_create(&threads[r], NULL, part_main, &play->parts[r]), 0);
  }
  for (int32_t r = 0; r < play->world_size; ++r) pthread_join(threads[r], NULL);
  pthread_barrier_destroy(&play->barrier);
  sluice_local_group_destroy(play->group);
  sluice_local_group_destroy(play->second);
  for (int32_t r = 0; r < play->world_size; ++r) {
    if (play->parts[r].failure[0] != '\0') fail_msg("W = %d: %s", play->world_size, play->parts[r].failure);
  }
}

static void meet(part_t* me) { pthread_barrier_wait(&me->play->barrier); }

static sluice_moe_config_t config_for(int32_t world_size) {
  sluice_moe_config_t config = rig_config();
  config.num_experts = 2 * world_size;
  return config;
}

/* The bits of a good round on this rank, and that it works at all. */
static uint64_t good_round(part_t* me, int line) {
  uint64_t digest = 0;
  expect_status(me, line, "a good round", rig_round(&me->rig, &digest), SLUICE_OK, "");
  return digest;
}

/* A new communicator in the same process, after the first was lost. */
static void check_new_comm(part_t* me, int line) {
  sluice_moe_config_t config = me->rig.config;
  sluice_comm_abort(me->comm);
  sluice_comm_abort(me->comm);
  rig_close(&me->rig);
  EXPECT(atomic_load(&me->rig.heap.live_bytes) == 0);
  sluice_comm_destroy(me->comm);
  me->comm = make_comm(me, me->play->second, PATIENT_NS);
  expect_status(me, line, "opening on a new communicator", rig_open(&me->rig, me->comm, &config), SLUICE_OK, "");
  if (me->rig.moe != NULL) (void)good_round(me, line);
}

/* ---- one rank refuses ---- */

typedef struct refusal_scene_s {
  int32_t refuser;
  int32_t kind;
} refusal_scene_t;

enum {
  REFUSE_ID,
  REFUSE_TOKENS,
  REFUSE_STRUCT,
  REFUSE_NULL_ARGS,
  REFUSE_HOST,
  REFUSE_GRAD_OUT,
  REFUSE_STEP,
  REFUSE_DONE_STEP,
  REFUSE_COUNT
};
static const char* const refusal_text[] = {"expert_ids[1, 0] is 99",
                                           "tokens",
                                           "sluice_moe_forward_args_t",
                                           "is NULL",
                                           "no room on the host",
                                           "grad_out",
                                           "step is NULL",
                                           "has had its backward already"};
static const sluice_status_t refusal_status[] = {BAD, BAD, SLUICE_E_ABI,  BAD, SLUICE_E_OVER_BUDGET,
                                                 BAD, BAD, SLUICE_E_STATE};

static void refusal_run(part_t* me) {
  const refusal_scene_t* scene = me->play->scene;
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  uint64_t digest = good_round(me, __LINE__);
  int64_t live = atomic_load(&me->rig.heap.live_bytes);
  rig_t* rig = &me->rig;
  sluice_step_t *step = NULL, *done = NULL;
  if (scene->kind >= REFUSE_GRAD_OUT) {
    WORKS(rig_forward(rig, &done));
    WORKS(rig_backward(rig, done));
    WORKS(rig_forward(rig, &step));
  }
  sluice_status_t status = SLUICE_OK;
  if (me->rank == scene->refuser) {
    switch (scene->kind) {
      case REFUSE_ID:
        ((int32_t*)rig->ids.tensor.data)[2] = 99;
        status = rig_forward(rig, &step);
        break;
      case REFUSE_TOKENS: rig->tokens.tensor.ndim = 3, status = rig_forward(rig, &step); break;
      case REFUSE_STRUCT: rig->forward.struct_size = 3, status = rig_forward(rig, &step); break;
      case REFUSE_NULL_ARGS: status = sluice_moe_forward(rig->moe, NULL, NULL, &step); break;
      case REFUSE_HOST:
        rig->forward.local_status = SLUICE_E_OVER_BUDGET, rig->forward.local_message = refusal_text[REFUSE_HOST];
        status = rig_forward(rig, &step);
        break;
      case REFUSE_GRAD_OUT: rig->grad_out.tensor.type_bits = 64, status = rig_backward(rig, step); break;
      case REFUSE_STEP: status = rig_backward(rig, NULL); break;
      default: status = rig_backward(rig, done); break;
    }
    STATUS(status, refusal_status[scene->kind], refusal_text[scene->kind]);
  } else {
    char who[32];
    snprintf(who, sizeof who, "rank %d refused its", scene->refuser);
    status = scene->kind >= REFUSE_GRAD_OUT ? rig_backward(rig, step) : rig_forward(rig, &step);
    STATUS(status, SLUICE_E_PEER_REFUSED, who);
    EXPECT(strstr(last_message(), refusal_text[scene->kind]) != NULL);
    EXPECT(strstr(last_message(), sluice_status_name(refusal_status[scene->kind])) != NULL);
    EXPECT(last_peer() == scene->refuser);
  }
  if (scene->kind >= REFUSE_GRAD_OUT) { /* nobody's step was used up */
    rig_reset(rig);
    WORKS(rig_backward(rig, step));
  }
  sluice_step_drop(step);
  sluice_step_drop(done);
  EXPECT(atomic_load(&rig->heap.live_bytes) == live);
  EXPECT(good_round(me, __LINE__) == digest);
}

static void Ranks_OneRefuses_OthersNameItAndGoOn(void** state) {
  (void)state;
  for (int32_t w = 2; w <= 3; ++w) {
    for (int32_t kind = 0; kind < REFUSE_COUNT; ++kind) {
      const refusal_scene_t scene = {.refuser = kind % w, .kind = kind};
      play_t play = {.run = refusal_run, .scene = &scene, .world_size = w};
      perform(&play);
    }
  }
}

static void two_refuse_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  sluice_step_t* step = NULL;
  if (me->rank > 0) me->rig.forward.expert_ids = NULL;
  STATUS(rig_forward(&me->rig, &step), me->rank > 0 ? BAD : SLUICE_E_PEER_REFUSED, "expert_ids");
  if (me->rank == 0) EXPECT(last_peer() == 1);
  (void)good_round(me, __LINE__);
}

static void Ranks_SeveralRefuse_EachKeepsItsOwnReason(void** state) {
  (void)state;
  play_t play = {.run = two_refuse_run, .world_size = 3};
  perform(&play);
}

/* ---- ranks differ ---- */

typedef struct differ_scene_s {
  const char* name; /* of the field, as the message spells it */
  size_t offset;    /* in the config */
  int32_t is_wide;
  int64_t common, other; /* 'other' on rank 1 */
  int32_t says_values;
} differ_scene_t;

static void set_field(sluice_moe_config_t* config, const differ_scene_t* scene, int64_t x) {
  int32_t narrow = (int32_t)x;
  if (scene->is_wide) {
    memcpy((char*)config + scene->offset, &x, sizeof x);
  } else {
    memcpy((char*)config + scene->offset, &narrow, sizeof narrow);
  }
}

static void differ_run(part_t* me) {
  const differ_scene_t* scene = me->play->scene;
  sluice_moe_config_t common = config_for(me->world_size);
  set_field(&common, scene, scene->common);
  sluice_moe_config_t mine = common;
  if (me->rank == 1) set_field(&mine, scene, scene->other);
  WORKS(rig_open(&me->rig, me->comm, &mine));
  for (int repeat = 0; repeat < 2; ++repeat) { /* and it stays so: the communicator is usable */
    sluice_step_t* step = NULL;
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_MISMATCH, scene->name);
    EXPECT(step == NULL);
    char ranks[2][16], values[2][32];
    snprintf(ranks[0], sizeof ranks[0], "rank %d", me->rank);
    snprintf(ranks[1], sizeof ranks[1], "rank %d", me->rank == 1 ? 0 : 1);
    EXPECT(strstr(last_message(), ranks[0]) != NULL && strstr(last_message(), ranks[1]) != NULL);
    EXPECT(last_peer() == (me->rank == 1 ? 0 : 1));
    snprintf(values[0], sizeof values[0], "%lld", (long long)scene->common);
    snprintf(values[1], sizeof values[1], "%lld", (long long)scene->other);
    if (scene->says_values)
      EXPECT(strstr(last_message(), values[0]) != NULL && strstr(last_message(), values[1]) != NULL);
  }
  WORKS(rig_swap_layer(&me->rig, &common));
  (void)good_round(me, __LINE__);
}

#define FIELD(member, label, common, other) \
  { label, offsetof(sluice_moe_config_t, member), sizeof(((sluice_moe_config_t*)0)->member) == 8, common, other, 1 }

static void Ranks_DifferentConfigs_AreNamedWithValues(void** state) {
  (void)state;
  static const differ_scene_t scenes[] = {
      FIELD(model_width, "model_width", 5, 6),
      FIELD(hidden_width, "hidden_width", 7, 8),
      FIELD(num_experts, "num_experts", 6, 3),
      FIELD(top_k, "top_k", 2, 1),
      FIELD(dtype, "dtype", SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16),
      FIELD(activation, "activation", SLUICE_ACTIVATION_GELU, SLUICE_ACTIVATION_SILU),
      FIELD(gated, "gated", 1, 0),
      FIELD(bias, "bias", 1, 0),
      FIELD(num_chunks, "num_chunks", 2, 3),
      FIELD(num_chunks, "num_chunks", 1, 0), /* chosen here, given there */
      FIELD(wgrad_mode, "wgrad_mode", SLUICE_WGRAD_DEFERRED, SLUICE_WGRAD_PER_CHUNK),
      FIELD(callback_experts, "hidden_width", 0, 1), /* callbacks have no hidden width: that shows first */
      FIELD(deduplicate, "deduplicate", 0, 1),
      FIELD(layer_id, "layer", 3, 17),
  };
  for (size_t i = 0; i < sizeof scenes / sizeof scenes[0]; ++i) {
    play_t play = {.run = differ_run, .scene = &scenes[i], .world_size = 3};
    perform(&play);
  }
}

static void table_run(part_t* me) {
  static const int32_t one[] = {0, 0, 0, 1}, two[] = {0, 1, 1, 1};
  sluice_moe_config_t config = config_for(2);
  config.expert_rank = me->rank == 0 ? one : two;
  WORKS(rig_open(&me->rig, me->comm, &config));
  sluice_step_t* step = NULL;
  STATUS(rig_forward(&me->rig, &step), SLUICE_E_MISMATCH, "expert_rank");
  config.expert_rank = one;
  WORKS(rig_swap_layer(&me->rig, &config));
  (void)good_round(me, __LINE__);
}

static void Ranks_DifferentOwnerTables_AreNamed(void** state) {
  (void)state;
  play_t play = {.run = table_run, .world_size = 2};
  perform(&play);
}

/* Rank 0 keeps something for a backward, rank 1 does not; then one wants parameter gradients, the other does not. */
static void wishes_run(part_t* me) {
  sluice_moe_config_t config = config_for(2);
  WORKS(rig_open(&me->rig, me->comm, &config));
  sluice_step_t* step = NULL;
  me->rig.forward.needs_backward = me->rank == 0;
  STATUS(rig_forward(&me->rig, &step), SLUICE_E_MISMATCH, "needs_backward");
  me->rig.forward.needs_backward = 1;
  WORKS(rig_forward(&me->rig, &step));
  if (me->rank == 0) me->rig.backward.grad_params = NULL;
  STATUS(rig_backward(&me->rig, step), SLUICE_E_MISMATCH, "wanted gradients");
  me->rig.backward.grad_params = &me->rig.grad_table;
  me->rig.backward.halves = me->rank == 0 ? SLUICE_HALF_INPUT : SLUICE_HALF_BOTH;
  STATUS(rig_backward(&me->rig, step), SLUICE_E_MISMATCH, "halves");
  me->rig.backward.halves = SLUICE_HALF_BOTH;
  WORKS(rig_backward(&me->rig, step));
  sluice_step_drop(step);
}

static void Ranks_DifferentWishes_AreNamed(void** state) {
  (void)state;
  play_t play = {.run = wishes_run, .world_size = 2};
  perform(&play);
}

static void order_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  uint64_t digest = good_round(me, __LINE__);
  sluice_moe_t *first = me->rig.moe, *second = NULL;
  config.layer_id = 4;
  WORKS(sluice_moe_create(me->rig.context, &config, &second));
  for (int call = 0; call < 2; ++call) {
    sluice_step_t* step = NULL;
    me->rig.moe = (call == 0) == (me->rank == 0) ? first : second;
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_MISMATCH, "layer 3, forward");
    EXPECT(strstr(last_message(), "layer 4, forward") != NULL && strstr(last_message(), "same order") != NULL);
  }
  me->rig.moe = first;
  EXPECT(good_round(me, __LINE__) == digest);
  me->rig.moe = second;
  EXPECT(good_round(me, __LINE__) == digest);
  me->rig.moe = first;
  sluice_moe_destroy(second);
}

static void Ranks_LayersInDifferentOrder_AreNamed(void** state) {
  (void)state;
  for (int32_t w = 2; w <= 3; ++w) {
    play_t play = {.run = order_run, .world_size = w};
    perform(&play);
  }
}

static void crossed_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  uint64_t digest = good_round(me, __LINE__);
  sluice_step_t *step = NULL, *extra = NULL;
  rig_reset(&me->rig);
  WORKS(rig_forward(&me->rig, &step));
  sluice_status_t status = me->rank == 0 ? rig_forward(&me->rig, &extra) : rig_backward(&me->rig, step);
  STATUS(status, SLUICE_E_MISMATCH, "layer 3, forward");
  EXPECT(strstr(last_message(), "layer 3, backward") != NULL && extra == NULL);
  WORKS(rig_backward(&me->rig, step));
  sluice_step_drop(step);
  EXPECT(good_round(me, __LINE__) == digest);
}

static void Ranks_ForwardAgainstBackward_AreNamed(void** state) {
  (void)state;
  for (int32_t w = 2; w <= 3; ++w) {
    play_t play = {.run = crossed_run, .world_size = w};
    perform(&play);
  }
}

/* ---- a rank stays away, leaves, or is called off ---- */

static void absent_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  (void)good_round(me, __LINE__);
  me->comm->timeout_ns = SHORT_NS; /* from here on: what comes before takes as long as it takes */
  meet(me);
  if (me->rank != 1) {
    sluice_step_t* step = NULL;
    uint64_t begin = sluice_now_ns();
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_TIMED_OUT, "rank 1");
    uint64_t waited = sluice_now_ns() - begin;
    EXPECT(last_peer() == 1);
    EXPECT(waited >= SHORT_NS * 9 / 10 && waited < BOUNDED_NS);
    EXPECT(strstr(last_message(), "header of layer 3, forward") != NULL);
    begin = sluice_now_ns();
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_TIMED_OUT, "no longer usable");
    EXPECT(sluice_now_ns() - begin < SHORT_NS);
  }
  meet(me);
  check_new_comm(me, __LINE__);
}

static void Ranks_OneStaysAway_IsNamedAtTheDeadline(void** state) {
  (void)state;
  for (int32_t w = 2; w <= 4; ++w) {
    play_t play = {.run = absent_run, .world_size = w};
    perform(&play);
  }
}

/* Rank 1 calls the layer once less than the others and leaves. */
static void leaver_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  (void)good_round(me, __LINE__);
  if (me->rank == 1) {
    rig_close(&me->rig);
    sluice_comm_destroy(me->comm);
    me->comm = NULL;
    meet(me);
  } else {
    sluice_step_t* step = NULL;
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_PEER_LOST, "rank 1");
    EXPECT(last_peer() == 1);
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_PEER_LOST, "no longer usable");
    meet(me);
  }
  check_new_comm(me, __LINE__);
}

static void Ranks_OneLeaves_OthersAreToldAtOnce(void** state) {
  (void)state;
  for (int32_t w = 2; w <= 3; ++w) {
    play_t play = {.run = leaver_run, .world_size = w};
    perform(&play);
  }
}

static void* abort_soon(void* argument) {
  usleep(100000);
  sluice_comm_abort(argument);
  return NULL;
}

static void called_off_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  (void)good_round(me, __LINE__);
  meet(me);
  if (me->rank == 0) {
    pthread_t thread;
    sluice_step_t* step = NULL;
    uint64_t begin = sluice_now_ns();
    EXPECT(pthread_create(&thread, NULL, abort_soon, me->comm) == 0);
    STATUS(rig_forward(&me->rig, &step), SLUICE_E_ABORTED, "");
    EXPECT(sluice_now_ns() - begin < BOUNDED_NS);
    pthread_join(thread, NULL);
  }
  meet(me);
  check_new_comm(me, __LINE__);
}

static void Ranks_AbortFromAnotherThread_EndsTheWait(void** state) {
  (void)state;
  play_t play = {.run = called_off_run, .world_size = 2};
  perform(&play);
}

/* ---- a rank dies in each phase ---- */

typedef struct death_scene_s {
  sluice_fake_fault_t fault;
  int32_t deduplicate;
  int32_t struck; /* out */
} death_scene_t;

static sluice_status_t whole_step(part_t* me) {
  sluice_step_t* step = NULL;
  sluice_status_t status = rig_forward(&me->rig, &step);
  if (status == SLUICE_OK) status = rig_backward(&me->rig, step);
  sluice_step_drop(step);
  return status;
}

/* A start that fails is told to all at once. A rank that fails in a wait whose messages have all passed just stays
 * away: that shows at the deadline; where messages are missing, it gives up as one that waited in vain for them. */
static int is_loss(sluice_status_t status, int in_wait) {
  return status == SLUICE_E_PEER_LOST || (in_wait && status == SLUICE_E_TIMED_OUT);
}

static void death_run(part_t* me) {
  death_scene_t* scene = (death_scene_t*)(uintptr_t)me->play->scene;
  sluice_moe_config_t config = config_for(me->world_size);
  config.deduplicate = scene->deduplicate;
  WORKS(rig_open(&me->rig, me->comm, &config));
  if (me->rank == 1) sluice_fake_comm_inject(me->fake, &scene->fault);
  uint64_t begin = sluice_now_ns();
  sluice_status_t status = whole_step(me);
  int in_wait = scene->fault.on == SLUICE_FAKE_WAIT;
  if (me->rank == 1 && status != SLUICE_OK) {
    EXPECT(is_loss(status, in_wait));
    scene->struck = 1;
  }
  /* The last exchange of a step may be complete elsewhere when it fails here: then the next header tells. */
  if (status == SLUICE_OK) status = whole_step(me);
  meet(me);
  if (scene->struck) {
    if (me->rank != 1) {
      EXPECT(is_loss(status, in_wait));
      EXPECT(last_peer() == 1 || in_wait);
    }
    EXPECT(sluice_now_ns() - begin < BOUNDED_NS);
    check_new_comm(me, __LINE__);
  } /* else the fault lay beyond the first step: the test is over */
}

static void Ranks_OneDiesInEachPhase_OthersNameIt(void** state) {
  (void)state;
  for (int32_t form = 0; form < 3; ++form) { /* two ranks, three, and two that deduplicate */
    int32_t w = form == 1 ? 3 : 2;
    for (int32_t on = SLUICE_FAKE_START; on <= SLUICE_FAKE_WAIT; ++on) {
      uint64_t nth = 0;
      for (int struck = 1; struck; ++nth) {
        death_scene_t scene = {
            .fault = {.on = on, .action = SLUICE_FAKE_FAIL, .nth = nth, .status = SLUICE_E_PEER_LOST, .peer = 1},
            .deduplicate = form == 2};
        play_t play = {.run = death_run, .scene = &scene, .world_size = w, .with_fakes = 1};
        if (on == SLUICE_FAKE_WAIT) play.timeout_ns = BRIEF_NS;
        perform(&play);
        struck = scene.struck && nth < 40;
      }
      /* n = 2: header, 2 dispatches, 2 combines; header, twice rows and scalars each way. Deduplicated, slots after the
       * header and scalars with each dispatch as well. */
      assert_in_range(nth, form == 2 ? 13 : 10, 30);
    }
  }
}

/* ---- a callback fails ---- */

static void callback_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  config.callback_experts = 1;
  WORKS(rig_open(&me->rig, me->comm, &config));
  uint64_t digest = good_round(me, __LINE__);
  for (int in_backward = 0; in_backward < 2; ++in_backward) {
    sluice_step_t *step = NULL, *other = NULL;
    rig_reset(&me->rig);
    if (in_backward) WORKS(rig_forward(&me->rig, &step));
    me->rig.callback_failure = me->rank == 1 ? 42 : 0;
    sluice_status_t status = in_backward ? rig_backward(&me->rig, step) : rig_forward(&me->rig, &step);
    if (me->rank == 1) {
      STATUS(status, SLUICE_E_FOREIGN, "it returned 42");
    } else {
      WORKS(status);
    }
    /* The next header tells, whatever call that is. */
    me->rig.callback_failure = 0;
    status = in_backward || me->rank == 1 ? rig_forward(&me->rig, &other) : rig_backward(&me->rig, step);
    if (me->rank == 1) {
      STATUS(status, SLUICE_E_FOREIGN, "an earlier pass failed on this rank");
    } else {
      STATUS(status, SLUICE_E_PEER_REFUSED, "rank 1 refused");
      EXPECT(strstr(last_message(), "it returned 42") != NULL && last_peer() == 1);
    }
    sluice_step_drop(step);
    sluice_step_drop(other);
    EXPECT(good_round(me, __LINE__) == digest);
  }
}

static void Ranks_CallbackFails_OthersLearnAtTheNextHeader(void** state) {
  (void)state;
  for (int32_t w = 2; w <= 3; ++w) {
    play_t play = {.run = callback_run, .world_size = w};
    perform(&play);
  }
}

/* ---- a device fails ---- */

typedef struct device_scene_s {
  int32_t on;
  uint64_t nth;   /* of the ops (or passes) of one training step */
  int32_t beyond; /* out: there is no such op */
} device_scene_t;

static void device_run(part_t* me) {
  device_scene_t* scene = (device_scene_t*)(uintptr_t)me->play->scene;
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  sluice_device_t* fake = NULL;
  WORKS(sluice_fake_device_create(me->rig.context->device, &fake));
  me->rig.context->device = fake;
  uint64_t digest = good_round(me, __LINE__);
  const sluice_fake_submit_t* submits = NULL;
  uint64_t per_step = sluice_fake_device_submits(fake, &submits);
  uint64_t limit = scene->on == SLUICE_FAKE_DEVICE_BEGIN ? 2 : per_step;
  /* An exchange fails by its communicator: that is another test. */
  int is_exchange = scene->on == SLUICE_FAKE_DEVICE_JOB && scene->nth < limit && submits[scene->nth].run_on_failure;
  if (me->rank == 0) scene->beyond = scene->nth >= limit;
  if (scene->nth >= limit || is_exchange) return;
  sluice_fake_device_fault_t fault = {.on = scene->on, .nth = limit + scene->nth, .status = SLUICE_E_NO_MEMORY};
  if (me->rank == 1) sluice_fake_device_inject(fake, &fault);

  rig_reset(&me->rig);
  sluice_status_t status = whole_step(me);
  if (me->rank == 1) STATUS(status, SLUICE_E_NO_MEMORY, "failed on command");
  sluice_step_t* step = NULL;
  if (me->rank == 1 || status == SLUICE_OK) status = rig_forward(&me->rig, &step);
  if (scene->on == SLUICE_FAKE_DEVICE_JOB) { /* the exchanges ran on: nothing is lost */
    STATUS(status, me->rank == 1 ? SLUICE_E_NO_MEMORY : SLUICE_E_PEER_REFUSED, "failed on command");
    if (me->rank != 1) EXPECT(last_peer() == 1);
    EXPECT(good_round(me, __LINE__) == digest);
  } else { /* it could not take part in the payload */
    STATUS(status, me->rank == 1 ? SLUICE_E_ABORTED : SLUICE_E_PEER_LOST, "");
    if (me->rank != 1) EXPECT(last_peer() == 1);
    meet(me);
    check_new_comm(me, __LINE__);
  }
}

static void Ranks_NthOpOfADeviceFails_OthersAreTold(void** state) {
  (void)state;
  for (int32_t on = SLUICE_FAKE_DEVICE_BEGIN; on <= SLUICE_FAKE_DEVICE_JOB; ++on) {
    for (int32_t w = 2; w <= 3; ++w) {
      device_scene_t scene = {.on = on};
      for (; !scene.beyond && scene.nth < 100; ++scene.nth) {
        play_t play = {.run = device_run, .scene = &scene, .world_size = w};
        perform(&play);
      }
      assert_in_range(scene.nth, on == SLUICE_FAKE_DEVICE_BEGIN ? 3 : 20, 99);
    }
  }
}

/* ---- steps ---- */

enum { NUM_STEPS = 4 };

static uint64_t hash_outputs(const part_t* me) {
  const rig_tensor_t* all[] = {&me->rig.grad_tokens, &me->rig.grad_weights, &me->rig.grads[0][0], &me->rig.grads[2][1]};
  uint64_t h = 1;
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
    const unsigned char* p = all[i]->tensor.data;
    for (uint64_t b = 0; b < all[i]->bytes; ++b) h = (h ^ p[b]) * 0x100000001b3u;
  }
  return h;
}

/* Inputs of step s: the routes move on by s. */
static void set_inputs(part_t* me, int32_t s) {
  rig_reset(&me->rig);
  for (int64_t i = 0; i < me->rig.num_tokens * me->rig.config.top_k; ++i) {
    int32_t* id = (int32_t*)me->rig.ids.tensor.data + i;
    *id = (*id + s) % me->rig.config.num_experts;
  }
  for (int64_t i = 0; i < me->rig.num_tokens * me->rig.config.model_width; ++i) {
    ((float*)me->rig.tokens.tensor.data)[i] += (float)s;
  }
}

static void outstanding_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  config.wgrad_mode = SLUICE_WGRAD_DEFERRED; /* left open, steps may take turns between two orders of sums */
  WORKS(rig_open(&me->rig, me->comm, &config));
  uint64_t one_by_one[NUM_STEPS];
  for (int32_t s = 0; s < NUM_STEPS; ++s) {
    set_inputs(me, s);
    WORKS(whole_step(me));
    one_by_one[s] = hash_outputs(me);
  }
  int64_t live = atomic_load(&me->rig.heap.live_bytes);
  sluice_step_t* steps[NUM_STEPS] = {NULL};
  for (int32_t s = 0; s < NUM_STEPS; ++s) {
    set_inputs(me, s);
    WORKS(rig_forward(&me->rig, &steps[s]));
  }
  for (int32_t s = NUM_STEPS - 1; s >= 0; --s) {
    set_inputs(me, s);
    if (s != 1) { /* this one is dropped without a backward */
      WORKS(rig_backward(&me->rig, steps[s]));
      EXPECT(hash_outputs(me) == one_by_one[s]);
    }
    sluice_step_drop(steps[s]);
  }
  EXPECT(atomic_load(&me->rig.heap.live_bytes) == live);
  /* Steps that outlive their layer and context. */
  set_inputs(me, 0);
  sluice_step_t* last = NULL;
  WORKS(rig_forward(&me->rig, &last));
  sluice_moe_destroy(me->rig.moe);
  sluice_context_destroy(me->rig.context);
  me->rig.moe = NULL, me->rig.context = NULL;
  sluice_step_drop(last);
  rig_close(&me->rig);
}

static void Steps_SeveralOutstanding_AnyOrderOfBackward(void** state) {
  (void)state;
  for (int32_t w = 1; w <= 3; ++w) {
    play_t play = {.run = outstanding_run, .world_size = w};
    perform(&play);
  }
}

/* ---- memory ---- */

typedef struct starve_scene_s {
  int64_t nth;
  int32_t halves_apart;
  int32_t deduplicate;
  int32_t struck; /* out */
} starve_scene_t;

#define STARVED(status) ((status) == SLUICE_E_NO_MEMORY && strstr(last_message(), "refused") != NULL)

/* One rank alone: the nth allocation fails wherever it is; the same call then works. */
static void starve_alone_run(part_t* me) {
  starve_scene_t* scene = (starve_scene_t*)(uintptr_t)me->play->scene;
  sluice_moe_config_t config = config_for(1);
  rig_t* rig = &me->rig;
  memset(rig, 0, sizeof *rig);
  heap_init(&rig->heap);
  atomic_store(&rig->heap.fail_at, scene->nth);
  rig->world_size = 1;
  sluice_context_config_t context_config;
  sluice_context_config_init(&context_config, sizeof context_config);
  context_config.gemm = "ref";
  context_config.allocate = heap_allocate, context_config.release = heap_release,
  context_config.allocate_user = &rig->heap;
  int failures = 0;
#define TRY(call)                     \
  do {                                \
    sluice_status_t status_ = (call); \
    if (status_ != SLUICE_OK) {       \
      EXPECT(STARVED(status_));       \
      ++failures;                     \
      WORKS(call);                    \
    }                                 \
  } while (0)
  TRY(sluice_context_create(&context_config, NULL, &rig->context));
  TRY(sluice_context_trace(rig->context, 16));
  TRY(rig_open_layer(rig, &config));
  sluice_step_t* step = NULL;
  TRY(rig_forward(rig, &step));
  if (scene->halves_apart) {
    rig->backward.halves = SLUICE_HALF_INPUT;
    TRY(rig_backward(rig, step));
    rig->backward.halves = SLUICE_HALF_WEIGHT;
  }
  TRY(rig_backward(rig, step));
#undef TRY
  sluice_step_drop(step);
  EXPECT(failures <= 1);
  scene->struck = failures;
  atomic_store(&rig->heap.fail_at, -1);
  uint64_t digest = good_round(me, __LINE__);
  EXPECT(good_round(me, __LINE__) == digest);
}

static void OneRank_NthAllocationFails_LeaksNothingAndRetries(void** state) {
  (void)state;
  for (int32_t apart = 0; apart < 2; ++apart) {
    starve_scene_t scene = {.halves_apart = apart, .struck = 1};
    for (; scene.struck && scene.nth < 200; ++scene.nth) {
      scene.struck = 0;
      play_t play = {.run = starve_alone_run, .scene = &scene, .world_size = 1};
      perform(&play);
    }
    assert_in_range(scene.nth, 10, 199);
  }
}

/* Of two, rank 0 starves in the nth allocation of its passes. */
static void starve_pair_run(part_t* me) {
  starve_scene_t* scene = (starve_scene_t*)(uintptr_t)me->play->scene;
  sluice_moe_config_t config = config_for(2);
  config.deduplicate = scene->deduplicate;
  WORKS(rig_open(&me->rig, me->comm, &config));
  if (me->rank == 0) atomic_store(&me->rig.heap.fail_at, atomic_load(&me->rig.heap.calls) + scene->nth);
  uint64_t begin = sluice_now_ns();
  sluice_step_t* step = NULL;
  sluice_status_t status = rig_forward(&me->rig, &step);
  if (status == SLUICE_OK) status = rig_backward(&me->rig, step);
  sluice_step_drop(step);
  if (me->rank == 0) {
    if (status != SLUICE_OK) EXPECT(STARVED(status));
    scene->struck = status != SLUICE_OK;
  }
  atomic_store(&me->rig.heap.fail_at, -1);
  int lost = status == SLUICE_E_PEER_LOST;
  if (me->rank == 1 && status != SLUICE_OK && !lost) STATUS(status, SLUICE_E_PEER_REFUSED, "rank 0 refused");
  EXPECT(sluice_now_ns() - begin < BOUNDED_NS);
  meet(me);
  if (me->rank == 1) scene->struck |= lost ? 2 : 0;
  meet(me);
  if (scene->struck & 2) { /* it had agreed to send rows and could not: the group was given up */
    check_new_comm(me, __LINE__);
  } else {
    (void)good_round(me, __LINE__);
  }
}

static void TwoRanks_NthAllocationFails_NobodyHangs(void** state) {
  (void)state;
  for (int32_t deduplicate = 0; deduplicate < 2; ++deduplicate) {
    starve_scene_t scene = {.deduplicate = deduplicate, .struck = 1};
    for (; scene.struck && scene.nth < 200; ++scene.nth) {
      scene.struck = 0;
      play_t play = {.run = starve_pair_run, .scene = &scene, .world_size = 2};
      perform(&play);
    }
    assert_in_range(scene.nth, 8 + deduplicate, 199);
  }
}

/* ---- bytes ---- */

/* What the trace and the counters say against what the communicator was given, headers left out. */
static void traffic_run(part_t* me) {
  const int32_t* deduplicate = me->play->scene;
  sluice_moe_config_t config = config_for(me->world_size);
  config.deduplicate = *deduplicate;
  WORKS(rig_open(&me->rig, me->comm, &config));
  WORKS(sluice_context_trace(me->rig.context, 64));
  WORKS(whole_step(me));
  const sluice_fake_call_t* calls = NULL;
  uint64_t num_calls = sluice_fake_comm_calls(me->fake, &calls), on_wire = 0;
  for (uint64_t i = 0; i < num_calls; ++i) on_wire += calls[i].op == SLUICE_FAKE_START ? calls[i].send_bytes : 0;
  on_wire -= UINT64_C(2) * 1024 * ((uint64_t)me->world_size - 1);
  sluice_trace_event_t events[64];
  int64_t count = 0;
  WORKS(sluice_context_take_trace(me->rig.context, events, 64, &count));
  uint64_t traced = 0, tables = 0;
  for (int64_t i = 0; i < count; ++i) {
    traced += events[i].bytes;
    if (strcmp(events[i].op, "pass") == 0) tables += events[i].bytes;
  }
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  WORKS(sluice_context_get_stats(me->rig.context, 0, &stats));
  EXPECT(on_wire > 0 && traced == on_wire && stats.bytes_sent == on_wire);
  EXPECT((tables > 0) == *deduplicate);
}

static void Trace_BytesOfAStep_AreThoseOnTheWire(void** state) {
  (void)state;
  for (int32_t deduplicate = 0; deduplicate < 2; ++deduplicate) {
    play_t play = {.run = traffic_run, .scene = &deduplicate, .world_size = 3, .with_fakes = 1};
    perform(&play);
  }
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1);
  alarm(880);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Ranks_OneRefuses_OthersNameItAndGoOn),
      cmocka_unit_test(Ranks_SeveralRefuse_EachKeepsItsOwnReason),
      cmocka_unit_test(Ranks_DifferentConfigs_AreNamedWithValues),
      cmocka_unit_test(Ranks_DifferentOwnerTables_AreNamed),
      cmocka_unit_test(Ranks_DifferentWishes_AreNamed),
      cmocka_unit_test(Ranks_LayersInDifferentOrder_AreNamed),
      cmocka_unit_test(Ranks_ForwardAgainstBackward_AreNamed),
      cmocka_unit_test(Ranks_OneStaysAway_IsNamedAtTheDeadline),
      cmocka_unit_test(Ranks_OneLeaves_OthersAreToldAtOnce),
      cmocka_unit_test(Ranks_AbortFromAnotherThread_EndsTheWait),
      cmocka_unit_test(Ranks_OneDiesInEachPhase_OthersNameIt),
      cmocka_unit_test(Ranks_CallbackFails_OthersLearnAtTheNextHeader),
      cmocka_unit_test(Ranks_NthOpOfADeviceFails_OthersAreTold),
      cmocka_unit_test(Steps_SeveralOutstanding_AnyOrderOfBackward),
      cmocka_unit_test(OneRank_NthAllocationFails_LeaksNothingAndRetries),
      cmocka_unit_test(TwoRanks_NthAllocationFails_NobodyHangs),
      cmocka_unit_test(Trace_BytesOfAStep_AreThoseOnTheWire),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
