"""What a simulator needs of its process: one frozen record in each file under `backends/`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """An environment that a simulator has for itself, because a training environment should not hold it.
    `outboard setup NAME` makes it (`environments.py`); opening a backend finds it (`interpreters.py`).

    name                the word after `outboard setup`
    requirements        pip's words for the simulator; what every worker needs comes with them
    oldest, newest      Python versions it is known to work with
    size_gb             on disk, about: said before it is made, and that much must be free
    """

    name: str
    requirements: tuple[str, ...]
    oldest: tuple[int, int]
    newest: tuple[int, int]
    size_gb: float

    @property
    def variable(self) -> str:
        """Names an interpreter that comes before ours, as OUTBOARD_MJWARP_PYTHON."""
        return f"OUTBOARD_{self.name.upper()}_PYTHON"


@dataclass(frozen=True)
class Traits:
    """Facts about a simulator's runtime, not settings: a user never changes them.

    packages            what its interpreter must be able to import, beside ours
    init_s              from INIT to its reply, without progress; progress extends it
    init_hard_s         the same with progress: never longer
    close_s             what a clean exit may take before the process group is killed
    uuid_tokens         its runtime reads UUIDs in CUDA_VISIBLE_DEVICES; else an integer is sent
    python_flags        interpreter flags; `-E -s` keep the user's Python settings out
    pass_env            variables of the host it needs beyond the allow-list
    set_env             variables it is always given
    other_contexts      it puts contexts on GPUs other than its own and that cannot be helped: why
    gpu, cpu            it can run on a GPU; without one
    setup               the word after `outboard setup` that makes or fills its environment
    environment         how an environment of its own is made, where it has one
    """

    packages: tuple[str, ...] = ()
    init_s: float = 60.0
    init_hard_s: float = 600.0
    close_s: float = 5.0
    uuid_tokens: bool = True
    python_flags: tuple[str, ...] = ("-u", "-E", "-s", "-X", "faulthandler")
    pass_env: tuple[str, ...] = ()
    set_env: tuple[tuple[str, str], ...] = ()
    other_contexts: str = ""
    gpu: bool = False
    cpu: bool = True
    setup: str = "worker"
    environment: Recipe | None = None
