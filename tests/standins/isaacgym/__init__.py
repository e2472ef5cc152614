"""A stand-in for Isaac Gym: its interface and its habits, traps included, over MuJoCo.

Written from `facts/isaac-workers.md`, parts A and E, and from nothing of NVIDIA's. It is stricter than the
original where strictness finds mistakes: what is undefined there kills the process here. It proves nothing
about Isaac Gym; it proves that a worker calls it as documented. `settings.py` lists what tests can ask for.
"""

import os
import sys
import time

from . import gymdeps
from .settings import SETTINGS

# As native code does it: past sys.stdout, to wherever descriptor 1 points.
os.write(1, b"Importing module 'gym_38' (stand-in)\nSetting GYM_USD_PLUG_INFO_PATH to nothing\n")
if not (3, 6) <= sys.version_info[:2] < (3, 9):
    raise RuntimeError("No gym module found for the active version of Python")
gymdeps.check()
if SETTINGS.import_error:
    raise ImportError(SETTINGS.import_error)
if SETTINGS.import_s:
    time.sleep(SETTINGS.import_s)
