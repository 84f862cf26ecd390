// SPDX-License-Identifier: Apache-2.0
#pragma once

/* Only with the fake driver: from begin on, kernels run in several orders of lanes and warps. report has a case for
 * races and for orders with other bits, and one for each kernel of the image: whether a part has launched it. */
void gpu_begin_coverage(void);
void gpu_report_coverage(void);
