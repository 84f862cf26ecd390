# SPDX-License-Identifier: Apache-2.0
"""Provides schedules for torch.distributed.pipelining: `get_schedule_class("sluice")`."""
