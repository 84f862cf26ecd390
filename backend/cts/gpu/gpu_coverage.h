#ifndef SLUICE_BACKEND_CTS_GPU_GPU_COVERAGE_H_
#define SLUICE_BACKEND_CTS_GPU_GPU_COVERAGE_H_

/* A case for each kernel of the image: whether one of the parts that ran has launched it. The fake driver knows. */
void gpu_report_coverage(void);

#endif /* SLUICE_BACKEND_CTS_GPU_GPU_COVERAGE_H_ */
