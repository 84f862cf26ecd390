#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes an assembler file with a fatbin as read-only data.
#
#   embed.sh FATBIN OUT.S      FATBIN may be an empty file: a build without nvcc
set -euo pipefail
{
  echo '    .section .rodata.sluice_cuda_image, "a", @progbits'
  echo '    .balign 64'
  echo '    .globl sluice_cuda_image_begin, sluice_cuda_image_end'
  echo '    .hidden sluice_cuda_image_begin, sluice_cuda_image_end'
  echo 'sluice_cuda_image_begin:'
  od -An -v -tu1 -w32 "$1" | sed -e 's/^ *//' -e 's/  */, /g' -e 's/^/    .byte /'
  echo 'sluice_cuda_image_end:'
  echo '    .byte 0'
  echo '    .section .note.GNU-stack, "", @progbits'
} >"$2"
