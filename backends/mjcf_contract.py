"""The contract file: what a worker must know of a model beside the flat MJCF, as JSON.

An importer of the flat MJCF loses gains, limits, friction and inertia axes, and a worker's interpreter has
no MuJoCo to ask. So everything that `inspect` found is written beside the exports, in one file whose name
is the hash of its content; `workers/contract.py` reads it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from ..ipc.errors import UsageError
from .mjcf_flat import FlatModel
from .mjcf_model import Model

CONTRACT_VERSION = 1  # known to `workers/contract.py`, which refuses any other

# Fields of Model that are for people or for the host alone.
_LEFT_OUT = ("flat", "sensors", "excludes", "colliding_pairs", "keyframe")


def contract_text(model: Model, flat: FlatModel) -> str:
    """The file's content. Infinite limits are written as Python's json does, `Infinity`."""
    content: dict[str, Any] = {"version": CONTRACT_VERSION, "flat_sha256": flat.sha256}
    for field in dataclasses.fields(model):
        if field.name not in _LEFT_OUT:
            content[field.name] = _plain(getattr(model, field.name))
    content["shape_friction"] = _shape_friction(model.flat.xml)
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _shape_friction(xml: str) -> list[float]:
    """Sliding friction of every shape of the export, in its order: body by body."""
    geoms = ET.fromstring(xml).iter("geom")
    return [float(geom.get("friction", "1").split()[0]) for geom in geoms]


def write_contract(model: Model, flat: FlatModel, cache_dir: Path) -> Path:
    """Put the contract into the cache, or find it there. UsageError when it cannot be written."""
    content = contract_text(model, flat).encode()
    path = cache_dir / f"{hashlib.sha256(content).hexdigest()}.json"
    try:
        if not (path.is_file() and path.read_bytes() == content):
            handle, temporary = tempfile.mkstemp(prefix=".building-", dir=cache_dir)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, path)  # whole or not at all; another rank's file is the same
    except OSError as error:
        raise UsageError(
            f"the model cache {cache_dir} cannot be written: {error}; set XDG_CACHE_HOME"
        ) from error
    return path
