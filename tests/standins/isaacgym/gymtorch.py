"""The stand-in's `isaacgym.gymtorch`: its two functions, over the small torch of `standins/torch38`."""

import importlib
from typing import Any

from .kinds import Tensor, TensorDataType


def wrap_tensor(gym_tensor: Any, offsets: Any = None, counts: Any = None) -> Any:
    """A torch tensor over the memory that a descriptor names; no copy."""
    torch: Any = importlib.import_module("torch")  # after isaacgym
    return torch.over(gym_tensor.data_address, gym_tensor.shape)


def unwrap_tensor(torch_tensor: Any) -> Tensor:
    """A descriptor of a contiguous torch tensor, which must be kept alive by somebody else."""
    tensor = Tensor()
    tensor.data_address, tensor.device = torch_tensor.data_ptr(), -1
    tensor.dtype = (
        TensorDataType.DTYPE_UINT32 if torch_tensor.is_int() else TensorDataType.DTYPE_FLOAT32
    )
    tensor.shape = list(torch_tensor.shape)
    return tensor
