// SPDX-License-Identifier: Apache-2.0
/* Linked into every sluice_cc_test: a test that hangs or is killed leaves the name of its last case in the log. */
#include <stdio.h>

__attribute__((constructor)) static void line_buffer_stdout(void) { setvbuf(stdout, NULL, _IOLBF, 0); }
