"""Several backends opened at once: what ^C may not lose."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outboard.backends import CustomBackend
from outboard.backends.fleet import Fleet


def test_an_interrupt_inside_submit_loses_no_opener(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The opener runs already and nobody holds its future: close() would leave its worker building."""
    file = tmp_path / "slow.py"
    file.write_text(
        "import time\nfrom outboard.workers.fake_worker import FakeSimulator\n"
        "class Slow(FakeSimulator):\n    def build(self, init, progress):\n        time.sleep(20)\n"
    )
    submit = ThreadPoolExecutor.submit

    def interrupted(*args: Any, **named: Any) -> Any:
        future = submit(*args, **named)
        monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
        signal.raise_signal(signal.SIGINT)
        return future

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    fleet = Fleet([lambda: CustomBackend(simulator=f"{file}:Slow", device="cpu", num_envs=1)])
    try:
        with pytest.raises(KeyboardInterrupt):
            fleet.open()
    finally:
        signal.signal(signal.SIGINT, before)
        started = time.monotonic()
        fleet.close()
    assert time.monotonic() - started < 15.0, "close() waited for the opener it had lost"
