#include "backend/tune/closed_forms.h"

static double max2(double a, double b) { return a > b ? a : b; }
static double max3(double a, double b, double c) { return max2(a, max2(b, c)); }

static double one_chunk(int32_t paradigm, sluice_chunk_times_t t) {
  switch (paradigm) {
    case SLUICE_PARADIGM_COPY_AFTER: return t.dispatch + t.compute + max2(t.combine, t.copy);
    case SLUICE_PARADIGM_COPY_BEFORE: return max2(t.dispatch, t.copy) + t.compute + t.combine;
    default: return t.dispatch + t.compute + t.combine;
  }
}

double sluice_mpmoe_pass(int32_t paradigm, int32_t n, sluice_chunk_times_t t) {
  if (n == 1) return one_chunk(paradigm, t);
  double s = t.dispatch, c = t.compute, r = t.combine, x = t.copy, middle = (double)n - 2;
  switch (paradigm) {
    case SLUICE_PARADIGM_COPY_AFTER: return s + max2(s, c) + middle * max3(s + r, c, x) + max3(r, c, x) + max2(r, x);
    case SLUICE_PARADIGM_COPY_BEFORE: return max2(s, x) + max3(s, c, x) + middle * max3(s + r, c, x) + max2(r, c) + r;
    default: return s + max2(s, c) + middle * max2(s + r, c) + max2(r, c) + r;
  }
}

double sluice_tapered_pass(int32_t n, sluice_chunk_times_t t) {
  if (n < 3) return sluice_mpmoe_pass(SLUICE_PARADIGM_NO_COPIES, n, t);
  double whole = (double)n / (n - 1); /* a chunk in the middle, in equal chunks */
  double s = whole * t.dispatch, c = whole * t.compute, r = whole * t.combine, seconds = s / 2 + max2(s, c / 2);
  for (int32_t i = 2; i < n; ++i) {
    seconds += max2(c, (i == 2 ? r / 2 : r) + (i == n - 1 ? s / 2 : s)); /* beside it R of i - 1 and S of i + 1 */
  }
  return seconds + max2(r, c / 2) + r / 2;
}

double sluice_mpipemoe_pass(int32_t n, sluice_chunk_times_t t) {
  return n * max3(t.dispatch + t.combine, t.compute, t.copy);
}
