"""The adapter for the torch of the Python that runs this, as a wheel ships it: says where it is, and its stamp.

    PYTHONPATH=STAGED python torch_adapter.py [COMPILED]...

STAGED is the package as it will be installed. An adapter among COMPILED that fits is taken; else it is found in the
user's cache, or compiled there.
"""

from __future__ import annotations

import json
import sys

from sluice.adapters.torch import build, stamps


def main() -> None:
    fitting = build.wanted()
    compiled = [path for path in sys.argv[1:] if stamps.why_not(path, fitting) is None]
    path = compiled[0] if compiled else build.ensure()
    print(json.dumps({"path": path, "shipped": build.shipped_path(), "stamp": stamps.for_any_build(fitting)}))


if __name__ == "__main__":
    main()
