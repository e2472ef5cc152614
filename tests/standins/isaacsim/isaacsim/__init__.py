"""The stand-in's `isaacsim`: its first import asks for the licence on standard input, and tells where Kit's
files are."""

import os

from kit_standin.kit import info
from kit_standin.settings import SETTINGS

info("isaacsim stand-in: Warp 1.8.1 initialized")
if SETTINGS.import_error:
    raise ImportError(SETTINGS.import_error)
if os.environ.get("OMNI_KIT_ACCEPT_EULA", "").upper() not in ("YES", "Y"):
    os.write(1, b"Do you accept the EULA? (Yes/No): ")
    if input().strip().upper() != "YES":
        raise SystemExit("the EULA was not accepted")
os.environ.setdefault("EXP_PATH", os.path.dirname(os.path.abspath(__file__)))
__version__ = SETTINGS.version
