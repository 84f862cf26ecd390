# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of these tests as in adapters/torch."""

import os
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "torch", "test"))
