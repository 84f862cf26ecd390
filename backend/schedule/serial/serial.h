// SPDX-License-Identifier: Apache-2.0
/* Templates as bytes, for a file or another machine, and as JSON for people.
 *
 * Binary form 9, all numbers little-endian int32: magic, form, the spec's numbers, restore policies by chunk (two
 * arrays of n), rings, number of ops and of dependencies; per op: kind, lane, chunk, group, reads, writes, releases
 * (bits of the accesses), dependencies, each list preceded by its length; homes; a checksum of everything before it
 * (two numbers). A reader trusts nothing: it names the invalid field, allocates only what n requires, and rejects what
 * the hazard checker rejects. */
#pragma once

#include "backend/schedule/schedule.h"

/* Writes at most `room` bytes; returns the size of the template. data may be NULL with room 0. */
uint64_t sluice_schedule_write(const sluice_template_t* schedule, void* data, uint64_t room);
/* out_template: new, release with sluice_template_destroy. Errors: INVALID_ARGUMENT naming the field or the hazard,
 * NO_MEMORY. */
sluice_status_t sluice_schedule_read(const void* data, uint64_t bytes, sluice_allocator_t* allocator,
                                     sluice_template_t** out_template);

/* Writes JSON with names instead of numbers, terminated by a zero; returns the length without it, as snprintf. */
uint64_t sluice_schedule_write_json(const sluice_template_t* schedule, char* text, uint64_t room);
