# SPDX-License-Identifier: Apache-2.0
"""Schedules of torch.distributed.pipelining that run what has arrived: `get_schedule_class("sluice")`."""
