# SPDX-License-Identifier: Apache-2.0
"""What `sluice trace` makes of recorded ranks: passes and their schedules, one clock, idle time explained."""
