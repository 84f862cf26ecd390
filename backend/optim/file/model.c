// SPDX-License-Identifier: Apache-2.0
/* Descriptions of the tensors of a file. */
#include <stdio.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/optim/file/state_file.h"

enum { GROUP = 0, DTYPE, NUM_DIMS, HEAD }; /* words at the start of each tensor */
#define MOST_ELEMENTS (INT64_C(1) << 48)

static int64_t length(const int64_t* tensor) { return HEAD + tensor[NUM_DIMS]; }

/* Returns -1 above 2^48, or if the dimensions are invalid. */
static int64_t elements(const int64_t* dims, int64_t num_dims) {
  int64_t count = 1;
  for (int64_t i = 0; i < num_dims; ++i) {
    if (dims[i] < 0 || (dims[i] > 0 && count > MOST_ELEMENTS / dims[i])) return -1;
    count *= dims[i];
  }
  return count;
}

/* ---- creating ---- */

static sluice_status_t count_words(const sluice_adam_group_t* groups, int64_t num_groups, sluice_state_shapes_t shapes,
                                   sluice_state_model_t* model) {
  const int64_t* dims = shapes.dims;
  for (int64_t g = 0; g < num_groups; ++g) {
    for (int64_t t = 0; t < groups[g].num_tensors; ++t, ++model->num_tensors) {
      const int64_t count = groups[g].tensors[t].count;
      const int32_t num_dims = shapes.num_dims != NULL ? shapes.num_dims[model->num_tensors] : 1;
      SLUICE_TRY(SLUICE_REQUIRE(num_dims >= 0 && num_dims <= SLUICE_STATE_MODEL_MOST_DIMS,
                                "optimizer: tensor %lld of group %lld has %d dimensions; give 0 to %d", (long long)t,
                                (long long)g, num_dims, SLUICE_STATE_MODEL_MOST_DIMS));
      SLUICE_TRY(SLUICE_REQUIRE(
          shapes.num_dims == NULL || elements(dims, num_dims) == count,
          "optimizer: tensor %lld of group %lld has %lld elements, but its shape has another number of them",
          (long long)t, (long long)g, (long long)count));
      if (shapes.num_dims != NULL && num_dims > 0) dims += num_dims;
      model->num_words += HEAD + num_dims;
      model->count += count;
    }
  }
  return SLUICE_OK;
}

static void fill(const sluice_adam_group_t* groups, int64_t num_groups, sluice_state_shapes_t shapes, int64_t* word) {
  const int64_t* dims = shapes.dims;
  int64_t number = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    for (int64_t t = 0; t < groups[g].num_tensors; ++t, ++number) {
      const sluice_adam_tensor_t* tensor = groups[g].tensors + t;
      const int32_t num_dims = shapes.num_dims != NULL ? shapes.num_dims[number] : 1;
      word[GROUP] = g, word[DTYPE] = tensor->param_dtype, word[NUM_DIMS] = num_dims;
      if (shapes.num_dims == NULL) word[HEAD] = tensor->count;
      if (shapes.num_dims != NULL && num_dims > 0) {
        memcpy(word + HEAD, dims, (size_t)num_dims * sizeof *word);
        dims += num_dims;
      }
      word += length(word);
    }
  }
}

sluice_status_t sluice_state_model_make(const sluice_adam_group_t* groups, int64_t num_groups,
                                        sluice_state_shapes_t shapes, sluice_allocator_t* allocator,
                                        sluice_state_model_t* out_model) {
  *out_model = (sluice_state_model_t){.words = NULL};
  sluice_state_model_t model = {.words = NULL};
  SLUICE_TRY(count_words(groups, num_groups, shapes, &model));
  model.words =
      sluice_alloc(allocator, (uint64_t)(model.num_words + 1) * sizeof *model.words, "optimizer: its tensors");
  if (model.words == NULL) return sluice_alloc_status();
  fill(groups, num_groups, shapes, model.words);
  *out_model = model;
  return SLUICE_OK;
}

void sluice_state_model_free(sluice_state_model_t* model, sluice_allocator_t* allocator) {
  if (model->words == NULL) return;
  sluice_free(allocator, model->words, (uint64_t)(model->num_words + 1) * sizeof *model->words);
  model->words = NULL;
}

int sluice_state_model_read(sluice_state_model_t* model) {
  model->num_tensors = model->count = 0;
  for (int64_t at = 0; at < model->num_words;) {
    const int64_t* tensor = model->words + at;
    const int64_t left = model->num_words - at - HEAD;
    if (left < 0 || tensor[NUM_DIMS] < 0 || tensor[NUM_DIMS] > left || tensor[NUM_DIMS] > SLUICE_STATE_MODEL_MOST_DIMS)
      return 0;
    const int64_t count = elements(tensor + HEAD, tensor[NUM_DIMS]);
    if (count < 0 || count > MOST_ELEMENTS - model->count) return 0;
    model->count += count;
    ++model->num_tensors;
    at += length(tensor);
  }
  return 1;
}

/* ---- comparing ---- */

enum { TEXT = 160 };

/* Formats a tensor as "f32 [8, 16]". */
static const char* say(const int64_t* tensor, char* text) {
  int used = snprintf(text, TEXT, "%s [", sluice_dtype_name((int32_t)tensor[DTYPE]));
  for (int64_t i = 0; i < tensor[NUM_DIMS] && used < TEXT - 32; ++i) {
    used += snprintf(text + used, (size_t)(TEXT - used), "%s%lld", i > 0 ? ", " : "", (long long)tensor[HEAD + i]);
  }
  (void)snprintf(text + used, (size_t)(TEXT - used), "%s]", used >= TEXT - 32 ? ", ..." : "");
  return text;
}

static sluice_status_t differs(const char* path, int64_t number, const int64_t* of_file, const int64_t* wanted) {
  char theirs[TEXT], own[TEXT];
  if (of_file[GROUP] != wanted[GROUP]) {
    return SLUICE_FAIL(SLUICE_E_MISMATCH,
                       "optimizer: %s belongs to another model: tensor %lld is in group %lld in the file, and in group "
                       "%lld in the optimizer",
                       path, (long long)number, (long long)of_file[GROUP], (long long)wanted[GROUP]);
  }
  return SLUICE_FAIL(SLUICE_E_MISMATCH,
                     "optimizer: %s belongs to another model: tensor %lld: the file has %s, the optimizer has %s", path,
                     (long long)number, say(of_file, theirs), say(wanted, own));
}

static sluice_status_t compare_numbers(const char* path, int64_t of_file, int64_t wanted) {
  if (of_file == wanted) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_MISMATCH,
                     "optimizer: %s belongs to another model: the file has %lld tensors, the optimizer has %lld", path,
                     (long long)of_file, (long long)wanted);
}

sluice_status_t sluice_state_model_compare(const sluice_state_model_t* of_file, const sluice_state_model_t* wanted,
                                           const char* path) {
  const int64_t *theirs = of_file->words, *own = wanted->words;
  for (int64_t t = 0; t < of_file->num_tensors && t < wanted->num_tensors; ++t) {
    if (length(theirs) != length(own) || memcmp(theirs, own, (size_t)length(own) * sizeof *own) != 0)
      return differs(path, t, theirs, own);
    theirs += length(theirs), own += length(own);
  }
  return compare_numbers(path, of_file->num_tensors, wanted->num_tensors);
}

sluice_status_t sluice_state_model_compare_tensors(const sluice_state_model_t* of_file,
                                                   const sluice_adam_group_t* groups, int64_t num_groups,
                                                   const char* path) {
  const int64_t* theirs = of_file->words;
  int64_t number = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    for (int64_t t = 0; t < groups[g].num_tensors; ++t, ++number) {
      const sluice_adam_tensor_t* tensor = groups[g].tensors + t;
      const int64_t own[HEAD + 1] = {g, tensor->param_dtype, 1, tensor->count};
      if (number >= of_file->num_tensors) continue;
      if (theirs[GROUP] != own[GROUP] || theirs[DTYPE] != own[DTYPE] ||
          elements(theirs + HEAD, theirs[NUM_DIMS]) != tensor->count)
        return differs(path, number, theirs, own);
      theirs += length(theirs);
    }
  }
  return compare_numbers(path, of_file->num_tensors, number);
}
