// SPDX-License-Identifier: Apache-2.0
/* Functions of the part `routing` that other files use or define. */
#pragma once

#include <stdint.h>

/* Random routes, a few of them dropped, ordered by the device. NULL, or the problem. */
const char* gpu_route(int64_t tokens, int64_t top_k, int64_t experts);

void gpu_report_token_copies(void); /* gpu_token_copies.c */
