// SPDX-License-Identifier: Apache-2.0
/* The record of this thread's last error, valid until this thread calls one of these functions again. */
#ifndef SLUICE_BACKEND_BASE_TEST_LAST_ERROR_H_
#define SLUICE_BACKEND_BASE_TEST_LAST_ERROR_H_

#include "sluice/base.h"

const sluice_error_info_t* last_error(void);
const char* last_message(void);

#endif /* SLUICE_BACKEND_BASE_TEST_LAST_ERROR_H_ */
