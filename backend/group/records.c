// SPDX-License-Identifier: Apache-2.0
#include "backend/group/records.h"

#include <stdio.h>
#include "backend/base/alloc.h"

void sluice_refusal_note(sluice_refusal_t* refusal, sluice_status_t status) {
  refusal->status = status;
  if (status == SLUICE_OK) return;
  sluice_error_info_t why;
  sluice_error_capture(&why);
  (void)snprintf(refusal->message, sizeof refusal->message, "%.*s", (int)sizeof refusal->message - 1, why.message);
}

static int64_t value_of(const sluice_record_field_t* field, const void* record) {
  const char* at = (const char*)record + field->offset;
  uint64_t value = 0;
  switch (field->bytes) { /* by its width, which is that of an integer on any machine */
    case 1: value = *(const uint8_t*)at; break;
    case 2: value = *(const uint16_t*)(const void*)at; break;
    case 4: value = *(const uint32_t*)(const void*)at; break;
    default: return *(const int64_t*)(const void*)at;
  }
  const uint64_t sign = UINT64_C(1) << (8 * field->bytes - 1);
  return field->is_signed ? (int64_t)(value ^ sign) - (int64_t)sign : (int64_t)value;
}

static const char* text_of(const sluice_record_field_t* field, int64_t value, char number[24]) {
  if (field->word != NULL) return field->word(value);
  (void)snprintf(number, 24, field->is_hash ? "%#llx" : "%lld", (long long)value);
  return number;
}

int sluice_record_describe(const sluice_record_field_t* fields, int32_t num_fields, const sluice_record_pair_t* pair,
                           char* text, size_t room) {
  for (const sluice_record_field_t* field = fields; field < fields + num_fields; ++field) {
    const int64_t own = value_of(field, pair->own), peer = value_of(field, pair->peer);
    if (own == peer) continue;
    char numbers[2][24];
    const int used = field->describe != NULL
                         ? field->describe(pair, text, room)
                         : snprintf(text, room, "%s is %s on rank %d and %s on rank %d%s", field->name,
                                    text_of(field, peer, numbers[0]), pair->peer_rank, text_of(field, own, numbers[1]),
                                    pair->rank, field->hint != NULL ? field->hint : "; give all ranks the same");
    if (used > 0) return used;
  }
  return 0;
}

void sluice_records_free(sluice_records_t* records) {
  sluice_free(sluice_process_allocator(), records->data, (uint64_t)records->world_size * records->bytes);
  records->data = NULL;
}

sluice_status_t sluice_records_check_refusals(const sluice_records_t* records, const char* verb) {
  for (int32_t r = 0; r < records->world_size; ++r) {
    const sluice_refusal_t* refusal = sluice_record_of(records, r);
    if (refusal->status == SLUICE_OK) continue;
    return SLUICE_FAIL_PEER(SLUICE_E_PEER_REFUSED, records->rank, r, "%s: rank %d %s: %s: %.*s", records->what, r, verb,
                            sluice_status_name(refusal->status), (int)sizeof refusal->message - 1, refusal->message);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_records_compare(const sluice_records_t* records, const sluice_record_field_t* fields,
                                       int32_t num_fields) {
  char text[512];
  for (int32_t r = 1; r < records->world_size; ++r) {
    const sluice_record_pair_t pair = {sluice_record_of(records, 0), sluice_record_of(records, r), 0, r};
    if (sluice_record_describe(fields, num_fields, &pair, text, sizeof text) == 0) continue;
    return SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, records->rank, r, "%s: %s", records->what, text);
  }
  return SLUICE_OK;
}
