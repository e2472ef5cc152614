"""Runs lists of `mutants.Job`s in an interpreter that a worker runs in."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutants import Job, as_data

TESTS = Path(__file__).resolve().parent


class Workshop:
    """Each list is run once, in two processes of `python script` whose forks start at once.

    reference: scenes in which MuJoCo's own worker is run first; scenes: those that jobs may name.
    """

    def __init__(
        self,
        folder: Path,
        python: Path,
        script: Path,
        reference: dict[str, Any],
        scenes: dict[str, Any],
    ) -> None:
        self._folder, self._python, self._script = folder, python, script
        self._known: dict[str, dict[str, dict[str, str]]] = {}
        self._work: dict[str, Any] = {"reference": str(folder / "reference")}
        self._run("reference", {**self._work, "scenes": reference})
        self._work["scenes"] = scenes

    def results(self, name: str, jobs: Sequence[Job]) -> dict[str, dict[str, str]]:
        """By the names of the jobs."""
        if name not in self._known:
            halves = [jobs[::2], jobs[1::2]]
            works = [{**self._work, "jobs": as_data(half)} for half in halves]
            with ThreadPoolExecutor(2) as pool:
                done = [pool.submit(self._run, f"{name}{i}", work) for i, work in enumerate(works)]
                answers = [each for one in done for each in one.result()]
            names = [job.name for half in halves for job in half]
            self._known[name] = dict(zip(names, answers, strict=True))
        return self._known[name]

    def _run(self, name: str, work: dict[str, Any]) -> Any:
        given, out = self._folder / f"{name}.json", self._folder / f"{name}-out.json"
        given.write_text(json.dumps(work))
        done = subprocess.run(
            [str(self._python), str(self._script), str(given), str(out)],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{TESTS.parent / '.src'}:{TESTS}",
                 "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=170,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text()) if out.exists() else None
