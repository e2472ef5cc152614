"""Warp kernels of the MuJoCo-Warp worker: controls in, states put, forces and flags computed, fields out.

All are launched over environments (or over bodies or contacts of all environments) and recorded into graphs.
Quaternions lie wxyz in memory, as MuJoCo-Warp keeps them.
"""

# pyright: basic, reportInvalidTypeForm=false, reportMissingImports=false, reportCallIssue=false
# (Annotations are Warp's own types, and Warp is not in the environment of the type checker.)

import warp as wp  # type: ignore[import-not-found]

from ..ipc.layout import ENV_NONFINITE

wp.set_module_options({"enable_backward": False})

# mjMAXVAL: a control beyond it is no control for MuJoCo.
MAX_CTRL = wp.constant(1.0e10)
NONFINITE = wp.constant(ENV_NONFINITE)


@wp.kernel
def take_ctrl(
    given: wp.array2d(dtype=float),
    ctrl: wp.array2d(dtype=float),
    bad: wp.array(dtype=wp.uint8),
    commands: wp.array(dtype=int),
):
    """As mj_step: where one control is NaN or huge, all of that environment's are zero. Counts commands."""
    env = wp.tid()
    good = bool(True)  # noqa: UP018 - a variable to Warp, where a literal is a constant
    for i in range(given.shape[1]):
        if not (wp.abs(given[env, i]) <= MAX_CTRL):
            good = False
    for i in range(given.shape[1]):
        ctrl[env, i] = wp.where(good, given[env, i], 0.0)
    bad[env] = wp.where(good, wp.uint8(0), wp.uint8(1))
    if env == 0:
        commands[0] = commands[0] + 1


@wp.kernel
def choose(mask: wp.array(dtype=wp.uint8), chosen: wp.array(dtype=wp.bool)):
    env = wp.tid()
    chosen[env] = mask[env] != wp.uint8(0)


@wp.kernel
def put_default(
    chosen: wp.array(dtype=wp.bool),
    start_qpos: wp.array(dtype=float),
    start_qvel: wp.array(dtype=float),
    start_act: wp.array(dtype=float),
    qpos: wp.array2d(dtype=float),
    qvel: wp.array2d(dtype=float),
    act: wp.array2d(dtype=float),
    bad: wp.array(dtype=wp.uint8),
):
    env = wp.tid()
    if chosen[env]:
        for i in range(qpos.shape[1]):
            qpos[env, i] = start_qpos[i]
        for i in range(qvel.shape[1]):
            qvel[env, i] = start_qvel[i]
        for i in range(act.shape[1]):
            act[env, i] = start_act[i]
        bad[env] = wp.uint8(0)


@wp.kernel
def put_rows(
    chosen: wp.array(dtype=wp.bool),
    new_qpos: wp.array2d(dtype=float),
    new_qvel: wp.array2d(dtype=float),
    qpos: wp.array2d(dtype=float),
    qvel: wp.array2d(dtype=float),
    bad: wp.array(dtype=wp.uint8),
):
    """Row i for environment i."""
    env = wp.tid()
    if chosen[env]:
        for i in range(qpos.shape[1]):
            qpos[env, i] = new_qpos[env, i]
        for i in range(qvel.shape[1]):
            qvel[env, i] = new_qvel[env, i]
        bad[env] = wp.uint8(0)


@wp.kernel
def forget_forces(chosen: wp.array(dtype=wp.bool), force: wp.array2d(dtype=wp.vec3)):
    env, body = wp.tid()
    if chosen[env]:
        force[env, body] = wp.vec3(0.0, 0.0, 0.0)


@wp.kernel
def add_forces(
    nacon: wp.array(dtype=int),
    geom: wp.array(dtype=wp.vec2i),
    world: wp.array(dtype=int),
    geom_body: wp.array(dtype=int),
    wrench: wp.array(dtype=wp.spatial_vector),
    force: wp.array2d(dtype=wp.vec3),
):
    """Contact `i` pushes the body of its second geom along `wrench` (world axes), that of its first back.
    A geom of -1 belongs to a flex, body 0 is the world: neither is published."""
    i = wp.tid()
    if i >= nacon[0]:
        return
    push = wp.spatial_top(wrench[i])
    for side in range(2):
        if geom[i][side] >= 0:
            body = geom_body[geom[i][side]]
            if body > 0:
                wp.atomic_add(force, world[i], body - 1, wp.where(side == 1, push, -push))


@wp.kernel
def judge(
    qpos: wp.array2d(dtype=float),
    qvel: wp.array2d(dtype=float),
    bad: wp.array(dtype=wp.uint8),
    overflow: wp.array(dtype=int),
    fatal: int,
    commands: wp.array(dtype=int),
    flags: wp.array(dtype=wp.uint8),
    seen: wp.array(dtype=int),
):
    """flags: what is not finite. seen: all fatal bits so far, the lowest environment and the first command
    that had one."""
    env = wp.tid()
    good = bad[env] == wp.uint8(0)
    for i in range(qpos.shape[1]):
        if not wp.isfinite(qpos[env, i]):
            good = False
    for i in range(qvel.shape[1]):
        if not wp.isfinite(qvel[env, i]):
            good = False
    flags[env] = wp.where(good, wp.uint8(0), wp.uint8(NONFINITE))
    bits = overflow[env] & fatal
    if bits != 0:
        wp.atomic_or(seen, 0, bits)
        wp.atomic_min(seen, 1, env)
        wp.atomic_min(seen, 2, commands[0])


@wp.kernel
def positions(xpos: wp.array2d(dtype=wp.vec3), out: wp.array2d(dtype=wp.vec3)):
    env, body = wp.tid()
    out[env, body] = xpos[env, body + 1]


@wp.kernel
def orientations(xquat: wp.array2d(dtype=wp.quat), out: wp.array2d(dtype=wp.quat)):
    env, body = wp.tid()
    out[env, body] = xquat[env, body + 1]


@wp.kernel
def angular_velocities(cvel: wp.array2d(dtype=wp.spatial_vector), out: wp.array2d(dtype=wp.vec3)):
    env, body = wp.tid()
    out[env, body] = wp.spatial_top(cvel[env, body + 1])


@wp.kernel
def linear_velocities(
    cvel: wp.array2d(dtype=wp.spatial_vector),
    xpos: wp.array2d(dtype=wp.vec3),
    subtree_com: wp.array2d(dtype=wp.vec3),
    root: wp.array(dtype=int),
    out: wp.array2d(dtype=wp.vec3),
):
    """cvel is about the centre of mass of the body's whole tree: v(origin) = v(com) + omega x (origin - com),
    mj_objectVelocity's rule."""
    env, body = wp.tid()
    i = body + 1
    spin = wp.spatial_top(cvel[env, i])
    arm = xpos[env, i] - subtree_com[env, root[i]]
    out[env, body] = wp.spatial_bottom(cvel[env, i]) + wp.cross(spin, arm)
