/* Layers under ceilings (SLUICE_EXCHANGE_CEILING): counts are the same in every pass, so that nothing is read from the
 * device and nothing agreed on once the ranks have made a call of a kind together. Their passes may be captured into a
 * graph. Private to moe. */
#ifndef SLUICE_BACKEND_MOE_RUN_CEILING_H_
#define SLUICE_BACKEND_MOE_RUN_CEILING_H_

#include "backend/moe/handshake/agree.h"
#include "backend/moe/layer/ceiling_state.h"
#include "backend/moe/pass/pass.h"

/* Once the schedule is known, in a capture: STATE unless this rank has made such a call outside one, UNSUPPORTED where
 * the communicator is not for it. From here on the memory that the graph will use stays where it is. */
sluice_status_t sluice_ceiling_check_capture(const sluice_pass_t* pass);
/* The end of a call that was opened. */
void sluice_ceiling_close(const sluice_pass_t* pass, sluice_status_t status);

/* Routes and counts of a forward. */
sluice_status_t sluice_ceiling_bind(sluice_pass_t* pass, const sluice_tensor_t* expert_ids, int32_t num_chunks);

/* Whether this call needs no header. schedule NULL: of a rank that refuses; then any call agreed on counts, since a
 * refusal has no effect, and the others wait until this rank makes the call. */
int sluice_ceiling_is_agreed(const sluice_moe_t* moe, const sluice_template_t* schedule);
/* The header without counts; or, where the ranks have agreed on such calls, in its place the call is counted, unless it
 * is refused. */
sluice_status_t sluice_ceiling_agree(sluice_pass_t* pass, const sluice_proposal_t* proposal,
                                     sluice_agreement_t* out_agreement);
void sluice_ceiling_note_agreed(const sluice_pass_t* pass);

/* Where no header will tell the other ranks: aborts the communicator once rows may be on their way. Returns `status`
 * with its record. */
sluice_status_t sluice_ceiling_fail(const sluice_pass_t* pass, sluice_status_t status);
/* A failure of an earlier pass, of a layer with headers, that the others have not been told yet: told by an abort, if
 * this layer's calls may have no header. */
sluice_status_t sluice_ceiling_tell_failure(const sluice_moe_t* moe);

/* The tally since the last take, read from the device; then it starts anew. */
sluice_status_t sluice_ceiling_take_tally(sluice_moe_t* moe, sluice_stream_t stream, int64_t* out_tally);

#endif /* SLUICE_BACKEND_MOE_RUN_CEILING_H_ */
