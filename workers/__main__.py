"""The worker's entry, run by path: `PYTHON .../workers/__main__.py --fd N --simulator NAME ...`.

Outboard is not installed in the simulator's interpreter. The first block makes the package visible there from
the host's own tree, and nothing else with it: no folder of the host is added to `sys.path`.
"""

import sys
import types
from os.path import abspath, dirname

if __package__ != "outboard.workers":
    here = dirname(abspath(__file__))
    # A worker file must never shadow the simulator it drives.
    sys.path[:] = [entry for entry in sys.path if abspath(entry) != here]
    sys.modules["outboard"] = types.ModuleType("outboard")
    sys.modules["outboard"].__path__ = [dirname(here)]
    # The worker site: what this interpreter lacks of numpy, msgpack and posix_ipc. Last, so that
    # the interpreter's own packages win.
    if "--site" in sys.argv:
        sys.path.append(sys.argv[sys.argv.index("--site") + 1])

from outboard.workers.serve import main

if __name__ == "__main__":
    main(sys.argv[1:])
