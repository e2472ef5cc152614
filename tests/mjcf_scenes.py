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

MESH = '<asset><mesh name="m" file="m.obj"/></asset>'

FLOOR = '<geom name="floor" type="plane" size="0 0 1" {}/>'

# Another file, whose robot comes by <attach> from leg.xml.
ATTACHED = """<mujoco><asset><model name="leg" file="leg.xml"/></asset>
<worldbody><attach model="leg" body="trunk" prefix="left_"/></worldbody></mujoco>"""

STAND = 'name="stand" qpos="0 0 .5 2 0 0 0 .3"'  # attributes of a <key>


def key(attributes: str) -> str:
    """A section with one keyframe."""
    return f"<keyframe><key {attributes}/></keyframe>"


def position(attributes: str) -> str:
    """The knee's actuator."""
    return f'<position name="knee_servo" joint="knee" {attributes}/>'


def meshed(folder: Path, attributes: str) -> Path:
    """The leg with a collision mesh (geom 3, attributes of its <mesh> given) and a visual one."""
    write(folder, TETRAHEDRON, "m.obj")
    top = f'<asset><mesh name="m" file="m.obj" {attributes}/></asset>'
    shin = (
        '<geom type="mesh" mesh="m" pos="0 .1 0" euler="10 20 30"/>'
        '<geom type="mesh" mesh="m" contype="0" conaffinity="0"/>'
    )
    return write(folder, leg(top=top, shin=shin))
