// SPDX-License-Identifier: Apache-2.0
/* Makes stdout line-buffered in every sluice_cc_test, so that the log of a test that hangs names its last case. */
#include <stdio.h>

__attribute__((constructor)) static void line_buffer_stdout(void) { setvbuf(stdout, NULL, _IOLBF, 0); }
