"""Computation in float64 throughout, for laws that hold to sixteen digits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class AllDouble(TorchFunctionMode):
    """Mode that keeps float64 tensors in float64 where models cast to float32 and back, in norms and softmaxes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float or (func is Tensor.to and torch.float32 in (*args, *kwargs.values())):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
