"""The cache of flat exports survives crowds and crashes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mjcf_scenes import TETRAHEDRON, leg, meshed, write
from outboard.backends.mjcf import default_cache_dir, export_flat, inspect
from outboard.ipc.errors import UsageError

pytest.importorskip("mujoco")


def test_the_same_robot_has_the_same_key_wherever_and_however_it_is_written(
    tmp_path: Path,
) -> None:
    one = inspect(write(tmp_path / "a", leg(joint='range="-90 90"')))
    spelled = leg(joint='range="-1.5707963267948966 1.5707963267948966" limited="true"')
    spelled = spelled.replace("<worldbody>", '<compiler angle="radian"/><worldbody>')
    other = inspect(write(tmp_path / "b", spelled, "x.xml"))
    first, second = export_flat(one, tmp_path / "cache"), export_flat(other, tmp_path / "cache")
    assert first == second
    assert first.path.parent.name == first.sha256 and len(first.sha256) == 64


def test_the_key_changes_with_the_xml_the_meshes_and_the_exporter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    keys = [export_flat(inspect(meshed(tmp_path, "")), cache).sha256]
    keys.append(export_flat(inspect(meshed(tmp_path, 'scale="2 2 2"')), cache).sha256)
    # A folder of its own: MuJoCo keeps meshes by path and by second of the last change.
    path = meshed(tmp_path / "longer", "")
    write(tmp_path / "longer", TETRAHEDRON.replace(".3", ".4"), "m.obj")
    keys.append(export_flat(inspect(path), cache).sha256)
    monkeypatch.setattr("outboard.backends.mjcf_flat.EXPORTER_VERSION", 0)
    keys.append(export_flat(inspect(path), cache).sha256)
    assert len(set(keys)) == 4


def test_the_file_name_has_one_dot_and_a_letter_first(tmp_path: Path) -> None:
    flat = export_flat(inspect(write(tmp_path, leg(), "9.my-robot.xml")), tmp_path / "cache")
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*\.xml", flat.path.name)


def test_a_second_export_writes_nothing(tmp_path: Path) -> None:
    model = inspect(meshed(tmp_path, ""))
    first = export_flat(model, tmp_path / "cache")
    before = {path: path.stat().st_mtime_ns for path in first.path.parent.iterdir()}
    assert export_flat(model, tmp_path / "cache") == first
    assert {path: path.stat().st_mtime_ns for path in first.path.parent.iterdir()} == before


def test_a_damaged_or_missing_file_is_replaced(tmp_path: Path) -> None:
    model = inspect(meshed(tmp_path, ""))
    flat = export_flat(model, tmp_path / "cache")
    flat.path.write_text("<mujoco")
    flat.mesh_paths[0].unlink()
    export_flat(model, tmp_path / "cache")
    assert flat.path.read_text() == model.flat.xml
    assert flat.mesh_paths[0].read_bytes() == model.flat.meshes[0][1]


BUILDER = """
import os, sys, time
from pathlib import Path
from outboard.backends import mjcf
scene, cache, start, mode = sys.argv[1:5]
model = mjcf.inspect(scene)
rename = Path.rename
def meet(self, target):  # wait until all eight are about to rename: seven are bound to lose
    while not target.exists() and len(list(self.parent.glob(".building-*"))) < 8:
        time.sleep(0.0005)
    return rename(self, target)
if mode == "meet":
    Path.rename = meet
if mode == "die":
    Path.rename = lambda *_: os._exit(9)  # all is written, nothing is in place
print("ready", flush=True)
while not os.path.exists(start):
    time.sleep(0.0005)
flat = mjcf.export_flat(model, Path(cache))
complete = flat.path.read_text() == model.flat.xml
complete = complete and all(
    path.read_bytes() == content
    for path, (_, content) in zip(flat.mesh_paths, model.flat.meshes)
)
print(flat.sha256, complete, flush=True)
"""


def builder(tmp_path: Path, scene: Path, mode: str = "") -> subprocess.Popen[str]:
    source = str(Path(__file__).resolve().parent.parent / ".src")
    arguments = [str(scene), str(tmp_path / "cache"), str(tmp_path / "start"), mode]
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, *arguments],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["", "meet"])
def test_eight_processes_that_build_the_same_model_at_once_all_get_it_whole(
    tmp_path: Path, mode: str
) -> None:
    scene = meshed(tmp_path, "")
    builders = [builder(tmp_path, scene, mode) for _ in range(8)]
    try:
        for process in builders:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        (tmp_path / "start").touch()
        answers = [process.communicate(timeout=60)[0] for process in builders]
    finally:
        for process in builders:
            process.kill()
            process.communicate()
    key = export_flat(inspect(scene), tmp_path / "cache").sha256
    assert answers == [f"{key} True\n"] * 8
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [key]


def test_a_builder_that_dies_leaves_nothing_that_could_be_taken_for_a_model(
    tmp_path: Path,
) -> None:
    scene = meshed(tmp_path, "")
    (tmp_path / "start").touch()
    process = builder(tmp_path, scene, "die")
    process.communicate(timeout=60)
    assert process.returncode == 9
    (left,) = (tmp_path / "cache").iterdir()
    assert left.name.startswith(".building-")
    flat = export_flat(inspect(scene), tmp_path / "cache")
    assert flat.path.is_file()
    assert left.exists()  # young: another process may be at work in it
    os.utime(left, (0, 0))
    export_flat(inspect(write(tmp_path, leg())), tmp_path / "cache")
    assert not left.exists()


def test_a_cache_that_cannot_be_written_is_the_callers_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UsageError, match="set XDG_CACHE_HOME"):
        export_flat(inspect(write(tmp_path, leg())), tmp_path / "cache")


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/outboard/models"),
        ({"HOME": "/h"}, "/h/.cache/outboard/models"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/outboard/models"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/outboard/models"),
    ],
)
def test_the_cache_is_where_the_users_caches_are(environ: dict[str, str], expected: str) -> None:
    assert default_cache_dir(environ) == Path(expected)
