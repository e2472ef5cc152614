"""The step benchmark itself: a few cells run, the report is written from the JSON alone."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, cc")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # pyright: ignore[reportUnknownMemberType]
    return importlib.import_module("step_report")


def test_the_floor_and_ours_are_measured_and_reported(python38: str, tmp_path: Path) -> None:
    out, page = tmp_path / "step.json", tmp_path / "step.md"
    argv = [sys.executable, str(BENCHMARKS / "bench_step.py"), "--quick", "--rounds", "1"]
    argv += ["--only", "C spin;ours, unchecked", "--worker-python", python38]
    argv += ["--json", str(out), "--markdown", str(page)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["skipped"] == {}
    assert {cell["scheme"] for cell in result["cells"].values()} == {"C spin", "ours, unchecked"}
    assert all(run["median_us"] > 0 for runs in result["runs"].values() for run in runs)
    text = page.read_text()
    assert "of the same copies in C, unchecked" in text
    for private in (str(Path.home()), str(BENCHMARKS), sys.executable):
        assert private not in out.read_text() + text


def _result(ours_us: float, foreign: float = 0.0) -> dict[str, Any]:
    def runs(median_us: float) -> list[dict[str, float]]:
        return [{"median_us": median_us, "p99_us": 9.0, "mean_us": 2.0, "host_cpu": -1.0,
                 "foreign": foreign, "samples": 100}]  # fmt: skip

    return {
        "machine": {"cpu": "a processor", "cores": 2, "kernel": "6.1", "virtual": False,
                    "host_python": "3.11", "worker_python": "3.8", "nice": 0},
        "peers": {"gymnasium": ""},
        "runs": {"ours | 1 | 0 us | ": runs(ours_us), "C spin | 1 | 0 us | ": runs(0.1)},
        "skipped": {"gymnasium": "gymnasium did not install"},
    }  # fmt: skip


def test_a_goal_is_met_or_missed_by_the_numbers(report: Any, tmp_path: Path) -> None:
    page = tmp_path / "step.md"
    met, missed = (report.markdown(_result(us), page) for us in (1.5, 5.0))
    assert "| <= 17 x | 15 x | met |" in met
    assert "| <= 17 x | 50 x | MISSED |" in missed
    assert "gymnasium did not install" in met


def test_nothing_is_decided_beside_foreign_load(report: Any, tmp_path: Path) -> None:
    text: str = report.markdown(_result(1.5, foreign=0.5), tmp_path / "step.md")
    assert "| <= 17 x | 15 x | undecided: no quiet run |" in text


def test_what_a_person_wrote_is_kept(report: Any, tmp_path: Path) -> None:
    page = tmp_path / "step.md"
    text: str = report.markdown(_result(1.5), page)
    page.write_text(text.replace("<!-- end -->", "sleeping costs 25 us\n<!-- end -->"))
    assert "sleeping costs 25 us" in report.markdown(_result(2.0), page)
