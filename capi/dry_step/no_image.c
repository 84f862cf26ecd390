// SPDX-License-Identifier: Apache-2.0
/* Defines an empty kernel image. The fake driver has kernels linked in, and the real image is most of the library. */
extern const char sluice_cuda_image_begin[1];
extern const char sluice_cuda_image_end[1];

const char sluice_cuda_image_begin[1] = {0};
const char sluice_cuda_image_end[1] = {0};
