"""What can be seen from outside: one log line for each event of a life, a report as plain data, and the end
of the worker's log in every error."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outboard.backends import CustomBackend, FakeBackend, FakeCfg, OutboardError, WorkerFailed

Fake = Callable[..., FakeBackend]
Custom = Callable[..., CustomBackend]

PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


def events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, str]]]:
    """(event, its facts) of each line."""
    return [
        (
            message.partition(" ")[0],
            {k: json.loads(v) if v[0] == '"' else v for k, v in PAIR.findall(message)},
        )
        for message in caplog.messages
    ]


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outboard")


def without_progress(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [name for name, _ in events(caplog) if name != "INIT"]


def test_a_good_life_is_told_in_order(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    sim = fake(rank=3)
    sim.step()
    sim.close()
    assert without_progress(caplog) == ["SPAWNED", "HELLO", "READY", "CLOSED"]
    assert {name for name, _ in events(caplog)} >= {"INIT"}


def test_each_line_has_rank_pid_phase_and_seconds(
    fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    sim = fake(rank=3)
    pid = str(sim.report["pid"])
    sim.restart()
    sim.close()
    for name, facts in events(caplog):
        assert list(facts)[:4] == ["rank", "pid", "phase", "seconds"], name
        assert facts["rank"] == "3"
        assert 0.0 <= float(facts["seconds"]) < 60.0
    assert {facts["pid"] for _, facts in events(caplog)} > {pid}


def test_all_lines_come_from_one_logger(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake().close()
    assert {record.name for record in caplog.records} == {"outboard"}


def test_a_step_says_nothing(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    sim = fake()
    before = len(caplog.records)
    for _ in range(20):
        sim.step()
    assert len(caplog.records) == before


@pytest.mark.parametrize("at", ["build", "step"])
def test_a_failure_is_told_once_with_its_phase_and_cause(
    at: str, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = FakeCfg(fault='raise:with "quotes" and\nlines', fault_at=at)
    with pytest.raises(WorkerFailed), FakeBackend(device="cpu", num_envs=1, cfg=cfg) as sim:
        sim.step()
    [facts] = [facts for name, facts in events(caplog) if name == "FAILED"]
    assert facts["phase"] == {"build": "INIT", "step": "BUSY"}[at]
    assert facts["error"] == "WorkerFailed"
    assert facts["message"].endswith('with "quotes" and\nlines')
    assert all("\n" not in message for message in caplog.messages)
    [record] = [record for record in caplog.records if record.message.startswith("FAILED")]
    assert record.levelno == logging.ERROR


def test_a_restart_is_told_before_the_new_worker(
    fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    fake().restart()
    life = ["SPAWNED", "HELLO", "READY"]
    assert without_progress(caplog) == [*life, "RESTART", *life]


def test_a_worker_that_did_not_leave_well_is_a_warning(
    custom: Custom, caplog: pytest.LogCaptureFixture
) -> None:
    sim = custom("def close(self):\n    time.sleep(60)")
    log = sim.report["log_path"]
    sim.close(0.2)
    name, facts = events(caplog)[-1]
    assert (name, facts["left_well"]) == ("CLOSED", "False")
    assert facts["exit"].startswith("SIGKILL")
    assert caplog.records[-1].levelno == logging.WARNING
    os.unlink(log)


def test_a_dropped_backend_is_told_as_closed(caplog: pytest.LogCaptureFixture) -> None:
    sim = FakeBackend(device="cpu", num_envs=1)
    del sim
    assert without_progress(caplog)[-1] == "CLOSED"


def test_the_report_is_a_dict_that_json_takes(fake: Fake) -> None:
    report = fake(rank=2).report
    assert type(report) is dict
    facts: dict[str, Any] = json.loads(json.dumps(report))
    assert facts["rank"] == 2 and facts["phase"] == "READY"


# -- the worker's log ------------------------------------------------------------------------------------


def test_every_error_shows_the_last_fifty_lines(custom: Custom) -> None:
    sim = custom("""
def step(self, bank):
    for number in range(80):
        print("line", number)
    os._exit(3)
""")
    with pytest.raises(OutboardError) as caught:
        sim.step(np.zeros((3, 4), np.float32))
    assert caught.value.report is not None
    assert caught.value.report.log_tail == tuple(f"line {number}" for number in range(30, 80))
    assert "    | line 79" in str(caught.value)


def test_the_log_is_written_by_the_workers_own_descriptors(fake: Fake) -> None:
    """No thread of ours is in the way: a host that is stopped does not stop a worker that prints."""
    sim = fake()
    for number in (1, 2):
        assert os.readlink(f"/proc/{sim.report['pid']}/fd/{number}") == sim.report["log_path"]


def test_each_rank_has_a_log_of_its_own_in_a_private_folder(fake: Fake) -> None:
    paths = [Path(fake(rank=rank).report["log_path"]) for rank in (0, 1)]
    assert [path.name.split("-")[0] for path in paths] == ["rank0", "rank1"]
    assert paths[0].parent == paths[1].parent == Path(os.environ["XDG_RUNTIME_DIR"], "outboard")
    assert paths[0].parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}


def test_a_log_over_its_cap_starts_anew_and_keeps_its_end(
    custom: Custom, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outboard.backends import logs

    monkeypatch.setattr(logs, "CAP_BYTES", 1 << 20)
    sim = custom("""
def step(self, bank):
    for number in range(40):
        print(str(number) + "x" * 50000)
    print("the end")
    time.sleep(1.2)
    os.kill(os.getpid(), signal.SIGKILL)
""")
    with pytest.raises(OutboardError) as caught:
        sim.step(np.zeros((3, 4), np.float32))
    assert caught.value.report is not None
    assert caught.value.report.log_tail[-1] == "the end"
    assert os.path.getsize(caught.value.report.log_path) < 1 << 20
