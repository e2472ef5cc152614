"""What only the GPU knows (a ctrl that is not finite, environments with flags), learnt without a wait.

Small kernels add each command's findings to one record in GPU memory, in the caller's stream, while the
worker is at work; a copy of the record to page-locked memory is under way most of the time, and is looked
at when its event says that it has arrived: at the next bell, or a later one when the GPU is behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Tensor = torch.Tensor


@dataclass(frozen=True)
class News:
    """Environments by what is wrong with them, and between which commands it happened."""

    ctrl: NDArray[np.intp]  # ids
    flags: NDArray[np.uint8]  # (num_envs,)
    after: int
    upto: int

    @property
    def when(self) -> str:
        if self.upto - self.after <= 1:
            return f"in command {self.upto}"
        return f"in commands {self.after + 1} to {self.upto}"

    @staticmethod
    def ids(found: NDArray[np.intp]) -> str:
        return ", ".join(map(str, found[:20])) + (", ..." if len(found) > 20 else "")


class Checks:
    """news: what was found and not yet forgotten, or None."""

    def __init__(self, ctrl: Tensor, flags: list[Tensor], check_finite: bool) -> None:
        count = len(ctrl)
        self._ctrl = ctrl if check_finite and ctrl.numel() else None
        self._flags = flags
        # One record, so that one copy brings it here: a float and a byte per environment.
        self._found = torch.zeros(5 * count, dtype=torch.uint8, device=ctrl.device)
        self._poison = self._found[: 4 * count].view(torch.float32)
        self._sticky = self._found[4 * count :]
        self._rows = torch.zeros(count, device=ctrl.device)
        self._zeros = torch.zeros(count, device=ctrl.device)
        self._here = torch.zeros(5 * count, dtype=torch.uint8, pin_memory=True)
        here = self._here.numpy()
        self._poison_here: Any = here[: 4 * count].view(np.float32)
        self._sticky_here: NDArray[np.uint8] = here[4 * count :]
        self._arrived = torch.cuda.Event()
        self._under_way = self._seen = self._last = 0
        self._stream: Any = None
        self.news: News | None = None

    def after_ring(self, sequence: int, slot: int, stepped: bool) -> None:
        """Command `sequence`, of `slot`, is with the worker: enqueue what is to be known of its ctrl and
        of the flags of the command before it, which lie in the other slot."""
        stream = torch.cuda.current_stream(self._found.device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        if self._under_way and self._arrived.query():
            self._look()
        with torch.no_grad():
            if stepped and self._ctrl is not None:
                # A row's sum is finite when the row is (targets are radians, nothing overflows), and
                # zero times anything else is NaN, which stays.
                torch.sum(self._ctrl, 1, out=self._rows)
                self._poison.addcmul_(self._rows, self._zeros)
            if self._last:
                self._sticky.bitwise_or_(self._flags[1 - slot])
            self._last = sequence
            if not self._under_way:
                self._here.copy_(self._found, non_blocking=True)
                self._arrived.record(stream)
                self._under_way = sequence

    def _look(self) -> None:
        sequence, self._under_way = self._under_way, 0
        bad = np.isnan(self._poison_here)
        if bad.any() or self._sticky_here.any():
            self.news = News(np.flatnonzero(bad), self._sticky_here.copy(), self._seen, sequence)
        self._seen = sequence

    def forget(self) -> None:
        """What was found has been told; start anew. What is under way holds it still and is dropped."""
        self.news = None
        if self._under_way:
            self._arrived.synchronize()
            self._under_way = 0
        self._found.zero_()

    def restarted(self) -> None:
        """Another worker: sequence numbers begin again."""
        self.forget()
        self._under_way = self._seen = self._last = 0
