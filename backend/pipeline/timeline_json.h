// SPDX-License-Identifier: Apache-2.0
/* Writes the ops of a batch as JSON, for timeline pictures. */
#pragma once

#include "backend/pipeline/program.h"

/* Writes {"events": [...]} in the form that `sluice.timeline.from_trace` reads: op, lane, begin_ns, end_ns, with the
 * stage as rank, the virtual stage as layer, and the micro-batch as chunk. Messages are on the communication lane of
 * their sender, reductions on that of their stage. begin, end: [num_ops] seconds, from sluice_pipeline_simulate or
 * measured; an op that ends before it begins has not run and is omitted. Writes at most `room` bytes, with a
 * terminating zero; returns the length of the whole text. Thread-safe. */
uint64_t sluice_pipeline_write_timeline(const sluice_pipeline_program_t* program, const double* begin,
                                        const double* end, char* data, uint64_t room);
