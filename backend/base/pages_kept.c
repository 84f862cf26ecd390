#include "backend/base/pages_kept.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

#include "backend/base/json.h"
#include "backend/base/kept.h"

#define FORM "sluice fresh memory 1"
enum { KEY_BYTES = 512 };

/* The kernel, too, has a say in how pages come. */
static int path_of(char key[KEY_BYTES], char path[SLUICE_KEPT_PATH_BYTES]) {
  char processor[128];
  struct utsname kernel;
  sluice_kept_processor(processor, sizeof processor);
  if (uname(&kernel) != 0) kernel.release[0] = '\0';
  snprintf(key, KEY_BYTES, "%s; Linux %s", processor, kernel.release);
  return sluice_kept_path(NULL, "pages", key, path);
}

/* {"rates": [[small, huge], ...]}, seconds for each byte, of each size; null: not measured. */
static int read_rates(const sluice_json_t* root, sluice_pages_rates_t* rates) {
  const sluice_json_t* list = root->kind == SLUICE_JSON_OBJECT ? sluice_json_member(root, "rates") : NULL;
  if (list == NULL || list->kind != SLUICE_JSON_ARRAY || list->count != SLUICE_PAGES_SIZES) return 0;
  sluice_pages_rates_t found;
  memset(&found, 0, sizeof found);
  sluice_pages_rate_t* rate = found.sizes;
  for (const sluice_json_t* pair = list->child; pair != NULL; pair = pair->next, ++rate) {
    if (pair->kind == SLUICE_JSON_NULL) continue;
    if (pair->kind != SLUICE_JSON_ARRAY || pair->count != SLUICE_PAGES_WAYS) return 0;
    int way = 0;
    for (const sluice_json_t* each = pair->child; each != NULL; each = each->next, ++way) {
      if (each->kind != SLUICE_JSON_NUMBER || !isfinite(each->number) || each->number < 0) return 0;
      rate->seconds_per_byte[way] = each->number;
    }
    rate->measured = SLUICE_PAGES_FIRST;
  }
  *rates = found;
  return 1;
}

void sluice_pages_recall(sluice_pages_rates_t* rates) {
  char key[KEY_BYTES], path[SLUICE_KEPT_PATH_BYTES];
  if (!path_of(key, path)) return;
  char* memory = NULL;
  size_t length = 0;
  const char* reason = NULL;
  const char* body = sluice_kept_read(path, FORM, key, sluice_kept_is_default(NULL), &memory, &length, &reason);
  sluice_json_tree_t tree;
  if (body != NULL && sluice_json_parse(body, length, "rates of fresh memory", &tree) == SLUICE_OK) {
    (void)read_rates(&tree.nodes[0], rates);
    sluice_json_free(&tree);
  }
  free(memory);
}

void sluice_pages_keep(const sluice_pages_rates_t* rates) {
  char key[KEY_BYTES], path[SLUICE_KEPT_PATH_BYTES], text[64 + 64 * SLUICE_PAGES_SIZES];
  if (!path_of(key, path)) return;
  size_t used = (size_t)snprintf(text, sizeof text, "{\"rates\": [");
  for (int i = 0; i < SLUICE_PAGES_SIZES; ++i) {
    const sluice_pages_rate_t* rate = &rates->sizes[i];
    const char* between = i == 0 ? "" : ", ";
    if (rate->measured < SLUICE_PAGES_FIRST) {
      used += (size_t)snprintf(text + used, sizeof text - used, "%snull", between);
      continue;
    }
    used += (size_t)snprintf(text + used, sizeof text - used, "%s[%.4g, %.4g]", between,
                             rate->seconds_per_byte[SLUICE_PAGES_SMALL], rate->seconds_per_byte[SLUICE_PAGES_HUGE]);
  }
  snprintf(text + used, sizeof text - used, "]}\n");
  (void)sluice_kept_write(path, FORM, key, text);
}
