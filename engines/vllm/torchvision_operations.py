"""Declare the operations of torchvision, whose build is for CUDA and cannot be loaded beside torch's CPU build.

Without their declarations torchvision cannot be imported. The processors of vision models use it to resize images,
which needs none of these operations.
"""

import importlib.abc
import sys


class _Declares(importlib.abc.MetaPathFinder):
    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and _Declares.library is None:
            import torch  # takes seconds, and most processes of the environment need none of it

            _Declares.library = torch.library.Library("torchvision", "FRAGMENT")
            for operation in ("nms", "qnms"):
                _Declares.library.define(
                    f"{operation}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        return None


sys.meta_path.insert(0, _Declares())
