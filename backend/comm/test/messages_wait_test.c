/* Waits for messages over a wire that carries none. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "backend/comm/comm.h"
#include "backend/comm/messages.h"
#include "backend/comm/messages_wire.h"

#define MS UINT64_C(1000000)

/* ---- a wire whose end takes its time ----------------------------------------------------------------------------- */

typedef struct wire_s {
  sluice_wire_t base;
  atomic_int is_failing, may_end;
} wire_t;

static void pause_1ms(void) {
  const struct timespec t = {.tv_nsec = 1000000};
  nanosleep(&t, NULL);
}

static void wire_send(sluice_wire_t* wire, sluice_outgoing_t* outgoing) { (void)wire, (void)outgoing; }
static void wire_fail(sluice_wire_t* wire, int32_t culprit) {
  (void)culprit;
  wire_t* w = (wire_t*)wire;
  atomic_store(&w->is_failing, 1);
  while (!atomic_load(&w->may_end)) pause_1ms();
}
static void wire_close(sluice_wire_t* wire, int32_t is_orderly) { (void)wire, (void)is_orderly; }

static const sluice_wire_vtable_t wire_vtable = {.send = wire_send, .fail = wire_fail, .close = wire_close};

/* ---- a communicator that opens it; the other rank is a mirror ---------------------------------------------------- */

typedef struct mirror_s {
  sluice_comm_t base;
  wire_t wire;
} mirror_t;

static void mirror_destroy(sluice_comm_t* comm) { (void)comm; }
static sluice_status_t mirror_start(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                    sluice_comm_request_t** out_request) {
  memcpy(exchange->recv[1], exchange->send[1], exchange->send_bytes[1]);
  *out_request = (sluice_comm_request_t*)(void*)comm;
  return SLUICE_OK;
}
static sluice_status_t mirror_wait(sluice_comm_t* comm, sluice_comm_request_t* request, uint64_t deadline_ns,
                                   int32_t* out_peer) {
  (void)comm, (void)request, (void)deadline_ns, (void)out_peer;
  return SLUICE_OK;
}
static void mirror_abort(sluice_comm_t* comm) { (void)comm; }
static sluice_status_t mirror_open(sluice_comm_t* comm, sluice_messages_t* messages, sluice_wire_t** out_wire) {
  (void)messages;
  *out_wire = &((mirror_t*)comm)->wire.base;
  return SLUICE_OK;
}

static const sluice_comm_vtable_t mirror_vtable = {.destroy = mirror_destroy,
                                                   .exchange_start = mirror_start,
                                                   .exchange_wait = mirror_wait,
                                                   .abort = mirror_abort,
                                                   .messages_open = mirror_open};

static void mirror_init(mirror_t* mirror, uint64_t timeout_ns) {
  sluice_comm_config_t config;
  *mirror = (mirror_t){.wire.base.vtable = &wire_vtable};
  sluice_comm_config_init(&config, sizeof config);
  config.world_size = 2;
  config.timeout_ns = timeout_ns;
  sluice_comm_init_base(&mirror->base, &mirror_vtable, "mirror", &config);
}

/* ---- cases ------------------------------------------------------------------------------------------------------- */

static void* abort_it(void* messages) {
  sluice_messages_abort(messages);
  return NULL;
}

static void* end_later(void* wire) {
  for (int i = 0; i < 200; ++i) pause_1ms();
  atomic_store(&((wire_t*)wire)->may_end, 1);
  return NULL;
}

/* The deadline passes while another thread is still at work on an earlier failure: that one is returned, once it is
 * there, and never OK with nothing that came. */
static void late_while_another_failure_is_under_way(void** state) {
  (void)state;
  mirror_t mirror;
  sluice_messages_t* m;
  sluice_message_completion_t c;
  pthread_t aborter, ender;
  mirror_init(&mirror, 50 * MS);
  assert_int_equal(sluice_messages_open(&mirror.base, NULL, &m), SLUICE_OK);
  assert_int_equal(sluice_messages_receive(m, 1, 1, 1, NULL), SLUICE_OK);
  assert_int_equal(pthread_create(&aborter, NULL, abort_it, m), 0);
  while (!atomic_load(&mirror.wire.is_failing)) pause_1ms();
  assert_int_equal(pthread_create(&ender, NULL, end_later, &mirror.wire), 0);
  assert_int_equal(sluice_messages_wait(m, "a gradient", &c), SLUICE_E_ABORTED);
  pthread_join(aborter, NULL);
  pthread_join(ender, NULL);
  sluice_messages_close(m);
  sluice_comm_release(&mirror.base);
}

int main(void) {
  static const struct CMUnitTest tests[] = {
      {"Wait_DueWhileAnotherFailureIsUnderWay_ReturnsThatOne", late_while_another_failure_is_under_way},
  };
  return cmocka_run_group_tests_name("messages_wait", tests, NULL, NULL);
}
