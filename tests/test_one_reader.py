"""House rule 11: launcher variables are read in one file, the mask in another, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parent.parent

LAUNCHER_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
                  "MASTER_ADDR", "MASTER_PORT", "ROLE_RANK"}  # fmt: skip
LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_", "RAY_", "UNILAB_DP_", "OMPI_", "PMI_", "JAX_")
MASK_NAMES = {
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
}
MAY_READ_LAUNCHER = {"backends/launchers.py"}
# serve.py echoes the mask in HELLO, unread.
MAY_READ_MASK = {"backends/visibility.py", "workers/serve.py"}
# The names that visibility.py gives to the mask and the order: everybody may write them into a
# worker's environment, nobody may look them up in this process's own.
MASK_CONSTANTS = {"MASK", "ORDER"}


def names_read(tree: ast.AST) -> set[str]:
    """Every string constant that could name a variable to read: all but keys that are written, and
    lists that a name is looked up in."""
    written: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            written |= {id(one) for group in node.comparators for one in getattr(group, "elts", ())}
        if isinstance(node, ast.Dict):
            written |= {id(key) for key in node.keys if key is not None}
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            written.add(id(node.slice))
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in written
    }


def looked_up_in_environ(tree: ast.AST) -> Iterator[str]:
    """MASK and ORDER where they are looked up in `os.environ`, in whatever way."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Subscript, ast.Call, ast.Compare)):
            continue
        own = ast.dump(node)
        if "attr='environ'" not in own and "attr='getenv'" not in own:
            continue
        for name in (one for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute))):
            text = name.id if isinstance(name, ast.Name) else name.attr
            if text in MASK_CONSTANTS:
                yield text


def breaches(files: Mapping[str, str]) -> list[str]:
    found: set[str] = set()
    for path, source in files.items():
        tree = ast.parse(source)
        names = names_read(tree)
        launcher = {
            name
            for name in names
            if name in LAUNCHER_NAMES
            or (name.startswith(LAUNCHER_PREFIXES) and name.isupper() and " " not in name)
        }
        mask = (names & MASK_NAMES) | set(looked_up_in_environ(tree))
        if path not in MAY_READ_LAUNCHER:
            found |= {f"{path} reads {name}" for name in launcher}
        if path not in MAY_READ_MASK:
            found |= {f"{path} reads {name}" for name in mask}
    return sorted(found)


def test_launcher_variables_and_mask_are_read_in_one_place() -> None:
    paths = (
        path for part in ("ipc", "workers", "backends") for path in (TREE / part).rglob("*.py")
    )
    files = {str(path.relative_to(TREE)): path.read_text(encoding="utf-8") for path in paths}
    assert set(files) >= MAY_READ_LAUNCHER | MAY_READ_MASK
    assert breaches(files) == []


@pytest.mark.parametrize(
    "line",
    [
        'x = os.environ["LOCAL_RANK"]',
        'x = os.environ.get("SLURM_LOCALID", 0)',
        'x = os.getenv("UNILAB_DP_RANK")',
        'NAME = "CUDA_VISIBLE_DEVICES"\nx = os.environ[NAME]',
        'x = "RAY_JOB_ID" in os.environ',
        'x = os.environ.pop("CUDA_DEVICE_ORDER")',
        "x = os.environ[MASK]",
        "x = os.environ.get(visibility.ORDER)",
        "x = os.getenv(MASK)",
        "x = MASK in os.environ",
    ],
)
@pytest.mark.parametrize("file", ["backends/planted.py", "backends/rank_plan.py", "ipc/shm.py"])
def test_a_second_reader_is_found(file: str, line: str) -> None:
    assert len(breaches({file: f"import os\n{line}\n"})) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("backends/launchers.py", 'x = env["CUDA_VISIBLE_DEVICES"]'),
        ("backends/visibility.py", 'x = env["LOCAL_RANK"]'),
    ],
)
def test_a_file_that_may_read_one_kind_may_not_read_the_other(file: str, line: str) -> None:
    assert len(breaches({file: line})) == 1


def test_writing_them_into_an_environment_is_no_reading() -> None:
    written = 'env["LOCAL_RANK"] = "0"\nenv = {"RANK": "1"}\nenv[MASK] = worker.env[MASK]'
    assert breaches({"backends/planted.py": written}) == []
