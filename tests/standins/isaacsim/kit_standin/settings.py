"""What a test asks of the stand-in: `ISAACSIM_STANDIN="close=hang;launch_s=2"`, read once."""

import os
from typing import Dict


class Settings:
    """Every setting with its default; an unknown one is a mistake in the test."""

    def __init__(self, text: str) -> None:
        given: Dict[str, str] = dict(part.split("=", 1) for part in text.split(";") if part.strip())

        def take(name: str, default: str) -> str:
            return given.pop(name, default)

        self.version = take("version", "5.1.0")
        self.launch_s = float(take("launch_s", "0"))  # what a first start costs
        self.import_error = take("import_error", "")  # the loader's words
        self.clone_s = float(take("clone_s", "0"))
        # ok; software: a line in the log, and physics somewhere else; cpu: tensors in host memory
        # whatever was asked; zeros: a simulation that does nothing, without a word; segv
        self.physics = take("physics", "ok")
        self.importer = take(
            "importer", "ok"
        )  # ok; exit: the process ends with 0; none: no file; slow
        self.order = take("order", "permuted")  # permuted; document: of joints and bodies
        self.envs = take("envs", "same")  # same; reversed: rows of the view
        self.names = take("names", "same")  # same; joints, bodies, leg: the importer renames
        self.gains = take("gains", "held")  # held; lost: stiffness is not kept
        self.limits = take("limits", "imported")  # imported; lost: none until set; stuck: for ever
        self.masses = take(
            "masses", "imported"
        )  # imported; lost: mass 1 until set; stuck: for ever
        self.friction = take("friction", "held")  # held; lost: of shapes
        self.complain = take("complain", "")  # a text that every step logs
        # exit: the process ends inside, with code 0; hang: for ever; return
        self.close = take("close", "exit")
        self.record = take("record", "")  # a file: what the launcher was given, as JSON
        if given:
            raise ValueError("no such settings of the stand-in: {}".format(", ".join(given)))


SETTINGS = Settings(os.environ.get("ISAACSIM_STANDIN", ""))
