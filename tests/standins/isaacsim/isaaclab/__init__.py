"""The stand-in's `isaaclab`."""
