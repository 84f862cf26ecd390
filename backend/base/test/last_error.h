// SPDX-License-Identifier: Apache-2.0
/* The record of this thread's last error, valid until this thread calls one of these functions again. */
#pragma once

#include "sluice/base.h"

const sluice_error_info_t* last_error(void);
const char* last_message(void);
