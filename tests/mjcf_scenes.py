"""A small legged robot as MJCF text, with holes that a test fills."""

from __future__ import annotations

from pathlib import Path

KNEE = '<position name="knee_servo" joint="knee" kp="30" kv="1"/>'


def leg(
    *,
    joint: str = "",
    shin: str = "",
    trunk: str = "",
    geom: str = "",
    world: str = '<geom name="floor" type="plane" size="0 0 1"/>',
    top: str = "",
    bottom: str = "",
    actuator: str = KNEE,
    base: str = '<freejoint name="base"/>',
    knee: str = '<joint name="knee" axis="0 1 0" {}/>',
) -> str:
    """One floating trunk (1 m up) with one shin on a hinge. Every hole takes XML or attributes."""
    return f"""<mujoco model="leg">
  {top}
  <worldbody>
    {world}
    <body name="trunk" pos="0 0 1">
      {base}
      <geom name="trunk_box" type="box" size=".1 .1 .1"/>
      <body name="shin" pos="0 0 -.2">
        {knee.format(joint)}
        <geom name="foot" size=".03" {geom}/>
        {shin}
      </body>
      {trunk}
    </body>
  </worldbody>
  <actuator>{actuator}</actuator>
  {bottom}
</mujoco>
"""


def write(folder: Path, text: str, name: str = "leg.xml") -> Path:
    """The text as a file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


TETRAHEDRON = """v 0 0 0
v .1 0 0
v 0 .2 0
v 0 0 .3
f 1 3 2
f 1 2 4
f 1 4 3
f 2 3 4
"""
