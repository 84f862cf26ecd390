/* Links with and without a token bucket, made up: what is measured of them, and what a machine then predicts. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "backend/tune/burst.h"

typedef struct link_s {
  double rate, burst, tokens; /* bytes a second, and bytes */
  double noise;               /* the part of a sample that every third one takes longer */
  int32_t count;
  int64_t most_bytes;
} link_t;

static double through(link_t* l, double bytes, double pause) {
  l->tokens = fmin(l->burst, l->tokens + pause * l->rate) - bytes;
  double seconds = 5e-5 + fmax(0, -l->tokens) / l->rate;
  l->tokens = fmin(l->burst, l->tokens + seconds * l->rate);
  return l->count++ % 3 == 0 ? seconds * (1 + l->noise) : seconds;
}

static sluice_status_t pair(void* user, int64_t bytes, double pause, double out_seconds[2]) {
  link_t* l = user;
  if (bytes > l->most_bytes) l->most_bytes = bytes;
  for (int32_t i = 0; i < 2; ++i) out_seconds[i] = through(l, (double)bytes, i == 0 ? pause : 0);
  return SLUICE_OK;
}

static sluice_status_t longest(void* user, double* seconds, int32_t count) {
  (void)user, (void)seconds, (void)count;
  return SLUICE_OK;
}

/* As probes see it: small ones within the bucket, large ones at its rate. */
static sluice_machine_t probed(const link_t* l) {
  sluice_machine_t m;
  sluice_machine_init(&m);
  m.world_size = 2, m.exchange.startup_seconds = 5e-5;
  static const double bytes[] = {64, 8192, 32768, 262144, 1048576};
  for (int32_t i = 0; i < 5; ++i) {
    m.exchange.bytes.x[i] = bytes[i];
    m.exchange.bytes.y[i] = bytes[i] <= l->burst ? bytes[i] * 1e-10 : bytes[i] / l->rate;
  }
  m.exchange.bytes.count = 5;
  return m;
}

static void Burst_TokenBucket_IsFoundAndSmallExchangesCost(void** state) {
  (void)state;
  /* A millisecond of the line, and five. */
  static const double rates[] = {25e6, 125e6, 500e6, 25e6}, bursts[] = {25e3, 125e3, 500e3, 131072};
  for (int32_t i = 0; i < 4; ++i) {
    link_t link = {.rate = rates[i], .burst = bursts[i], .tokens = bursts[i], .noise = 0.5};
    sluice_machine_t m = probed(&link);
    const sluice_burst_source_t source = {pair, longest, &link};
    assert_int_equal(sluice_burst_measure(&source, 1, &m), SLUICE_OK);
    assert_true(fabs(m.exchange.burst_bytes / bursts[i] - 1) < 0.1);
    double small = sluice_machine_exchange(&m, 2, 8192) - 5e-5;
    assert_true(fabs(small / (8192 / rates[i]) - 1) < 0.05);
  }
}

static void Burst_PlainLink_ChangesNothing(void** state) {
  (void)state;
  link_t link = {.rate = 2e9, .noise = 0.1};
  sluice_machine_t m = probed(&link), before = m;
  const sluice_burst_source_t source = {pair, longest, &link};
  assert_int_equal(sluice_burst_measure(&source, 1, &m), SLUICE_OK);
  assert_true(m.exchange.burst_bytes == 0);
  for (int32_t i = 0; i < 5; ++i) assert_true(m.exchange.bytes.y[i] == before.exchange.bytes.y[i]);
}

static void Burst_SlowLinkOrLittleTime_TakesSmallerExchangesOrNone(void** state) {
  (void)state;
  link_t link = {.rate = 25e6, .burst = 25e3, .tokens = 25e3};
  sluice_machine_t m = probed(&link);
  const sluice_burst_source_t source = {pair, longest, &link};
  assert_int_equal(sluice_burst_measure(&source, 0.3, &m), SLUICE_OK);
  assert_true(link.most_bytes == 1 << 17 && fabs(m.exchange.burst_bytes / 25e3 - 1) < 0.1);
  link.count = 0, m = probed(&link);
  assert_int_equal(sluice_burst_measure(&source, 1e-3, &m), SLUICE_OK);
  assert_true(link.count == 0 && m.exchange.burst_bytes == 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Burst_TokenBucket_IsFoundAndSmallExchangesCost),
      cmocka_unit_test(Burst_PlainLink_ChangesNothing),
      cmocka_unit_test(Burst_SlowLinkOrLittleTime_TakesSmallerExchangesOrNone),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
