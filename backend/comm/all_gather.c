// SPDX-License-Identifier: Apache-2.0
/* The all-gather of small records, which handshakes consist of. */
#include <string.h>

#include "backend/comm/comm.h"
#include "backend/comm/comm_life.h"
#include "backend/comm/exchange_arrays.h"

sluice_status_t sluice_comm_all_gather(sluice_comm_t* comm, void* records, uint64_t record_bytes, const char* phase) {
  SLUICE_TRY(sluice_comm_check_usable(comm));
  if (comm->world_size == 1) return SLUICE_OK;
  const uint64_t bytes = sluice_exchange_arrays_bytes(comm->world_size);
  char* block = sluice_alloc(sluice_process_allocator(), bytes, "an all-gather");
  if (block == NULL) return sluice_comm_fail_and_tell(comm, sluice_alloc_status());
  const sluice_exchange_arrays_t arrays = sluice_exchange_arrays_in(block, comm->world_size);
  for (int32_t r = 0; r < comm->world_size; ++r) {
    arrays.send[r] = (char*)records + (uint64_t)comm->rank * record_bytes;
    arrays.recv[r] = (char*)records + (uint64_t)r * record_bytes;
    arrays.send_bytes[r] = arrays.recv_bytes[r] = r == comm->rank ? 0 : record_bytes;
  }
  const sluice_exchange_t exchange = sluice_exchange_of(&arrays);
  const sluice_status_t status = sluice_comm_exchange(comm, &exchange, phase);
  sluice_free(sluice_process_allocator(), block, bytes);
  return status;
}

/* Allocates the records. A rank without memory aborts the communicator, because the other ranks would wait for its
 * record. */
static char* take_records(sluice_comm_t* comm, uint64_t bytes, const char* what) {
  char* data = sluice_alloc_zeroed(sluice_process_allocator(), bytes, what);
  if (data == NULL && comm != NULL) (void)sluice_comm_fail_and_tell(comm, sluice_alloc_status());
  return data;
}

sluice_status_t sluice_comm_agree(sluice_comm_t* comm, const sluice_agreement_t* agreement, sluice_status_t mine,
                                  void* record, uint64_t record_bytes, sluice_records_t* out_records) {
  *out_records = (sluice_records_t){.bytes = record_bytes,
                                    .rank = comm != NULL ? comm->rank : 0,
                                    .world_size = comm != NULL ? comm->world_size : 1,
                                    .what = agreement->what};
  sluice_error_info_t own;
  sluice_error_capture(&own);
  sluice_refusal_note(record, mine);
  out_records->data = take_records(comm, (uint64_t)out_records->world_size * record_bytes, agreement->what);
  if (out_records->data == NULL) return mine != SLUICE_OK ? sluice_error_adopt(&own) : sluice_alloc_status();
  memcpy(out_records->data + (uint64_t)out_records->rank * record_bytes, record, record_bytes);
  sluice_status_t status =
      comm != NULL ? sluice_comm_all_gather(comm, out_records->data, record_bytes, agreement->phase) : SLUICE_OK;
  if (mine != SLUICE_OK) status = sluice_error_adopt(&own);
  if (status == SLUICE_OK) status = sluice_records_check_refusals(out_records, agreement->verb);
  if (status != SLUICE_OK) sluice_records_free(out_records);
  return status;
}

sluice_status_t sluice_comm_agree_on_status(sluice_comm_t* comm, const sluice_agreement_t* agreement,
                                            sluice_status_t mine) {
  sluice_refusal_t record = {.status = SLUICE_OK};
  sluice_records_t records;
  SLUICE_TRY(sluice_comm_agree(comm, agreement, mine, &record, sizeof record, &records));
  sluice_records_free(&records);
  return SLUICE_OK;
}
