/* The exchange ops of a deduplicated pass: what exchange_ops.h does by rows, by parcels (parcels.h). Private to moe. */
#ifndef SLUICE_BACKEND_MOE_PARCEL_OPS_H_
#define SLUICE_BACKEND_MOE_PARCEL_OPS_H_

#include "backend/moe/exchange_ops.h"

/* Each parcel's row of `tokens` to its rank: gathered into T_SEND, arriving in T_RECV by source. */
sluice_status_t sluice_send_parcels_start(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                                          sluice_transfer_t* out_transfer);
/* Received parcels and this rank's own rows of `tokens`, fanned out into `tensor` in expert order. */
void sluice_unpack_parcels(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens, int32_t tensor);
/* The route weights that came with a forward's parcels, and the own ones: into T_PARCELS by slot. */
void sluice_unpack_parcel_weights(sluice_pass_t* pass, const sluice_op_t* op);
/* One sum for each parcel back to its token's rank, into T_RECV in the sent order of parcels: rows of `tensor` over k,
 * weighted by T_PARCELS in a forward. The own ones are summed there while the wire is busy. */
sluice_status_t sluice_return_parcels_start(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor,
                                            sluice_transfer_t* out_transfer);
/* The sums of all ranks, added in rank order into the pass's out_rows. */
void sluice_reduce_parcels(sluice_pass_t* pass, const sluice_op_t* op);

#endif /* SLUICE_BACKEND_MOE_PARCEL_OPS_H_ */
