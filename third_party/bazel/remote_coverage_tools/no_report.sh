#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Bazel resolves this label in every `bazel test`; nothing runs it.
set -euo pipefail
