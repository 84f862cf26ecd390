// SPDX-License-Identifier: Apache-2.0
#ifndef SLUICE_BACKEND_CTS_GPU_GPU_COVERAGE_H_
#define SLUICE_BACKEND_CTS_GPU_GPU_COVERAGE_H_

/* A case for each kernel of the image: whether one of the executed parts has launched it. Only the fake driver can
 * tell. */
void gpu_report_coverage(void);

#endif /* SLUICE_BACKEND_CTS_GPU_GPU_COVERAGE_H_ */
