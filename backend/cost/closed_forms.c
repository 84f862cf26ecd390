#include "backend/cost/closed_forms.h"

#include <math.h>

static double max3(double a, double b, double c) { return fmax(a, fmax(b, c)); }

static double one_chunk(int32_t paradigm, sluice_chunk_times_t t) {
  switch (paradigm) {
    case SLUICE_PARADIGM_COPY_AFTER: return t.dispatch + t.compute + fmax(t.combine, t.copy);
    case SLUICE_PARADIGM_COPY_BEFORE: return fmax(t.dispatch, t.copy) + t.compute + t.combine;
    default: return t.dispatch + t.compute + t.combine;
  }
}

double sluice_mpmoe_pass(int32_t paradigm, int32_t n, sluice_chunk_times_t t) {
  if (n == 1) return one_chunk(paradigm, t);
  double s = t.dispatch, c = t.compute, r = t.combine, x = t.copy, middle = (double)n - 2;
  switch (paradigm) {
    case SLUICE_PARADIGM_COPY_AFTER: return s + fmax(s, c) + middle * max3(s + r, c, x) + max3(r, c, x) + fmax(r, x);
    case SLUICE_PARADIGM_COPY_BEFORE: return fmax(s, x) + max3(s, c, x) + middle * max3(s + r, c, x) + fmax(r, c) + r;
    default: return s + fmax(s, c) + middle * fmax(s + r, c) + fmax(r, c) + r;
  }
}

double sluice_mpipemoe_pass(int32_t n, sluice_chunk_times_t t) {
  return n * max3(t.dispatch + t.combine, t.compute, t.copy);
}
