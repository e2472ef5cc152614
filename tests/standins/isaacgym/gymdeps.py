"""The check that Isaac Gym was imported before torch."""

import sys


def check() -> None:
    if "torch" in sys.modules:
        raise ImportError(
            "PyTorch was imported before isaacgym modules. Please import torch after isaacgym"
        )
