"""These tests start their ranks as those of adapters/torch do."""

import os
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "torch", "test"))
