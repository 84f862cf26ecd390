/* The all-gather of small records: what handshakes are made of. */
#include "backend/comm/comm.h"
#include "backend/comm/comm_usable.h"
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

void* sluice_comm_take_records(sluice_comm_t* comm, uint64_t record_bytes, const char* what) {
  void* records = sluice_alloc_zeroed(sluice_process_allocator(), (uint64_t)comm->world_size * record_bytes, what);
  if (records == NULL) (void)sluice_comm_fail_and_tell(comm, sluice_alloc_status());
  return records;
}

void sluice_comm_free_records(const sluice_comm_t* comm, void* records, uint64_t record_bytes) {
  sluice_free(sluice_process_allocator(), records, (uint64_t)comm->world_size * record_bytes);
}
