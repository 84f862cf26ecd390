# SPDX-License-Identifier: Apache-2.0
"""Exports Bazel's built-in rules: Bazel 4 loads this repository by name, and would otherwise download it."""

proto_lang_toolchain = native.proto_lang_toolchain
proto_library = native.proto_library
