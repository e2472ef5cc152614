"""What the stand-in packages `isaacsim` and `isaaclab` beside this one share: Kit's state, its physics
(MuJoCo), its physics views, and what a test may ask of them.

Written from `facts/isaac-workers.md`, part B and E.4, and from nothing of NVIDIA's. Stricter than the
original where strictness finds mistakes. It proves nothing about Isaac Sim; it proves that a worker calls
it as documented.
"""
