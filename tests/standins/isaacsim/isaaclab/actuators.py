"""Actuator groups of a configuration: names are regular expressions."""

from kit_standin.kit import require

require(__name__)

from .sim.configs import ImplicitActuatorCfg  # noqa: E402

__all__ = ["ImplicitActuatorCfg"]
