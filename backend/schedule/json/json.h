// SPDX-License-Identifier: Apache-2.0
/* Writes templates as JSON, with names instead of numbers. */
#pragma once

#include "backend/schedule/schedule.h"

/* Writes at most `room` bytes, terminated by a zero; returns the length without it, as snprintf. */
uint64_t sluice_schedule_write_json(const sluice_template_t* schedule, char* text, uint64_t room);
