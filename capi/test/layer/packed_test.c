// SPDX-License-Identifier: Apache-2.0
/* Layers with packed weights have the bits of layers with the same weights decoded, in every mode. Tensors, configs and
 * ranks that do not fit are refused. */
#include <stdint.h>
#include <string.h>

#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/rig/refusals.h"

static const char* const words[] = {"plain", "mxfp4", "fp8", "int8", "int4"};

static case_t packed_case(int32_t format) {
  /* Widths are as odd as each format allows; FP8 has several blocks. */
  static const int64_t widths[][3] = {{0}, {64, 96, 0}, {161, 137, 0}, {75, 45, 32}, {70, 34, 32}};
  case_t c = world_small_case();
  c.weights = format;
  c.model_width = widths[format][0], c.hidden_width = widths[format][1];
  c.weight_block = (int32_t)widths[format][2];
  c.world_size = 2;
  return c;
}

static int is_on_cpu(void) { return case_run == world_run; }

static void check(const case_t* packed) {
  case_t decoded = *packed;
  decoded.weights_decoded = 1;
  result_t got, want;
  case_run(packed, &got);
  case_run(&decoded, &want);
  must_be_same(packed, &got, &want, 1);
  if (!(world_distance(packed, &got, &want) == 0)) fail_msg("%s: NaN", words[packed->weights]); /* NaN has bits too */
  double sum = 0;
  for (int64_t i = 0; i < packed->tokens[0] * packed->model_width; ++i) {
    sum += got.out[0][i] * got.out[0][i] + got.grad_tokens[0][i] * got.grad_tokens[0][i];
  }
  assert_true(sum > 1e-3); /* the layer has computed something */
  world_free(&got);
  world_free(&want);
}

TEST(Packed_EveryFormatGemmTypeAndGate_BitsOfTheDecodedLayer) {
  const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16};
  const int32_t gates[] = {SLUICE_GATED_NO, SLUICE_GATED_HALVES, SLUICE_GATED_INTERLEAVED};
  for (int32_t format = SLUICE_WEIGHTS_MXFP4; format <= SLUICE_WEIGHTS_INT4; ++format) {
    for (int i = 0; i < 12; i += is_on_cpu() ? 1 : 2) { /* fakes have one GEMM */
      case_t c = packed_case(format);
      c.gemm = i % 2 == 0 ? "ref" : "native";
      c.dtype = dtypes[i / 2 % 2], c.gated = gates[i / 4], c.bias = i % 3 == 0, c.num_chunks = 1 + (i + format) % 3;
      check(&c);
    }
  }
}

TEST(Packed_EveryModeOfAPass_BitsOfTheDecodedLayer) {
  for (int32_t format = SLUICE_WEIGHTS_MXFP4; format <= SLUICE_WEIGHTS_INT4; ++format) {
    for (int mode = 0; mode < 11; ++mode) {
      case_t c = packed_case(format);
      c.gemm = "native", c.gated = mode % 2 == 0 ? SLUICE_GATED_HALVES : SLUICE_GATED_NO, c.num_chunks = 3, c.bias = 1;
      switch (mode) {
        case 0: c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_OFFLOAD; break;
        case 1: c.restore_input = SLUICE_RESTORE_REDISPATCH; break;
        case 2: c.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE; break;
        case 3:
          c.restore_input = SLUICE_RESTORE_REDISPATCH, c.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
          c.wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
          break;
        case 4: c.deduplicate = SLUICE_DEDUPLICATE_RANKS; break;
        case 5: c.parts = is_on_cpu(); break; /* split calls */
        case 6: c.separate_wgrad = 1; break;
        case 7: c.restore = 1, c.grad_f32 = 1, c.accumulate = 1; break;
        case 8: c.capacity = 9; break;
        case 9: c.lora_rank = is_on_cpu() ? 3 : 0, c.gated = SLUICE_GATED_HALVES; break; /* adapters */
        default: c.num_chunks = 0, c.reuse = 1, c.restore_input = c.restore_pre_activation = -1; break;
      }
      check(&c);
    }
  }
}

/* A budget also counts the records of packed weights, so a pass stays within the budget. */
TEST(Packed_UnderABudget_WithinItAndTheBitsOfTheDecodedLayer) {
  case_t c = packed_case(SLUICE_WEIGHTS_INT8);
  c.gemm = "ref", c.gated = SLUICE_GATED_HALVES, c.num_chunks = 0;
  c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
  c.budget = (uint64_t)1 << (is_on_cpu() ? 20 : 26); /* cuBLAS has a workspace of 32 MiB */
  check(&c);
}

/* f64 layers serve finite differences. */
TEST(Packed_F64_BitsOfTheDecodedLayer) {
  for (int32_t format = SLUICE_WEIGHTS_MXFP4; format <= SLUICE_WEIGHTS_INT4; ++format) {
    case_t c = packed_case(format);
    c.dtype = SLUICE_DTYPE_F64, c.gemm = "ref", c.world_size = 1;
    check(&c);
  }
}

/* Blocks of 96 and of 128 columns have equally many scales here, so no rank finds an error by itself. */
TEST(Packed_RanksWithOtherBlocks_AreTold) {
  case_t c = packed_case(SLUICE_WEIGHTS_INT8);
  c.weight_block = 96, c.weight_block_of_1 = 128;
  result_t got;
  case_run(&c, &got);
  for (int32_t r = 0; r < c.world_size; ++r) {
    assert_int_equal(got.status[r], SLUICE_E_MISMATCH);
    if (strstr(got.message[r], "weight_block") == NULL) fail_msg("%s", got.message[r]);
  }
  world_free(&got);
}

/* ---- refusals ---------------------------------------------------------------------------------------------------- */

enum { M = 64, H = 32 };

static sluice_moe_config_t layer_config(int16_t format) {
  sluice_moe_config_t c = rig_config();
  c.model_width = M, c.hidden_width = H, c.num_experts = c.top_k = c.num_chunks = 1, c.weight_format = format;
  c.gated = c.bias = 0;
  return c;
}

TEST(Packed_ConfigsThatDoNotFit_Refused) {
  rig_t rig;
  const sluice_moe_config_t good = layer_config(SLUICE_WEIGHTS_FP8);
  WORKS(rig_open(&rig, NULL, &good));
  sluice_moe_config_t c = layer_config(9);
  refuses_layer(&rig, &c, BAD, "weight_format is 9; known are plain (0)");
#define REFUSES(format, field, value, text)                   \
  c = layer_config(SLUICE_WEIGHTS_##format), c.field = value; \
  refuses_layer(&rig, &c, BAD, text)
  REFUSES(MXFP4, hidden_width, 48, "w2: a width of 48, but mxfp4");
  REFUSES(INT4, model_width, 63, "w1: a width of 63, but int4");
  REFUSES(FP8, weight_block, 96, "blocks of 96 columns, but those of fp8");
  REFUSES(INT8, weight_block, 48, "blocks of 48 columns");
  REFUSES(PLAIN, weight_block, 32, "weight_block is 32, but weight_format is");
  REFUSES(FP8, callback_experts, 1, "but callback experts have weights");
#undef REFUSES
  rig_close(&rig);
}

typedef struct packed_s {
  uint8_t codes[H * M];
  float scales[4], gradient[H * M];
  int64_t up[2], down[2], one[2], wrong[2], strides[2];
  sluice_tensor_t w1, w2, s1, s2, g1;
} packed_t;

static sluice_tensor_t tensor(void* data, uint8_t code, uint8_t bits, int64_t* shape) {
  return (sluice_tensor_t){data, SLUICE_DEVICE_CPU, 0, 2, code, bits, 1, shape, NULL, 0};
}

static void fill(packed_t* p) {
  memset(p, 0, sizeof *p);
  p->up[0] = p->down[1] = H, p->up[1] = p->down[0] = M, p->one[0] = p->one[1] = 1;
  p->wrong[0] = 3, p->wrong[1] = p->strides[0] = 1, p->strides[1] = H;
  p->w1 = tensor(p->codes, SLUICE_TYPE_UINT, 8, p->up), p->w2 = tensor(p->codes, SLUICE_TYPE_UINT, 8, p->down);
  p->s1 = tensor(p->scales, SLUICE_TYPE_FLOAT, 32, p->one), p->s2 = tensor(p->scales, SLUICE_TYPE_FLOAT, 32, p->one);
  p->g1 = tensor(p->gradient, SLUICE_TYPE_FLOAT, 32, p->up);
}

static void reset(rig_t* rig, packed_t* p) {
  fill(p);
  rig_reset(rig);
  rig->param_table = (sluice_expert_tensors_t){
      .struct_size = sizeof rig->param_table, .w1 = &p->w1, .w2 = &p->w2, .s1 = &p->s1, .s2 = &p->s2};
  rig->grad_table = (sluice_expert_tensors_t){.struct_size = sizeof rig->grad_table};
}

TEST(Packed_TensorsThatDoNotFit_RefusedByName) {
  static packed_t p;
  rig_t rig;
  sluice_step_t* step = NULL;
  const sluice_moe_config_t config = layer_config(SLUICE_WEIGHTS_FP8);
  WORKS(rig_open(&rig, NULL, &config));
  sluice_expert_tensors_t* params = &rig.param_table;
#define REFUSE(change, text) \
  reset(&rig, &p);           \
  change;                    \
  REFUSED(rig_forward(&rig, &step), BAD, text)
  REFUSE(params->s1 = NULL, "params.s1 is NULL; weights in fp8 need codes and scales");
  REFUSE(params->w2 = NULL, "params.w2 is NULL");
  REFUSE(params->struct_size = offsetof(sluice_expert_tensors_t, s1), "params.s1 is NULL"); /* of an older caller */
  REFUSE((p.w1.type_code = SLUICE_TYPE_FLOAT, p.w1.type_bits = 32),
         "params.w1[0]: type code 2 with 32 bits; codes of fp8 are u8");
  REFUSE((p.s2.type_code = SLUICE_TYPE_BFLOAT, p.s2.type_bits = 16),
         "params.s2[0]: type code 4 with 16 bits; scales of fp8 are f32");
  REFUSE(p.w1.shape = p.down, "params.w1[0]: has [64, 32], want [32, 64]");
  REFUSE(p.s1.shape = p.wrong, "params.s1[0]: has [3, 1], want [1, 1]");
  REFUSE(p.w1.strides = p.strides, "params.w1[0]: the strides are 1, 32; packed weights lie row by row");
  REFUSE(p.w2.data = NULL, "params.w2[0]: has no data");
  REFUSE(p.s2.device_type = SLUICE_DEVICE_CUDA, "params.s2[0]: device_type is 2");
#undef REFUSE
  reset(&rig, &p);
  WORKS(rig_forward(&rig, &step));
  rig.grad_table.w1 = &p.g1;
  REFUSED(rig_backward(&rig, step), SLUICE_E_UNSUPPORTED, "grad_params.w1 is given, but weights in fp8 are frozen");
  rig.grad_table.w1 = NULL, rig.grad_table.s2 = &p.s2;
  REFUSED(rig_backward(&rig, step), SLUICE_E_UNSUPPORTED, "grad_params.s2 is given");
  rig.grad_table.s2 = NULL;
  WORKS(rig_backward(&rig, step));
  sluice_step_drop(step);
  rig_close(&rig);
}

/* Bytes of gpt-oss-20b's w1 [5760, 2880], and of shapes whose last blocks are not whole. */
TEST(WeightsBytes_EveryFormat_CodesAndScales) {
  static const struct {
    int32_t format, block, dtype;
    int64_t num_out, num_in;
    uint64_t codes, scales;
  } rows[] = {
      {SLUICE_WEIGHTS_PLAIN, 0, SLUICE_DTYPE_BF16, 5760, 2880, 2 * 5760 * 2880, 0},
      {SLUICE_WEIGHTS_PLAIN, 0, SLUICE_DTYPE_F32, 3, 5, 60, 0},
      {SLUICE_WEIGHTS_MXFP4, 0, 0, 5760, 2880, 5760 * 1440, 5760 * 90},
      {SLUICE_WEIGHTS_FP8, 0, 0, 161, 137, 161 * 137, 4 * 2 * 2},
      {SLUICE_WEIGHTS_INT8, 32, 0, 75, 45, 75 * 45, 2 * 75 * 2},
      {SLUICE_WEIGHTS_INT8, 0, 0, 75, 129, 75 * 129, 2 * 75 * 2},
      {SLUICE_WEIGHTS_INT4, 64, 0, 70, 130, 70 * 65, 2 * 70 * 3},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; ++i) {
    uint64_t codes = 0, scales = 0;
    WORKS(sluice_weights_bytes(rows[i].format, rows[i].block, rows[i].dtype, rows[i].num_out, rows[i].num_in, &codes,
                               &scales));
    assert_int_equal(codes, rows[i].codes);
    assert_int_equal(scales, rows[i].scales);
  }
  uint64_t b = 0, s = 0;
  REFUSED(sluice_weights_bytes(9, 0, 0, 8, 8, &b, &s), BAD, "weight_format is 9");
  REFUSED(sluice_weights_bytes(0, 32, 1, 8, 8, &b, &s), BAD, "weight_block is 32");
  REFUSED(sluice_weights_bytes(0, 0, 9, 8, 8, &b, &s), BAD, "dtype is");
  REFUSED(sluice_weights_bytes(1, 0, 0, 8, 48, &b, &s), BAD, "a width of 48, but mxfp4");
  REFUSED(sluice_weights_bytes(3, 48, 0, 8, 96, &b, &s), BAD, "blocks of 48 columns");
  REFUSED(sluice_weights_bytes(1, 0, 0, -1, 32, &b, &s), BAD, "num_out is -1");
  REFUSED(sluice_weights_bytes(1, 0, 0, 8, 32, NULL, &s), BAD, "out_codes is NULL");
}

/* ---- without a layer --------------------------------------------------------------------------------------------- */

TEST(Weights_QuantisedAndBack_AreNear) {
  enum { ROWS = 130, COLS = 160 };
  static const int32_t blocks[] = {0, 0, 0, 96, 0};
  static const double steps[] = {0, 1.0 / 4, 1.0 / 28, 1.0 / 250, 1.0 / 13}; /* half a step of the largest number */
  static float weight[ROWS * COLS], back[ROWS * COLS];
  static uint8_t codes[ROWS * COLS];
  static float scales[ROWS * COLS];
  for (int i = 0; i < ROWS * COLS; ++i) weight[i] = (float)((i * 37 % 101 - 50) / 50.0);
  for (int32_t format = SLUICE_WEIGHTS_MXFP4; format <= SLUICE_WEIGHTS_INT4; ++format) {
    const int is_4 = format == SLUICE_WEIGHTS_MXFP4 || format == SLUICE_WEIGHTS_INT4;
    const int64_t across[] = {0, 5, 2, 2, 2};
    int64_t shape[2] = {ROWS, COLS}, packed[2] = {ROWS, is_4 ? COLS / 2 : COLS};
    int64_t of_scales[2] = {format == SLUICE_WEIGHTS_FP8 ? 2 : ROWS, across[format]};
    const uint8_t kind = format == SLUICE_WEIGHTS_MXFP4 ? SLUICE_TYPE_UINT
                         : format == SLUICE_WEIGHTS_FP8 ? SLUICE_TYPE_FLOAT
                                                        : SLUICE_TYPE_BFLOAT;
    const uint8_t bits = format == SLUICE_WEIGHTS_MXFP4 ? 8 : format == SLUICE_WEIGHTS_FP8 ? 32 : 16;
    const sluice_tensor_t w = tensor(weight, SLUICE_TYPE_FLOAT, 32, shape);
    const sluice_tensor_t out = tensor(back, SLUICE_TYPE_FLOAT, 32, shape);
    const sluice_tensor_t c = tensor(codes, SLUICE_TYPE_UINT, 8, packed), s = tensor(scales, kind, bits, of_scales);
    WORKS(sluice_weights_quantise(format, blocks[format], &w, &c, &s));
    WORKS(sluice_weights_check(format, blocks[format], &c, &s));
    WORKS(sluice_weights_dequantise(format, blocks[format], &c, &s, &out));
    for (int i = 0; i < ROWS * COLS; ++i) {
      const double error = back[i] > weight[i] ? back[i] - weight[i] : weight[i] - back[i];
      if (!(error <= steps[format])) fail_msg("%s: %g came back as %g", words[format], weight[i], back[i]);
    }
  }
}

TEST(Weights_CallsThatDoNotFit_RefusedByName) {
  static packed_t r;
  fill(&r);
  sluice_tensor_t w = r.g1;
  REFUSED(sluice_weights_quantise(7, 0, &w, &r.w1, &r.s1), BAD, "weight format 7 is unknown");
  REFUSED(sluice_weights_quantise(SLUICE_WEIGHTS_FP8, 96, &w, &r.w1, &r.s1), BAD, "blocks of 96 columns");
  REFUSED(sluice_weights_quantise(SLUICE_WEIGHTS_FP8, 0, NULL, &r.w1, &r.s1), BAD, "weight");
  REFUSED(sluice_weights_quantise(SLUICE_WEIGHTS_FP8, 0, &w, NULL, &r.s1), BAD, "codes is NULL");
  REFUSED(sluice_weights_quantise(SLUICE_WEIGHTS_FP8, 0, &w, &r.w1, NULL), BAD, "scales is NULL");
  REFUSED(sluice_weights_quantise(SLUICE_WEIGHTS_FP8, 0, &w, &r.w2, &r.s1), BAD, "codes: has [64, 32], want [32, 64]");
  w.type_code = SLUICE_TYPE_INT;
  REFUSED(sluice_weights_dequantise(SLUICE_WEIGHTS_FP8, 0, &r.w1, &r.s1, &w), BAD, "weight: is i32");
  w.type_code = SLUICE_TYPE_FLOAT;
  w.strides = r.strides;
  REFUSED(sluice_weights_dequantise(SLUICE_WEIGHTS_FP8, 0, &r.w1, &r.s1, &w), BAD, "weight: the second stride is 32");
  r.codes[M + 3] = 0x7f;
  REFUSED(sluice_weights_check(SLUICE_WEIGHTS_FP8, 0, &r.w1, &r.s1), BAD, "the fp8 code of row 1, column 3 is 0x7f");
  REFUSED(sluice_weights_check(SLUICE_WEIGHTS_FP8, 0, &r.w1, NULL), BAD, "scales is NULL");
  r.w1.ndim = 1;
  REFUSED(sluice_weights_check(SLUICE_WEIGHTS_FP8, 0, &r.w1, &r.s1), BAD, "codes: want a shape of two dimensions");
}

int main(void) {
  const struct CMUnitTest rows[] = {
      TEST_WITH(run_on_fakes, Packed_EveryFormatGemmTypeAndGate_BitsOfTheDecodedLayer),
      TEST_WITH(run_on_fakes, Packed_EveryModeOfAPass_BitsOfTheDecodedLayer),
      TEST_WITH(run_on_fakes, Packed_UnderABudget_WithinItAndTheBitsOfTheDecodedLayer),
      TEST_WITH(run_on_fakes, Packed_F64_BitsOfTheDecodedLayer),
      TEST_WITH(run_on_fakes, Packed_RanksWithOtherBlocks_AreTold),
  };
  return RUN_CASES_AFTER(rows);
}
