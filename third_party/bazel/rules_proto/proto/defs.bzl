# SPDX-License-Identifier: Apache-2.0
"""Bazel 4 asks for this repository by name; natively the rules are built in, so re-exporting them keeps the build offline."""

proto_lang_toolchain = native.proto_lang_toolchain
proto_library = native.proto_library
