# SPDX-License-Identifier: Apache-2.0
"""An adapter as a wheel ships it: says where it is, and its stamp.

    PYTHONPATH=STAGED python torch_adapter.py [COMPILED]...            for the torch of this Python
    PYTHONPATH=STAGED python torch_adapter.py --unpacked FOLDER ABI    for a torch that torch_wheels.py has unpacked

STAGED is the package as it will be installed. An adapter among COMPILED that fits is taken; else it is found in the
user's cache, or compiled there.
"""

from __future__ import annotations

import json
import os
import sys
import types


def stand_in(folder: str, cxx11_abi: int) -> None:
    """Makes `import torch` give what the builder reads of torch: versions, the ABI and the folder of the headers."""
    sys.path.insert(0, folder)
    torch = types.ModuleType("torch")
    torch.__path__ = [os.path.join(folder, "torch")]
    torch.__file__ = os.path.join(folder, "torch", "__init__.py")
    torch._C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=bool(cxx11_abi))
    sys.modules["torch"] = torch
    import torch.version

    torch.__version__ = torch.version.__version__
    # The package around the builder, without the modules that need a torch that runs.
    import sluice

    package = types.ModuleType("sluice.adapters.torch")
    package.__path__ = [os.path.join(os.path.dirname(sluice.__file__), "adapters", "torch")]
    sys.modules["sluice.adapters.torch"] = package


def main() -> None:
    compiled = sys.argv[1:]
    if compiled[:1] == ["--unpacked"]:
        stand_in(compiled[1], int(compiled[2]))
        compiled = []
    from sluice.adapters.torch import build, stamps

    fitting = build.wanted()
    compiled = [path for path in compiled if stamps.why_not(path, fitting) is None]
    path = compiled[0] if compiled else build.ensure()
    print(json.dumps({"path": path, "shipped": build.shipped_path(), "stamp": stamps.for_any_build(fitting)}))


if __name__ == "__main__":
    main()
