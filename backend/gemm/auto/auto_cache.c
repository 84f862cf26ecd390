// SPDX-License-Identifier: Apache-2.0
#include "backend/gemm/auto/auto_cache.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/json.h"
#include "backend/base/machine_cache.h"
#include "backend/base/log.h"
#include "backend/base/processors.h"
#include "backend/base/threads.h"

/* Increase this number with every change of the classes or of the order of kinds, and with every change of a kernel
 * that makes another implementation the fastest. */
#define FORM "sluice gemm choices 2"
enum { KEY_BYTES = 512, CHOICE_BYTES = 32 };

static void key_of(const char* candidates, char key[KEY_BYTES]) {
  char processor[128], cores[64];
  sluice_machine_cache_processor(processor, sizeof processor);
  sluice_processors_describe(cores, sizeof cores);
  const sluice_threads_t pool = sluice_threads_find();
  snprintf(key, KEY_BYTES, "version %d.%d.%d; %s, %s, %d threads; %s", SLUICE_VERSION_MAJOR, SLUICE_VERSION_MINOR,
           SLUICE_VERSION_PATCH, processor, cores, sluice_threads_available(&pool), candidates);
}

static int whole_number(const sluice_json_t* node, double most) {
  return node != NULL && node->kind == SLUICE_JSON_NUMBER && node->number >= 0 && node->number <= most &&
         node->number == (double)(int64_t)node->number;
}

/* Reads {"choices": [[class, order], ...]}; returns -1 if the text has another form. */
static int read_choices(const sluice_json_t* root, sluice_gemm_choice_t* out_choices, int most) {
  const sluice_json_t* list = root->kind == SLUICE_JSON_OBJECT ? sluice_json_member(root, "choices") : NULL;
  if (list == NULL || list->kind != SLUICE_JSON_ARRAY) return -1;
  int count = 0;
  for (const sluice_json_t* pair = list->child; pair != NULL && count < most; pair = pair->next) {
    if (pair->kind != SLUICE_JSON_ARRAY || pair->count != 2) return -1;
    const sluice_json_t *class_id = pair->child, *order = class_id->next;
    if (!whole_number(class_id, INT32_MAX) || !whole_number(order, UINT32_MAX)) return -1;
    out_choices[count++] = (sluice_gemm_choice_t){(int32_t)class_id->number, (uint32_t)order->number};
  }
  return count;
}

int sluice_gemm_choices_read(const char* candidates, sluice_gemm_choice_t* out_choices, int most) {
  char key[KEY_BYTES], path[SLUICE_FINDING_PATH_BYTES];
  key_of(candidates, key);
  if (!sluice_machine_cache_path(NULL, "gemm", key, path)) return 0;
  char* memory = NULL;
  size_t length = 0;
  const char* reason = NULL;
  const char* body =
      sluice_machine_cache_read(path, FORM, key, sluice_machine_cache_is_default(NULL), &memory, &length, &reason);
  if (body == NULL && reason == NULL) return 0;
  int count = -1;
  sluice_json_tree_t tree;
  if (body != NULL && sluice_json_parse(body, length, "choices of GEMMs", &tree) == SLUICE_OK) {
    count = read_choices(&tree.nodes[0], out_choices, most);
    sluice_json_free(&tree);
  }
  free(memory);
  if (count >= 0) return count;
  sluice_log(SLUICE_LOG_WARN, "%s cannot be used (%s): GEMMs are measured again", path,
             reason != NULL ? reason : "it holds no choices");
  return 0;
}

void sluice_gemm_choices_write(const char* candidates, const sluice_gemm_choice_t* choices, int count) {
  char key[KEY_BYTES], path[SLUICE_FINDING_PATH_BYTES];
  key_of(candidates, key);
  const size_t room = (size_t)(count + 1) * CHOICE_BYTES;
  char* text = malloc(room);
  if (text == NULL || !sluice_machine_cache_path(NULL, "gemm", key, path)) {
    free(text);
    return;
  }
  size_t used = (size_t)snprintf(text, room, "{\"choices\": [");
  for (int i = 0; i < count; ++i) {
    used += (size_t)snprintf(text + used, room - used, "%s[%d, %u]", i == 0 ? "" : ", ", choices[i].class_id,
                             choices[i].order);
  }
  snprintf(text + used, room - used, "]}\n");
  if (!sluice_machine_cache_write(path, FORM, key, text)) {
    sluice_log(SLUICE_LOG_INFO, "%s cannot be written (%s): the next process measures GEMMs again", path,
               strerror(errno));
  }
  free(text);
}
