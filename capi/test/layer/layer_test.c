// SPDX-License-Identifier: Apache-2.0
/* The layer through the public ABI, compared with a plain f64 reference over ranks, chunks, dtypes and layouts. */
#include <unistd.h>

#include "backend/base/hash.h"
#include "backend/schedule/uneven_chunks.h"
#include "capi/test/rig/refusals.h"
#include "capi/test/world/sweeps.h"
#include "third_party/bazel/test.h"

TEST(Layer_EveryActivationGatedAndBias_MatchesReference) {
  for (int32_t a = SLUICE_ACTIVATION_IDENTITY; a <= SLUICE_ACTIVATION_SWIGLU; ++a) {
    for (int32_t bits = a == SLUICE_ACTIVATION_SWIGLU; bits < 4; bits += a == SLUICE_ACTIVATION_SWIGLU ? 2 : 1) {
      case_t c = world_small_case();
      c.world_size = 2, c.num_chunks = 2, c.activation = a, c.gated = bits & 1, c.bias = bits >> 1;
      check_matches(&c);
    }
  }
}

TEST(Layer_FromItsParts_MatchesReference) {
  for (int32_t w = 1; w <= 3; ++w) {
    case_t c = world_small_case();
    c.world_size = w, c.parts = 1, c.bias = 1, c.gated = w > 1, c.drop_every = w == 2 ? 3 : 0;
    check_matches(&c);
    c.dtype = SLUICE_DTYPE_BF16, c.accumulate = 1;
    check_matches(&c);
    c.tokens[w - 1] = 0;
    check_matches(&c);
  }
}

TEST(Layer_ManyExperts_CountsOverflowTheHeader) {
  case_t c = world_small_case();
  c.world_size = 2, c.num_experts = 300, c.num_chunks = 3, c.model_width = 3, c.hidden_width = 2;
  check_matches(&c);
}

TEST(Layer_EveryExpertReady_IsSignalledOnce) {
  for (int32_t mode = 0; mode < 2; ++mode) {
    case_t c = world_small_case();
    c.world_size = 3, c.num_chunks = 3, c.wgrad_mode = mode;
    result_t got;
    world_run(&c, &got);
    for (int32_t r = 0; r < 3; ++r) assert_int_equal(got.ready[r], 4);
    world_free(&got);
  }
}

/* With gemm "ref", budget_check compares any number of chunks with one. */
TEST(Layer_AnyChunks_BitIdenticalWithNative) {
  const int32_t chunks[] = {2, 3, 7};
  const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16};
  for (size_t d = 0; d < 2; ++d) {
    case_t c = world_small_case();
    c.world_size = 3, c.dtype = dtypes[d], c.gated = 1, c.bias = 1, c.gemm = "native";
    result_t one;
    world_run(&c, &one);
    if (one.status[0] == SLUICE_E_NOT_FOUND) {
      world_free(&one);
      skip_because("gemm native is not for this processor");
    }
    for (size_t i = 0; i < 3; ++i) {
      c.num_chunks = chunks[i];
      result_t many, again;
      world_run(&c, &many);
      world_run(&c, &again);
      assert_true(world_identical(&c, &one, &many, 0));
      assert_true(world_identical(&c, &many, &again, 1)); /* two runs have the same bits, weight gradients included */
      world_free(&many);
      world_free(&again);
    }
    world_free(&one);
  }
}

/* Other memory of the layer (counts, offsets, headers, scratch) is at most a tenth of its slots and saved tensors. */
TEST(Layer_Peak_IsAtMostSlotsAndSaved) {
  for (int32_t n = 1; n <= 8; n *= 2) {
    for (int32_t x = 0; x < 2 * 2 * 2; ++x) {
      case_t c = world_small_case();
      c.world_size = 2, c.tokens[0] = c.tokens[1] = 256, c.model_width = 1024, c.hidden_width = 8, c.num_experts = 8;
      c.top_k = 1, c.num_chunks = n, c.drop_every = x & 1 ? 5 : 0, c.hot_expert = x >> 1 & 1 ? 0 : -1;
      c.wgrad_mode = x >> 2 ? SLUICE_WGRAD_PER_CHUNK : SLUICE_WGRAD_DEFERRED;
      result_t got;
      world_run(&c, &got);
      must_work(&c, &got);
      for (int32_t r = 0; r < 2; ++r) {
        uint64_t parts = got.slot_bytes[r] + got.saved_bytes[r], peak = got.peak_bytes[r];
        if (peak * 10 <= parts * 11) continue;
        fail_msg("rank %d, n %d, drop %d, hot %d, wgrad %d: peak %llu, slots %llu + saved %llu", r, n, c.drop_every,
                 c.hot_expert, c.wgrad_mode, (unsigned long long)peak, (unsigned long long)got.slot_bytes[r],
                 (unsigned long long)got.saved_bytes[r]);
      }
      world_free(&got);
    }
  }
}

/* Chunks are cut by rows (the default) or by tokens. A token's sum has the same rows in the same order. */
TEST(Layer_ChunksOfRowsOrTokens_HaveTheSameBits) {
  for (int32_t x = 0; x < 2 * 3 * 4; ++x) {
    case_t c = world_small_case();
    c.world_size = 2 + x % 2, c.num_chunks = 2 + x / 2 % 3 * 3, c.top_k = 1 + x % 3;
    c.hot_expert = x / 6 == 1 ? 4 : -1, c.drop_every = x / 6 == 2 ? 3 : 0, c.separate_wgrad = x / 6 == 3;
    c.restore = x / 6 == 3, c.wgrad_mode = x % 2, c.bias = x % 2;
    if (x / 6 == 2) c.tokens[0] = 0;
    result_t rows, tokens;
    world_run(&c, &rows);
    must_match(&c, &rows);
    c.chunking = SLUICE_CHUNKING_TOKENS;
    world_run(&c, &tokens);
    must_be_same(&c, &rows, &tokens, 0);
    must_match(&c, &tokens);
    for (int32_t r = 0; r < c.world_size; ++r) assert_int_equal(rows.bytes_sent[r], tokens.bytes_sent[r]);
    world_free(&rows);
    world_free(&tokens);
  }
}

/* If chunks are cut by rows, an expert has rows in few chunks; if they are cut by tokens, in all. The largest chunk has
 * the rows of a middle chunk (backend/schedule/uneven_chunks.h). */
TEST(Layer_ChunksOfRows_AskForFewExperts) {
  for (int32_t hot = -1; hot < 8; hot += 5) {
    for (int32_t n = 2; n <= 8; n *= 2) {
      case_t c = world_small_case();
      c.world_size = 2, c.num_experts = 16, c.num_chunks = n, c.callback_experts = 1, c.hot_expert = hot;
      c.tokens[0] = c.tokens[1] = 512;
      const double largest = n * sluice_uneven_chunk_share(n / 2, n);
      result_t rows, tokens;
      world_run(&c, &rows);
      c.chunking = SLUICE_CHUNKING_TOKENS;
      world_run(&c, &tokens);
      for (int32_t r = 0; r < 2; ++r) {
        assert_int_equal(tokens.calls[r], 8 * n);
        assert_in_range(rows.calls[r], 8, 8 + 2 * (n - 1)); /* two ranks, each of which cuts n - 1 times */
        assert_true((double)rows.most_rows[r] <= 1.25 * largest * (double)tokens.most_rows[r]);
      }
      world_free(&rows);
      world_free(&tokens);
    }
  }
}

/* Each of the nine pairs of policies gives the bits of the pair that keeps everything, with the same chunks. */
static void check_policies(case_t c) {
  c.chunking = SLUICE_CHUNKING_TOKENS;
  for (c.reuse_saved = 0; c.reuse_saved < 2; ++c.reuse_saved) {
    result_t kept;
    c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_KEEP;
    world_run(&c, &kept);
    must_match(&c, &kept);
    for (int p = 1; p < 9; ++p) {
      c.restore_input = p % 3, c.restore_pre_activation = world_pre_activations[p / 3];
      result_t restored;
      world_run(&c, &restored);
      must_be_same(&c, &kept, &restored, 1);
      world_free(&restored);
    }
    world_free(&kept);
  }
}

TEST(Layer_EveryRestorePolicy_HasTheBitsOfKeepingEverything) {
  const int32_t chunks[] = {1, 2, 5};
  for (int32_t w = 1; w <= 3; w += 2) {
    for (int bits = 0; bits < 8; ++bits) {
      for (size_t i = 0; i < 3; ++i) {
        case_t c = world_small_case();
        c.world_size = w, c.num_chunks = chunks[i], c.gated = bits & 1, c.bias = bits >> 1 & 1;
        c.wgrad_mode = bits >> 2 ? SLUICE_WGRAD_PER_CHUNK : SLUICE_WGRAD_DEFERRED;
        check_policies(c);
      }
    }
  }
}

TEST(Layer_RestorePolicies_WorkWithEverythingElse) {
  for (int bits = 0; bits < 32; ++bits) {
    case_t c = world_small_case();
    c.world_size = 2, c.num_chunks = 3, c.bias = 1, c.gated = bits & 1;
    c.separate_wgrad = bits >> 1 & 1, c.restore = bits >> 2 & 1, c.accumulate = bits >> 3 & 1;
    c.wgrad_mode = (bits ^ bits >> 2) & 1;
    if (bits >> 4) c.dtype = SLUICE_DTYPE_BF16, c.tokens[1] = 0, c.hot_expert = 1;
    check_policies(c);
  }
}

/* Recomputed values have the same bits with interleaved gates, all activations and all types. */
TEST(Layer_RestorePolicies_WorkWithEveryGateActivationAndType) {
  static const struct {
    int32_t gated, activation, dtype;
  } layers[] = {
      {SLUICE_GATED_INTERLEAVED, SLUICE_ACTIVATION_SWIGLU, SLUICE_DTYPE_F32},
      {SLUICE_GATED_HALVES, SLUICE_ACTIVATION_SWIGLU, SLUICE_DTYPE_F32},
      {SLUICE_GATED_INTERLEAVED, SLUICE_ACTIVATION_SILU, SLUICE_DTYPE_F16},
      {SLUICE_GATED_HALVES, SLUICE_ACTIVATION_SILU, SLUICE_DTYPE_F64},
      {SLUICE_GATED_NO, SLUICE_ACTIVATION_SILU, SLUICE_DTYPE_F32},
      {SLUICE_GATED_NO, SLUICE_ACTIVATION_GELU, SLUICE_DTYPE_F16},
      {SLUICE_GATED_NO, SLUICE_ACTIVATION_RELU, SLUICE_DTYPE_F64},
  };
  for (size_t i = 0; i < sizeof layers / sizeof layers[0]; ++i) {
    for (int bias = 0; bias < 2; ++bias) {
      case_t c = world_small_case();
      c.world_size = 2, c.num_chunks = 3, c.bias = bias;
      c.gated = layers[i].gated, c.activation = layers[i].activation, c.dtype = layers[i].dtype;
      check_policies(c);
    }
  }
}

static uint64_t digest_of(const saved_t* saved, const rig_t* rig) {
  uint64_t h = SLUICE_HASH_OF_NOTHING;
  for (int32_t i = 0; i < SLUICE_SAVED_COUNT; ++i) h = sluice_hash_bytes(h, saved->data[i], saved->bytes[i]);
  return sluice_hash_bytes(h, rig->out.tensor.data, rig->out.bytes);
}

/* Guard 6: no lane accesses the host's memory after a call has returned, so inputs may change at once and outputs no
 * longer change. (On CUDA, cuda_layer_test checks that the stream is joined.) */
TEST(Guard6_NoLaneOutlivesItsCall) {
  rig_t rig;
  sluice_moe_config_t config = rig_config();
  config.num_chunks = 6, config.restore_input = config.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
  assert_int_equal(rig_open(&rig, NULL, &config), SLUICE_OK);
  for (int round = 0; round < 20; ++round) {
    saved_t saved = {.refuse = -1};
    rig_reset(&rig);
    rig.forward.save = save, rig.forward.save_user = &saved;
    sluice_step_t* step = NULL;
    assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
    const uint64_t after = digest_of(&saved, &rig);
    memset(rig.tokens.tensor.data, 0xff, rig.tokens.bytes); /* NaN */
    usleep(500);
    assert_true(digest_of(&saved, &rig) == after);
    sluice_step_drop(step);
    free_saved(&saved); /* a late copy would be a use after free */
  }
  rig_close(&rig);
}

TEST(Layer_FiniteDifferences_MatchEveryGradient) {
  for (int32_t a = SLUICE_ACTIVATION_GELU; a <= SLUICE_ACTIVATION_SILU; ++a) {
    case_t c = world_small_case();
    c.dtype = SLUICE_DTYPE_F64, c.tokens[0] = 4, c.model_width = 3, c.hidden_width = 4, c.num_experts = 3,
    c.num_chunks = 2;
    c.activation = a, c.gated = a != SLUICE_ACTIVATION_GELU_TANH, c.bias = 1;
    check_finite_differences(&c);
  }
}

TEST(Layer_EveryGemm_MatchesReference) {
#if defined(__SANITIZE_THREAD__)
  skip_because("ThreadSanitizer: locks of libraries that are not built for it look like races");
#endif
  const char* const gemms[] = {"auto", "native", "blas", "onednn"};
  for (size_t i = 0; i < 4; ++i) {
    case_t c = world_small_case();
    c.world_size = 2, c.num_chunks = 2, c.gemm = gemms[i], c.gated = 1, c.bias = 1;
    result_t probe;
    world_run(&c, &probe);
    sluice_status_t status = probe.status[0];
    world_free(&probe);
    if (status == SLUICE_E_NOT_FOUND) {
      printf("SKIPPED: gemm \"%s\" is not installed here\n", gemms[i]);
      continue;
    }
    check_matches(&c);
  }
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1);
  const case_t base = world_small_case();
  const struct CMUnitTest rows[] = {
      SWEEP_TEST(Layer_RanksAndChunks_MatchReference, world_run, base, check_matches, sweep_ranks_and_chunks),
      SWEEP_TEST(Layer_EveryDtype_MatchesReference, world_run, base, check_matches, sweep_dtypes),
      SWEEP_TEST(Layer_AnyRoutes_MatchReference, world_run, base, check_matches, sweep_routes),
      SWEEP_TEST(Layer_AnyBatches_MatchReference, world_run, base, check_matches, sweep_batches),
      SWEEP_TEST(Layer_CallbackExperts_MatchReference, world_run, base, check_matches, sweep_callbacks),
  };
  return RUN_CASES_AFTER(rows);
}
