#include "backend/cost/closed_forms.h"

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

double sluice_mpipemoe_pass(int32_t n, sluice_chunk_times_t t) {
  return n * max3(t.dispatch + t.combine, t.compute, t.copy);
}
