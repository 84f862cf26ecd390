# SPDX-License-Identifier: Apache-2.0
"""Finds or compiles an adapter for a wheel, and prints its path and its stamp.

    PYTHONPATH=STAGED python torch_adapter.py [COMPILED]...            for the torch of this Python
    PYTHONPATH=STAGED python torch_adapter.py --unpacked FOLDER ABI    for a torch that torch_wheels.py has unpacked

STAGED is the package in its installed layout. An adapter among COMPILED is used if it fits; otherwise it is found in
the user's cache, or compiled there.
"""

from __future__ import annotations

import json
import os
import sys
import types


def stand_in(folder: str, cxx11_abi: int) -> None:
    """Makes `import torch` return a module with what the builder reads: versions, the ABI and the headers' folder."""
    sys.path.insert(0, folder)
    torch = types.ModuleType("torch")
    torch.__path__ = [os.path.join(folder, "torch")]
    torch.__file__ = os.path.join(folder, "torch", "__init__.py")
    torch._C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=bool(cxx11_abi))
    sys.modules["torch"] = torch
    import torch.version

    torch.__version__ = torch.version.__version__
    # The package of the builder, without the modules that need a working torch.
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
