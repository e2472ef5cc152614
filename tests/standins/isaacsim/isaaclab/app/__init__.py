"""The one part that may be imported before Kit runs."""

from .app_launcher import AppLauncher

__all__ = ["AppLauncher"]
