# SPDX-License-Identifier: Apache-2.0
"""Reads the processor's description once, for a fork server: DeepSpeed starts a process for it on every rank."""

import functools

import cpuinfo

cpuinfo.get_cpu_info = functools.partial(dict, cpuinfo.get_cpu_info())
