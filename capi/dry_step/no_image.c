// SPDX-License-Identifier: Apache-2.0
/* In place of the image of kernels for GPUs, which is most of the engine: the fake driver has its kernels linked in. */
extern const char sluice_cuda_image_begin[1];
extern const char sluice_cuda_image_end[1];

const char sluice_cuda_image_begin[1] = {0};
const char sluice_cuda_image_end[1] = {0};
