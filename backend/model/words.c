// SPDX-License-Identifier: Apache-2.0
#include "backend/model/words.h"

#include "backend/model/restore.h"
#include "sluice/context.h"
#include "sluice/moe.h"

#define COUNT(table) ((int64_t)(sizeof(table) / sizeof(table)[0]))

static const char* word_of(const char* const* words, int64_t count, int64_t at) {
  return at >= 0 && at < count ? words[at] : "unknown";
}

const char* sluice_activation_word(int64_t activation) {
  static const char* const words[] = {
      [SLUICE_ACTIVATION_IDENTITY] = "identity", [SLUICE_ACTIVATION_RELU] = "relu",
      [SLUICE_ACTIVATION_GELU] = "gelu",         [SLUICE_ACTIVATION_GELU_TANH] = "gelu_tanh",
      [SLUICE_ACTIVATION_SILU] = "silu",         [SLUICE_ACTIVATION_RELU2] = "relu2",
      [SLUICE_ACTIVATION_SWIGLU] = "swiglu",
  };
  return word_of(words, COUNT(words), activation);
}

const char* sluice_gated_word(int64_t gated) {
  static const char* const words[] = {
      [SLUICE_GATED_NO] = "no", [SLUICE_GATED_HALVES] = "halves", [SLUICE_GATED_INTERLEAVED] = "interleaved"};
  return word_of(words, COUNT(words), gated);
}

const char* sluice_wgrad_word(int64_t wgrad_mode) {
  static const char* const words[] = {[SLUICE_WGRAD_DEFERRED] = "deferred", [SLUICE_WGRAD_PER_CHUNK] = "per chunk"};
  return wgrad_mode == SLUICE_WGRAD_ADAPTIVE ? "adaptive" : word_of(words, COUNT(words), wgrad_mode);
}

const char* sluice_chunking_word(int64_t chunking) {
  static const char* const words[] = {[SLUICE_CHUNKING_ADAPTIVE] = "adaptive", [SLUICE_CHUNKING_TOKENS] = "tokens"};
  return word_of(words, COUNT(words), chunking);
}

const char* sluice_grouping_word(int64_t grouping) {
  static const char* const words[] = {
      [SLUICE_GROUPING_ADAPTIVE] = "adaptive", [SLUICE_GROUPING_OFF] = "off", [SLUICE_GROUPING_ON] = "on"};
  return word_of(words, COUNT(words), grouping);
}

const char* sluice_deduplicate_word(int64_t deduplicate) {
  static const char* const words[] = {[SLUICE_DEDUPLICATE_NONE] = "none",
                                      [SLUICE_DEDUPLICATE_RANKS] = "ranks",
                                      [SLUICE_DEDUPLICATE_NODES] = "nodes",
                                      [SLUICE_DEDUPLICATE_ADAPTIVE] = "adaptive",
                                      [SLUICE_DEDUPLICATE_ANY] = "any"};
  return word_of(words, COUNT(words), deduplicate);
}

const char* sluice_wire_word(int64_t wire_dtype) {
  static const char* const words[] = {
      [SLUICE_WIRE_LAYER_DTYPE] = "as it is", [SLUICE_WIRE_BF16] = "bf16", [SLUICE_WIRE_INT8] = "int8"};
  return word_of(words, COUNT(words), wire_dtype);
}

const char* sluice_weights_word(int64_t weight_format) {
  static const char* const words[] = {[SLUICE_WEIGHTS_PLAIN] = "plain",
                                      [SLUICE_WEIGHTS_MXFP4] = "mxfp4",
                                      [SLUICE_WEIGHTS_FP8] = "fp8",
                                      [SLUICE_WEIGHTS_INT8] = "int8",
                                      [SLUICE_WEIGHTS_INT4] = "int4"};
  return word_of(words, COUNT(words), weight_format);
}

const char* sluice_restore_word(int64_t policy) {
  return policy == SLUICE_RESTORE_ADAPTIVE ? "adaptive" : sluice_restore_name((int32_t)policy);
}
