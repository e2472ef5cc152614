"""What a test asks of the stand-in: `ISAACGYM_STANDIN="create=none;import_s=2"`, read once."""

import os
from typing import Dict


class Settings:
    """Every setting with its default; an unknown one is a mistake in the test."""

    def __init__(self, text: str) -> None:
        given: Dict[str, str] = dict(part.split("=", 1) for part in text.split(";") if part.strip())

        def take(name: str, default: str) -> str:
            return given.pop(name, default)

        self.import_s = float(take("import_s", "0"))  # what an import from a cold disk costs
        self.import_error = take("import_error", "")  # the loader's words
        self.actor_s = float(take("actor_s", "0"))  # each create_actor
        # ok; none: create_sim returns None; segv; bad_ordinal, no_kernel, oom: an error in the log and a
        # simulation that does nothing; zeros: the same without a word; cpu: PhysX falls back to the CPU
        self.create = take("create", "ok")
        self.prepare = take("prepare", "ok")  # ok; false
        self.order = take("order", "same")  # same; reversed: joints and bodies in another order
        self.gpu = take(
            "gpu", "cuda"
        )  # cuda: memory of the driver; host: plain memory that says GPU
        # abort: what is undefined ends the process; replace: a second setter replaces the first
        self.strict = take("strict", "abort")
        self.limits = take("limits", "held")  # held; lost: joint limits do not survive their setter
        self.gains = take("gains", "held")  # held; lost: the same of stiffness
        self.refuse = take("refuse", "")  # the name of a method that returns False
        self.complain = take("complain", "")  # the name of a method that logs an error and goes on
        self.destroy = take("destroy", "ok")  # ok; hang; segv
        self.child = (
            take("child", "") == "1"
        )  # create_sim starts a process that holds descriptors open
        self.physics = take("physics", "mujoco")  # mujoco; frozen: nothing moves, for thousands
        self.count = take("count", "")  # a file: calls are counted and written there at destroy_sim
        if given:
            raise ValueError("no such settings of the stand-in: {}".format(", ".join(given)))


SETTINGS = Settings(os.environ.get("ISAACGYM_STANDIN", ""))
