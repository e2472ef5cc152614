"""From MJCF to USD, with a cache that is marked before the work is done."""

import os
from typing import Any

from kit_standin.importer import convert
from kit_standin.kit import KIT, require

require(__name__)

from .configs import MjcfConverterCfg, validate  # noqa: E402

__all__ = ["MjcfConverter", "MjcfConverterCfg"]


class MjcfConverter:
    def __init__(self, cfg: Any) -> None:
        validate(cfg)
        if "isaacsim.asset.importer.mjcf" not in KIT.extensions:
            raise RuntimeError(
                "the command MJCFCreateAsset is not there: its extension is not enabled"
            )
        if not os.path.isfile(cfg.asset_path):
            raise ValueError(f"The asset path does not exist: {cfg.asset_path}")
        stem, _ = os.path.basename(cfg.asset_path).split(".")  # ValueError for a second dot
        name = cfg.usd_file_name or stem + ".usd"
        folder = cfg.usd_dir or "/tmp/IsaacLab"
        os.makedirs(folder, exist_ok=True)
        self.usd_path = os.path.join(folder, name)
        mark = os.path.join(folder, ".asset_hash")
        if cfg.force_usd_conversion or not os.path.exists(mark):
            with open(mark, "w", encoding="utf-8") as file:
                file.write("hash")
            convert(cfg.asset_path, self.usd_path, "/" + stem, cfg.fix_base)
