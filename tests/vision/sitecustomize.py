# SPDX-License-Identifier: Apache-2.0
"""Makes torchvision importable beside a CPU build of torch, in each process with this folder on its PYTHONPATH.

torchvision's published build is for accelerators: its library does not load without theirs. Its import then fails,
because it names the shapes of two operators that the library would have declared. Nothing that reads images calls them,
so it is enough to declare them. PyTorch's index of CPU builds has a torchvision that needs none of this.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class DeclaredOperators(MetaPathFinder):
    """Finds torchvision where Python would, and declares the operators if its library does not load."""

    library = None

    def find_spec(self, name, path, target=None):
        spec = PathFinder.find_spec(name, path) if name == "torchvision" else None
        if spec is not None and self.library is None:
            import torch

            try:
                torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
            except OSError:
                self.library = torch.library.Library("torchvision", "DEF")
                for operator in OPERATORS:
                    self.library.define(operator)
        return spec


sys.meta_path.insert(0, DeclaredOperators())
