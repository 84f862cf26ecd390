// SPDX-License-Identifier: Apache-2.0
/* Costs of a layer's ops: sums against work computed by hand, and predictions against the closed forms. */
#include <math.h>

#include "backend/cost/cost.h"
#include "third_party/bazel/test.h"

/* One flop takes 1 ns for any number of rows; one byte takes 1 ns gathered, 2 ns exchanged, 4 ns copied. */
static sluice_machine_t plain_machine(void) {
  sluice_machine_t m;
  sluice_machine_init(&m);
  m.gemm[SLUICE_MACHINE_F32][0] = (sluice_curve_t){1, {1}, {1e-9}};
  m.rows = (sluice_curve_t){1, {1}, {1e-9}};
  m.exchange.bytes = (sluice_curve_t){1, {1}, {2e-9}};
  m.host_copy = (sluice_curve_t){1, {1}, {4e-9}};
  return m;
}

static const sluice_workload_t base_work = {.model_width = 8,
                                            .hidden_width = 32,
                                            .num_experts = 8,
                                            .top_k = 2,
                                            .gate_factor = 1,
                                            .dtype = SLUICE_DTYPE_F32,
                                            .world_size = 4,
                                            .num_tokens = 960,
                                            .skew = 1};

static int is_near(double a, double b) { return fabs(a - b) <= 1e-9 * fmax(fabs(a), fabs(b)); }

static sluice_step_prediction_t predict(const sluice_machine_t* m, const sluice_workload_t* w, sluice_choice_t c) {
  sluice_step_prediction_t p;
  assert_int_equal(sluice_predict_step(m, w, &c, &p), SLUICE_OK);
  return p;
}

/* GELU represents all activations with an exponential; relu and similar ones have their own seconds if the machine has
 * them. */
TEST(Activation_OfEachKind_TakesItsOwnSeconds) {
  static const struct {
    int32_t kind, is_plain;
  } kinds[] = {{SLUICE_ACTIVATION_IDENTITY, 1}, {SLUICE_ACTIVATION_RELU, 1},      {SLUICE_ACTIVATION_RELU2, 1},
               {SLUICE_ACTIVATION_GELU, 0},     {SLUICE_ACTIVATION_GELU_TANH, 0}, {SLUICE_ACTIVATION_SILU, 0}};
  const sluice_choice_t choice = {.num_chunks = 2};
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; ++i) {
    sluice_machine_t m = plain_machine();
    sluice_workload_t w = base_work;
    w.activation = kinds[i].kind;
    double elements = 1920.0 * 32, bare[2];
    sluice_step_prediction_t p = predict(&m, &w, choice);
    for (int d = 0; d < 2; ++d) bare[d] = p.busy[d][SLUICE_LANE_COMPUTE];
    m.activation_seconds = 8e-9, m.activation_grad_seconds = 9e-9;
    p = predict(&m, &w, choice);
    assert_true(is_near(p.busy[SLUICE_FORWARD][SLUICE_LANE_COMPUTE], bare[SLUICE_FORWARD] + 8e-9 * elements));
    assert_true(is_near(p.busy[SLUICE_BACKWARD][SLUICE_LANE_COMPUTE], bare[SLUICE_BACKWARD] + 9e-9 * elements));
    m.relu_seconds = 2e-9, m.relu_grad_seconds = 3e-9;
    double forward = kinds[i].is_plain ? 2e-9 : 8e-9, backward = kinds[i].is_plain ? 3e-9 : 9e-9;
    p = predict(&m, &w, choice);
    assert_true(is_near(p.busy[SLUICE_FORWARD][SLUICE_LANE_COMPUTE], bare[SLUICE_FORWARD] + forward * elements));
    assert_true(is_near(p.busy[SLUICE_BACKWARD][SLUICE_LANE_COMPUTE], bare[SLUICE_BACKWARD] + backward * elements));
  }
}

/* MPipeMoE Table II: work by lane without reuse and for S1 to S4, with gamma, a and m of one chunk. */
TEST(Busy_EveryStrategy_IsTableTwo) {
  static const struct {
    int32_t di, m;
    double forward[3], backward[3]; /* computation in GEMMs, communication in all-to-alls, copies in units of m */
  } table[] = {
      {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, {2, 2, 0}, {4, 2, 0}},
      {SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD, {2, 2, 5}, {4, 2, 5}},      /* S1: 1 + h, h = H/M = 4 */
      {SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_OFFLOAD, {2, 2, 4}, {4, 3, 4}},   /* S2 */
      {SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE, {2, 2, 1}, {5, 2, 1}},    /* S3 */
      {SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE, {2, 2, 0}, {5, 3, 0}}, /* S4 */
  };
  sluice_machine_t m = plain_machine();
  m.rows.count = 0; /* the papers do not count packing */
  const double rows = 960 * 2, gemm_seconds = rows * 2 * 8 * 32 * 1e-9, all_to_all = rows * 3 / 4 * 8 * 4 * 2e-9;
  const double copy = rows * 8 * 4 * 4e-9;
  for (size_t i = 0; i < sizeof table / sizeof table[0]; ++i) {
    for (int32_t n = 1; n <= 8; n *= 2) {
      for (int32_t mode = SLUICE_WGRAD_DEFERRED; mode <= SLUICE_WGRAD_PER_CHUNK; ++mode) {
        sluice_step_prediction_t p =
            predict(&m, &base_work, (sluice_choice_t){n, table[i].di, table[i].m, mode, n % 4 == 0});
        const double* want[2] = {table[i].forward, table[i].backward};
        for (int32_t d = 0; d < 2; ++d) {
          double copies = p.busy[d][SLUICE_LANE_COPY_OUT] + p.busy[d][SLUICE_LANE_COPY_IN];
          assert_true(is_near(p.busy[d][SLUICE_LANE_COMPUTE], want[d][0] * gemm_seconds));
          assert_true(is_near(p.busy[d][SLUICE_LANE_COMM], want[d][1] * all_to_all));
          assert_true(is_near(copies, want[d][2] * copy));
        }
      }
    }
  }
}

TEST(Forward_NoCopiesReusingSlots_IsMPMoEsPhases) {
  sluice_machine_t m = plain_machine();
  for (int32_t n = 1; n <= 16; ++n) {
    sluice_choice_t c = {n, SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE, SLUICE_WGRAD_PER_CHUNK, 1};
    double got = predict(&m, &base_work, c).seconds[SLUICE_FORWARD];
    double overhead = sluice_pass_overhead(&m, &base_work, SLUICE_FORWARD);
    assert_true(is_near(got - overhead, sluice_mpmoe_seconds(&m, &base_work, &c, SLUICE_FORWARD)));
  }
}

static void set_share(sluice_machine_t* m, int32_t lane, int32_t others, double share) {
  m->share[lane][1 << lane | others] = share;
}

/* alpha(y, x) and alpha(y, all) of the machine, forward with copies out and backward with copies in. */
TEST(Alphas_OfAMachine_AreItsShares) {
  enum { COMP = 1 << SLUICE_LANE_COMPUTE, COMM = 1 << SLUICE_LANE_COMM };
  const int32_t copies[] = {SLUICE_LANE_COPY_OUT, SLUICE_LANE_COPY_IN};
  sluice_choice_t c = {4, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD, SLUICE_WGRAD_PER_CHUNK, 1};
  for (int32_t d = SLUICE_FORWARD; d <= SLUICE_BACKWARD; ++d) {
    const sluice_machine_t quiet = plain_machine();
    sluice_machine_t m = quiet;
    const int32_t copy = copies[d], mem = 1 << copy;
    set_share(&m, SLUICE_LANE_COMM, COMP, 0.5), set_share(&m, SLUICE_LANE_COMM, mem, 0.75);
    set_share(&m, SLUICE_LANE_COMM, COMP | mem, 0.3), set_share(&m, SLUICE_LANE_COMPUTE, COMM, 0.9);
    set_share(&m, SLUICE_LANE_COMPUTE, COMM | mem, 0.85), set_share(&m, copy, COMM, 0.7);
    set_share(&m, copy, COMP | COMM, 0.6);
    const sluice_alphas_t a = sluice_alphas_of(&m, &base_work, &c, d);
    assert_true(a.alpha[SLUICE_STREAM_COMM][SLUICE_STREAM_COMP] == 0.5);
    assert_true(a.alpha[SLUICE_STREAM_COMM][SLUICE_STREAM_MEM] == 0.75);
    assert_true(a.alpha[SLUICE_STREAM_COMM][SLUICE_STREAM_ALL] == 0.3);
    assert_true(a.alpha[SLUICE_STREAM_COMP][SLUICE_STREAM_COMM] == 0.9);
    assert_true(a.alpha[SLUICE_STREAM_COMP][SLUICE_STREAM_MEM] == 1); /* unknown */
    assert_true(a.alpha[SLUICE_STREAM_COMP][SLUICE_STREAM_ALL] == 0.85);
    assert_true(a.alpha[SLUICE_STREAM_MEM][SLUICE_STREAM_COMM] == 0.7);
    assert_true(a.alpha[SLUICE_STREAM_MEM][SLUICE_STREAM_ALL] == 0.6);
    /* Both forms use them: eq. 10 is the longest stream, stretched. */
    const sluice_chunk_times_t t = sluice_chunk_times(&m, &base_work, &c, d);
    const double want = 4 * fmax((t.dispatch + t.combine) / 0.3, fmax(t.compute / 0.85, t.copy / 0.6));
    assert_true(is_near(sluice_mpipemoe_seconds(&m, &base_work, &c, d), want));
    const int32_t paradigm = d == SLUICE_FORWARD ? SLUICE_PARADIGM_COPY_AFTER : SLUICE_PARADIGM_COPY_BEFORE;
    assert_true(is_near(sluice_mpmoe_seconds(&m, &base_work, &c, d), sluice_mpmoe_pass(paradigm, 4, t, &a)));
    assert_true(sluice_mpmoe_seconds(&m, &base_work, &c, d) > sluice_mpmoe_seconds(&quiet, &base_work, &c, d));
  }
}

/* Sets the share of all lanes while copies in this direction run. */
static void set_copy_share(double (*out_share)[1 << SLUICE_NUM_LANES], int32_t copies, double share) {
  for (int32_t set = 0; set < 1 << SLUICE_NUM_LANES; ++set) {
    if (!(set >> copies & 1) || set == 1 << copies) continue;
    for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) out_share[lane][set] = set >> lane & 1 ? share : 0;
  }
}

/* With shares by the size of a copy, the predicted seconds are those of a machine with the shares of the nearest size
 * for all copies, and the forward takes those of copies out, the backward those of copies in. Without any, as in older
 * profiles, one share serves all sizes. */
TEST(CopyShares_BySizeAndDirection_TheNearestSizeApplies) {
  const double sizes[] = {1e4, 1e7}, shares[2][2] = {{0.2, 0.45}, {0.6, 0.85}}; /* by size, by direction */
  const int32_t copies[] = {SLUICE_LANE_COPY_OUT, SLUICE_LANE_COPY_IN};
  const sluice_choice_t c = {4, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD, SLUICE_WGRAD_PER_CHUNK, 1};
  sluice_machine_t m = plain_machine();
  m.num_copy_shares = 2;
  for (int32_t i = 0; i < 2; ++i) {
    m.copy_share[i].bytes = sizes[i];
    for (int32_t d = 0; d < 2; ++d) set_copy_share(m.copy_share[i].share, copies[d], shares[i][d]);
  }
  const int64_t tokens[] = {960, 960 * 1000}; /* copies of about 15 kB and 60 kB, 15 MB and 60 MB */
  for (int32_t i = 0; i < 2; ++i) {
    sluice_workload_t w = base_work;
    w.num_tokens = tokens[i];
    const sluice_machine_t alone = plain_machine();
    const sluice_step_prediction_t got = predict(&m, &w, c), quiet = predict(&alone, &w, c);
    for (int32_t d = 0; d < 2; ++d) {
      sluice_machine_t old = plain_machine();
      set_copy_share(old.share, copies[d], shares[i][d]);
      assert_true(got.seconds[d] == predict(&old, &w, c).seconds[d]);
      assert_true(got.seconds[d] > 1.01 * quiet.seconds[d]);
      const sluice_alphas_t a = sluice_alphas_of(&m, &w, &c, d);
      assert_true(a.alpha[SLUICE_STREAM_COMP][SLUICE_STREAM_MEM] == shares[i][d]);
      /* If no share is given for the size, the share for all sizes applies. */
      set_copy_share(old.share, copies[d], 0.5);
      old.num_copy_shares = 1, old.copy_share[0] = (sluice_copy_share_t){.bytes = sizes[i]};
      const double without = predict(&old, &w, c).seconds[d];
      old.num_copy_shares = 0;
      assert_true(without == predict(&old, &w, c).seconds[d]);
    }
  }
}

/* If contention was measured by size, it gives alpha of an exchange and of concurrent computation. */
TEST(Alphas_OfMeasuredContention_GoByTheSizeOfAChunk) {
  sluice_machine_t m = plain_machine();
  m.rows.count = 0, m.world_size = base_work.world_size;
  const sluice_choice_t c = {2, SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE, SLUICE_WGRAD_PER_CHUNK, 1};
  const double bytes = sluice_rows_of(&base_work, &c).out * 8 * 4;
  const double alone = sluice_machine_exchange(&m, base_work.world_size, bytes);
  m.exchange_contention = (sluice_curve_t){1, {bytes}, {alone}};    /* twice as long */
  m.compute_contention = (sluice_curve_t){1, {bytes}, {alone / 2}}; /* a quarter of the doubled time */
  const sluice_alphas_t a = sluice_alphas_of(&m, &base_work, &c, SLUICE_FORWARD);
  assert_true(is_near(a.alpha[SLUICE_STREAM_COMM][SLUICE_STREAM_COMP], 0.5));
  assert_true(is_near(a.alpha[SLUICE_STREAM_COMP][SLUICE_STREAM_COMM], 0.75));
}

TEST(Rows_Skewed_GrowOnTheFullestRankUpToAllOfThem) {
  sluice_workload_t w = base_work;
  const sluice_choice_t c = {4, 0, 0, 0, 0};
  w.chunking = SLUICE_CHUNKING_TOKENS;
  assert_true(sluice_rows_of(&w, &c).received == 480 && sluice_rows_of(&w, &c).per_expert == 240);
  w.skew = 2;
  assert_true(sluice_rows_of(&w, &c).received == 960 && sluice_rows_of(&w, &c).sent == 480);
  w.skew = 100; /* 4 ranks x 240 tokens x both routes to its two experts */
  assert_true(sluice_rows_of(&w, &c).received == 1920);
  sluice_machine_t m = plain_machine();
  assert_true(predict(&m, &w, c).seconds[0] > predict(&m, &base_work, c).seconds[0]);
}

/* The bytes between the fullest rank and the mean count as exchange_skew_gain says. */
TEST(Exchange_SkewedRows_CountBetweenTheFullestRankAndAll) {
  sluice_workload_t w = base_work;
  sluice_machine_t m = plain_machine();
  m.rows.count = 0;
  const sluice_choice_t c = {1, 0, 0, 0, 0};
  double even = predict(&m, &w, c).busy[0][SLUICE_LANE_COMM];
  w.skew = 2;
  static const double gains[] = {0, 0.25, 1};
  for (int i = 0; i < 3; ++i) {
    m.exchange_skew_gain = gains[i];
    assert_true(is_near(predict(&m, &w, c).busy[0][SLUICE_LANE_COMM], even * (2 - gains[i])));
  }
}

static double relative(double got, double want) { return fabs(got / want - 1); }

TEST(Deduplicated_RowsOnTheWire_AreDistinctRanksOfATokenUnderUniformRouting) {
  /* All ways to choose K = 3 of E = 6 experts on W = 3 ranks, counted. */
  sluice_workload_t w = base_work;
  w.num_experts = 6, w.top_k = 3, w.world_size = 3, w.deduplicate = 1;
  double ranks = 0, ways = 0;
  for (int a = 0; a < 6; ++a) {
    for (int b = a + 1; b < 6; ++b) {
      for (int c = b + 1; c < 6; ++c) {
        ++ways;
        for (int r = 0; r < 3; ++r) ranks += a / 2 == r || b / 2 == r || c / 2 == r;
      }
    }
  }
  assert_true(relative(sluice_ranks_per_token(&w), ranks / ways) < 1e-12);
  const sluice_choice_t two = {.num_chunks = 2};
  sluice_chunk_rows_t rows = sluice_rows_of(&w, &two);
  assert_true(relative(rows.out, (double)w.num_tokens / 2 * ranks / ways * 2 / 3) < 1e-12);
  assert_true(rows.in == rows.out && rows.sent_remote > rows.out);
  w.skew = 100; /* every token of the other two ranks, once */
  assert_true(sluice_rows_of(&w, &two).in == (double)w.num_tokens / 2 * 2);
  w.skew = 1, w.top_k = 6; /* every rank gets every token */
  assert_true(relative(sluice_ranks_per_token(&w), 3) < 1e-12);
  w.deduplicate = 0;
  assert_true(sluice_rows_of(&w, &two).out == sluice_rows_of(&w, &two).sent_remote);
  w.top_k = 1;
  assert_true(relative(sluice_ranks_per_token(&w), 1) < 1e-12);
}

TEST(TwoLevels_RowsOfEachLevel_AreCounted) {
  /* All ways to choose K = 3 of E = 8 experts on two nodes of two ranks, of a token on rank 0. */
  sluice_workload_t w = base_work;
  w.num_experts = 8, w.top_k = 3, w.world_size = 4, w.ranks_per_node = 2, w.deduplicate = SLUICE_DEDUPLICATE_NODES;
  double between = 0, nodes = 0, ranks = 0, ways = 0;
  for (int a = 0; a < 8; ++a) {
    for (int b = a + 1; b < 8; ++b) {
      for (int c = b + 1; c < 8; ++c) {
        ++ways;
        for (int r = 0; r < 4; ++r) ranks += a / 2 == r || b / 2 == r || c / 2 == r;
        for (int v = 0; v < 2; ++v) nodes += a / 4 == v || b / 4 == v || c / 4 == v;
        between += a / 4 == 1 || b / 4 == 1 || c / 4 == 1;
      }
    }
  }
  const sluice_choice_t two = {.num_chunks = 2};
  const sluice_chunk_rows_t rows = sluice_rows_of(&w, &two);
  const double tokens = (double)w.num_tokens / 2;
  assert_true(relative(rows.between, tokens * between / ways) < 1e-12);
  assert_true(relative(rows.returned, tokens * nodes / ways) < 1e-12);
  assert_true(relative(rows.passed_on, tokens * ranks / ways) < 1e-12);
  assert_true(relative(rows.out, tokens * ranks / ways / 2) < 1e-12); /* half of the forwarded rows stay */
  w.top_k = 1;
  assert_true(!sluice_workload_has_two_levels(&w) && sluice_rows_of(&w, &two).between == 0);
  w.top_k = 3, w.ranks_per_node = 4;
  assert_true(!sluice_workload_has_two_levels(&w));
}

TEST(StartUps_GrowWithN_AndSmallChunksLoseGemmSpeed) {
  sluice_machine_t m = plain_machine();
  m.exchange.startup_seconds = 1e-4;
  m.op_seconds = 1e-6;
  double before = 0;
  for (int32_t n = 1; n <= 16; n *= 2) { /* communication is far cheaper than computation: more chunks only add cost */
    sluice_step_prediction_t p = predict(&m, &base_work, (sluice_choice_t){n, 0, 0, 0, 0});
    assert_true(p.busy[0][SLUICE_LANE_COMM] > before);
    before = p.busy[0][SLUICE_LANE_COMM];
  }
  m.gemm[SLUICE_MACHINE_F32][0] = (sluice_curve_t){2, {1, 1000}, {100e-9, 1e-9}};
  double whole = predict(&m, &base_work, (sluice_choice_t){1, 0, 0, 0, 0}).busy[0][SLUICE_LANE_COMPUTE];
  double rows = predict(&m, &base_work, (sluice_choice_t){16, 0, 0, 0, 0}).busy[0][SLUICE_LANE_COMPUTE];
  sluice_workload_t w = base_work;
  w.chunking = SLUICE_CHUNKING_TOKENS;
  double tokens = predict(&m, &w, (sluice_choice_t){16, 0, 0, 0, 0}).busy[0][SLUICE_LANE_COMPUTE];
  assert_true(rows > whole * 1.05 && tokens > rows * 1.05);
}

/* Seconds of an op that begins a walk. */
static double seconds_of(const sluice_machine_t* m, const sluice_choice_t* c, const sluice_op_t* op) {
  sluice_pass_costs_t state;
  const sluice_op_costs_t costs = sluice_pass_costs(&state, m, &base_work, c, SLUICE_FORWARD);
  return costs.seconds(costs.user, op);
}

/* The first and the last chunk have half the rows of the others (uneven_chunks.h), and together the chunks have every
 * row once. */
TEST(ChunksOfRows_Ends_TakeHalf) {
  sluice_machine_t m = plain_machine();
  const sluice_choice_t four = {4, 0, 0, 0, 0}, tokens = {4, 0, 0, 0, 1};
  const int32_t kinds[] = {SLUICE_OP_DISPATCH, SLUICE_OP_COMBINE, SLUICE_OP_GEMM1, SLUICE_OP_GEMM1_GRAD};
  for (size_t k = 0; k < sizeof kinds / sizeof *kinds; ++k) {
    double sum = 0, seconds[4];
    for (int32_t i = 0; i < 4; ++i) {
      const sluice_op_t op = {.kind = kinds[k], .chunk = i};
      sum += seconds[i] = seconds_of(&m, &four, &op);
    }
    assert_true(is_near(seconds[0] * 2, seconds[1]) && is_near(seconds[1], seconds[2]));
    assert_true(is_near(seconds[3] * 2, seconds[2]));
    const sluice_op_t op = {.kind = kinds[k]};
    assert_true(is_near(seconds_of(&m, &tokens, &op) * 4, sum));
  }
}

/* While one chunk returns and another departs, each direction of a link carries one of them: a pair takes the rows that
 * enter plus those that leave the fullest rank, not twice the larger number. Of four ranks the fullest has skew / 4 of
 * all rows, and that part of its own rows does not leave. */
TEST(Grouped_SkewedRows_TakeTheSumOfBothDirections) {
  const sluice_machine_t m = plain_machine();
  for (int32_t n = 3; n <= 8; ++n) {
    sluice_workload_t w = base_work;
    w.chunking = SLUICE_CHUNKING_TOKENS;
    for (w.skew = 1; w.skew <= 4; w.skew += 1) {
      const sluice_choice_t single = {.num_chunks = n}, grouped = {.num_chunks = n, .grouped = 1};
      const double one = predict(&m, &w, single).busy[SLUICE_FORWARD][SLUICE_LANE_COMM];
      const double pairs = predict(&m, &w, grouped).busy[SLUICE_FORWARD][SLUICE_LANE_COMM];
      const double row = 8 * 4 * 2e-9, sent = 960.0 / n * 2 * 3 / 4; /* to other ranks, of one chunk */
      const double leaving = (1 - w.skew / 4) / (1 - 1. / 4);        /* relative to what would leave it without skew */
      if (!is_near(pairs + (n - 2) * (2 * w.skew - (w.skew + leaving)) * sent * row, one)) {
        fail_msg("n %d, skew %g: %g less", n, w.skew, one - pairs);
      }
    }
  }
}

/* Start-ups: a pair has one for its rows, and in a backward one more for the scalars after them. */
TEST(Grouped_StartUps_AreOneForRowsAndOneForScalars) {
  sluice_machine_t m = plain_machine();
  m.exchange.bytes = (sluice_curve_t){1, {1}, {0}};
  m.rows = (sluice_curve_t){1, {1}, {0}};
  m.exchange.startup_seconds = 1;
  for (int32_t n = 1; n <= 8; ++n) {
    const sluice_choice_t grouped = {.num_chunks = n, .grouped = 1};
    const sluice_step_prediction_t p = predict(&m, &base_work, grouped);
    const int32_t pairs = n > 2 ? n - 2 : 0;
    assert_true(is_near(p.busy[SLUICE_FORWARD][SLUICE_LANE_COMM], 2 * n - pairs));
    assert_true(is_near(p.busy[SLUICE_BACKWARD][SLUICE_LANE_COMM], 2 * n));
  }
}

/* An adapter adds 2 r (M + H) to the 2 M H of each GEMM with W; each weight gradient takes 4 r (M + H), not 2 M H. */
TEST(LoraRank_Prices_LowRankProductsInPlaceOfWeightGradients) {
  const sluice_machine_t m = plain_machine();
  const sluice_choice_t choice = {.num_chunks = 2};
  sluice_workload_t w = base_work;
  double full[2], adapted[2];
  for (int d = 0; d < 2; ++d) full[d] = predict(&m, &w, choice).busy[d][SLUICE_LANE_COMPUTE];
  w.lora_rank = 2;
  for (int d = 0; d < 2; ++d) adapted[d] = predict(&m, &w, choice).busy[d][SLUICE_LANE_COMPUTE];
  const double part = 2.0 * (8 + 32) / (8 * 32);                     /* of one GEMM with W */
  const double gemms = full[SLUICE_BACKWARD] - full[SLUICE_FORWARD]; /* two more than a forward: those of dW */
  assert_true(is_near(adapted[SLUICE_FORWARD] - full[SLUICE_FORWARD], gemms * part));
  assert_true(is_near(full[SLUICE_BACKWARD] - adapted[SLUICE_BACKWARD], gemms * (1 - part - 1.5 * part)));
}
