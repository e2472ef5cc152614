"""`outboard plan` as data and as a table."""

from __future__ import annotations

import io
import json

from rich.console import Console

from outboard.backends.plan_report import exit_code, plan_as_dict, print_plan
from standin_gpu import TWO, U0, U1, standin_environment

ENV = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8",
       "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2"}  # fmt: skip


def printed(answer: object) -> str:
    out = io.StringIO()
    print_plan(answer, Console(file=out, width=100))  # pyright: ignore[reportArgumentType]
    return out.getvalue()


def test_assumed_machine() -> None:
    answer = plan_as_dict(ENV, assume_gpus=f"{U0}, {U1}")
    assert exit_code(answer) == 0
    assert json.loads(json.dumps(answer)) == {
        "rank": 5,
        "local_rank": 1,
        "world_size": 8,
        "source": "torchrun",
        "device": {"kind": "gpu", "uuid": U1, "host_index": 1},
        "mask": U1,
        "why": "torchrun: LOCAL_RANK=1 of 2 takes entry 1 of 2 visible GPUs, "
        f"CUDA_VISIBLE_DEVICES unset: {U1}",
    }
    table = printed(answer)
    for text in ("5 of 8", "torchrun", U1, "takes entry 1"):
        assert text in table


def test_refused() -> None:
    answer = plan_as_dict(ENV, assume_gpus=U0)
    assert exit_code(answer) == 2
    assert set(answer) == {"error", "message"}
    assert answer["error"] == "DevicePlanError"  # pyright: ignore[reportTypedDictNotRequiredAccess, reportGeneralTypeIssues]
    table = printed(answer)
    assert "DevicePlanError" in table
    assert "2 local ranks" in table


def test_assumed_gpus_must_be_whole() -> None:
    answer = plan_as_dict(ENV, assume_gpus="GPU-ce08,1")
    assert exit_code(answer) == 2
    assert answer == {
        "error": "UsageError",
        "message": "an assumed GPU: 'GPU-ce08' is not a whole device UUID; "
        "write GPU-<8-4-4-4-12 hex>",
    }


def test_text_in_brackets_is_not_markup() -> None:
    assert "[bold]x" in printed({"error": "UsageError", "message": "[bold]x"})


def test_this_machine_through_the_standin() -> None:
    env = standin_environment(TWO, CUDA_VISIBLE_DEVICES="1,0", **ENV)
    answer = plan_as_dict(env)
    assert exit_code(answer) == 0
    assert answer["device"] == {"kind": "gpu", "uuid": U0, "host_index": 0}  # pyright: ignore[reportTypedDictNotRequiredAccess, reportGeneralTypeIssues]
