"""The peers that fork their worker, and so cannot start another interpreter: PufferLib and gymnasium."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from typing import Any

import numpy as np
from peers import Link, Stale
from step_work import NU, WIDTH, make_prepare


class PufferLib(Link):
    """pufferlib's own vector.Multiprocessing: one worker, one native environment of `num_envs` agents.
    It forks, so the worker cannot be another interpreter."""

    def open(self) -> None:
        import gymnasium  # pyright: ignore

        puffer, num_envs, options = _puffer(), self.num_envs, self.options
        box: Any = gymnasium.spaces.Box

        class Env(puffer.PufferEnv):
            def __init__(self, buf: Any = None, seed: int = 0) -> None:
                self.single_observation_space = box(-1e9, 1e9, (WIDTH,), np.float32)
                self.single_action_space = box(-1e9, 1e9, (NU,), np.float32)
                self.num_agents = num_envs
                super().__init__(buf)
                self.source = np.ones((num_envs, WIDTH), np.float32)
                self.prepare: Any = None

            def reset(self, seed: int = 0) -> Any:
                self.prepare = make_prepare(
                    self.source, options
                )  # in the worker: it may need a thread
                return self.observations, []

            def step(self, actions: Any) -> Any:
                self.prepare(actions[0, 0])
                self.observations[...] = self.source
                return self.observations, self.rewards, self.terminals, self.truncations, []

            def close(self) -> None:
                pass

        self.vector: Any = puffer.vector.Multiprocessing(
            [Env], [[]], [{}], 1, num_workers=1, batch_size=1
        )
        self.pid = self.vector.processes[0].pid
        self.vector.async_reset(0)
        self.vector.recv()
        ctrl, stamp, send, receive = self.ctrl, self.stamp, self.vector.send, self.vector.recv

        def step(i: int) -> None:
            stamp[0] = i
            send(ctrl)
            self.state = state = receive()[0][0]
            if state[0] != i:
                raise Stale(i)

        self.step = step

    def close(self) -> None:
        for process in self.vector.processes:
            process.kill()
            process.join()


def _puffer() -> Any:
    """pufferlib without what needs torch: its __init__ imports the trainer too."""
    spec = importlib.util.find_spec("pufferlib")
    if spec is None or spec.origin is None:
        raise ImportError("pufferlib is not installed")
    package: Any = types.ModuleType("pufferlib")
    package.__path__ = [os.path.dirname(spec.origin)]
    sys.modules["pufferlib"] = package
    package.spaces = importlib.import_module("pufferlib.spaces")
    core = importlib.import_module("pufferlib.pufferlib")
    names = "PufferEnv set_buffers unroll_nested_dict APIUsageError InvalidAgentError"
    for name in (*names.split(), "EnvironmentSetupError"):
        setattr(package, name, getattr(core, name))
    package.emulation = importlib.import_module("pufferlib.emulation")
    package.vector = importlib.import_module("pufferlib.vector")
    return package


class Gymnasium(Link):
    """gymnasium's AsyncVectorEnv(shared_memory=True, copy=False) with one environment whose
    observation is the whole state array. It forks, too."""

    def open(self) -> None:
        from gymnasium.vector import AsyncVectorEnv  # pyright: ignore

        num_envs, options = self.num_envs, self.options
        self.vector: Any = AsyncVectorEnv(
            [lambda: _gym_env(num_envs, options)], shared_memory=True, copy=False
        )
        self.pid = self.vector.processes[0].pid
        self.vector.reset(seed=0)
        ctrl, stamp, take = self.ctrl[None], self.stamp, self.vector.step

        def step(i: int) -> None:
            stamp[0] = i
            self.state = state = take(ctrl)[0][0, 0]
            if state[0] != i:
                raise Stale(i)

        self.step = step

    def close(self) -> None:
        self.vector.close(terminate=True)


def _gym_env(num_envs: int, options: dict[str, Any]) -> Any:
    import gymnasium  # pyright: ignore

    box: Any = gymnasium.spaces.Box

    class Env(gymnasium.Env):  # pyright: ignore
        observation_space = box(-1e9, 1e9, (num_envs, WIDTH), np.float32)
        action_space = box(-1e9, 1e9, (num_envs, NU), np.float32)
        source = np.ones((num_envs, WIDTH), np.float32)
        prepare = staticmethod(make_prepare(source, options))
        info: dict[str, Any] = {}  # noqa: RUF012 - one object for all steps, on purpose

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return self.source, self.info

        def step(self, action: Any) -> Any:
            self.prepare(action[0, 0])
            return self.source, 0.0, False, False, self.info

    return Env()


LINKS: dict[str, type[Link]] = {"PufferLib": PufferLib, "gymnasium": Gymnasium}
