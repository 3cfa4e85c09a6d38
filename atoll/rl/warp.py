"""Experience from MuJoCo Warp, thousands of simulations at a time on one NVIDIA GPU.

Policies and rewards of all clients and episodes are one compiled program, with one call in every step to MuJoCo Warp,
which replays a recorded graph of its kernels. Simulations lie flat for MuJoCo Warp, and as [clients, episodes] for the
policies. Single precision throughout.
"""

import copy
import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from ..errors import AtollError
from ..problems.base import Params
from .bodies import TORSO, Physics, World
from .objective import Rollout
from .policies import Policy

_PACKAGES = {"mujoco_warp": "mujoco-warp", "warp": "warp-lang"}
_TOO_LARGE = 1e10  # MuJoCo resets simulations that leave this range, or are no numbers at all
# Of the solver. MuJoCo in double precision was not seen to need more than 8. In single precision a simulation may
# never come to rest, and the solver's loop goes on for all of them until it has, or to the limit (MuJoCo's is 100).
ITERATIONS = 10
_CAPACITY = 0b1111  # of Warp's warnings, those about too few contacts or constraints


class State(NamedTuple):
    """All of simulations [B] that a step starts from, and the forces of the last one."""

    qpos: jax.Array  # [B, nq]
    qvel: jax.Array  # [B, nv]
    warmstart: jax.Array  # [B, nv] where the solver begins its search
    contact: jax.Array | None  # [B, bodies, 6] external forces; None for the cheetah


@dataclasses.dataclass(frozen=True)
class WarpSampler:
    """Samples `episodes` of `horizon` steps per client."""

    world: World
    episodes: int
    horizon: int

    def __post_init__(self) -> None:
        _warp()
        _need_gpu()

    def rollout(self, policy: Policy, params: Params, tasks: Any, keys: Any) -> Rollout:
        """Experience [N, E, H, ...] of clients with params [N, ...], tasks [N] and keys [N]."""
        _simulation(self.world, len(tasks) * self.episodes)  # errors show before anything is compiled
        played: Rollout = _play(self, policy, params, jnp.asarray(tasks, jnp.float32), keys)
        return played

    def _begin(self, keys: jax.Array) -> State:
        """Simulations [N * E] at the start of episodes."""
        world = self.world
        first = jax.vmap(lambda key: world.first(_draws(key), self.episodes))(keys)
        qpos, qvel = (jnp.asarray(x, jnp.float32).reshape(-1, x.shape[-1]) for x in first)
        still = State(qpos, qvel, jnp.zeros_like(qvel), None)
        if not world.ant:
            return still
        # An ant's first observation holds forces; its positions and velocities stay.
        moved = _simulation(world, len(qpos)).forward(jnp.zeros((len(qpos), world.actions)), still)
        return still._replace(contact=moved.contact)

    def _move(self, state: State, controls: jax.Array) -> State:
        """Apply controls [N, E, A] in [-1, 1]."""
        state = _simulation(self.world, len(state.qpos)).step(controls.reshape(len(state.qpos), -1), state)
        # As MuJoCo does, and Warp does not. One broken simulation would also make the solver's loop, which lasts until
        # all of them have converged, run to its limit for everybody.
        sound = (jnp.abs(state.qpos) < _TOO_LARGE).all(-1) & (jnp.abs(state.qvel) < _TOO_LARGE).all(-1)
        return State(
            jnp.where(sound[:, None], state.qpos, jnp.asarray(self.world.model.qpos0, jnp.float32)),
            jnp.where(sound[:, None], state.qvel, 0.0),
            jnp.where(sound[:, None], state.warmstart, 0.0),
            None if state.contact is None else jnp.nan_to_num(state.contact),  # those of one that broke are no numbers
        )

    def _look(self, state: State, before: jax.Array) -> Physics:
        """Simulations [B] that were at x = `before` [B]; what follows from positions and velocities is made anew.

        Forces stay those of the last step's beginning, as with MuJoCo.
        """
        world, qpos = self.world, state.qpos
        com, velocity = jax.jvp(partial(_centre, world.model), (qpos,), (_rates(world.model, qpos, state.qvel),))
        speed = (qpos[:, 0] - before) / world.seconds if world.dynamics == "gym" else velocity[:, 0]
        rotation = _matrix(qpos[:, 3:7]) if world.ant else None
        return Physics(qpos, state.qvel, com, speed, state.contact, rotation)


@partial(jax.jit, static_argnums=(0, 1))
def _play(sampler: WarpSampler, policy: Policy, params: Params, tasks: jax.Array, keys: jax.Array) -> Rollout:
    """All episodes of all clients, from the first step to the last."""
    world, shape = sampler.world, (len(tasks), sampler.episodes)
    moments = jax.vmap(lambda key: jax.random.split(key, 1 + sampler.horizon), out_axes=1)(keys)  # [1 + H, N]
    # All of it before the first step: in the loop it would be small kernels in every step.
    noise = jax.vmap(jax.vmap(lambda key: policy.noise(_draws(key), shape[1:], world.actions)))(moments[1:])

    def look(state: State, before: jax.Array) -> Physics:
        now: Physics = jax.tree.map(lambda x: x.reshape(shape + x.shape[1:]), sampler._look(state, before))
        return now

    def step(carry: tuple[State, Any, Any], noise: Any) -> tuple[tuple[State, Any, Any], Rollout]:
        state, obs, alive = carry
        action, log_prob = policy.act(params, obs, noise)
        controls = world.controls(jnp, action)
        before = state.qpos[:, 0]
        state = sampler._move(state, controls)
        now = look(state, before)
        reward = jnp.where(alive, world.reward(jnp, tasks[:, None], controls, now), 0.0)
        upright = alive & world.upright(jnp, now)
        played = Rollout(obs, action, log_prob, reward, alive.astype(obs.dtype))
        return (state, world.observe(jnp, now), upright), played

    state = sampler._begin(moments[0])
    obs = world.observe(jnp, look(state, state.qpos[:, 0]))
    _, played = jax.lax.scan(step, (state, obs, jnp.ones(shape, bool)), noise)
    ordered: Rollout = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), played)
    return ordered


class _Draws:
    """What worlds and policies use of NumPy's random generator, drawn from a JAX key."""

    def __init__(self, key: jax.Array) -> None:
        self._key = key

    def _next(self) -> jax.Array:
        keys = jax.random.split(self._key)
        self._key = keys[0]
        return keys[1]

    def uniform(self, low: float, high: float, size: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(self._next(), size, minval=low, maxval=high)

    def normal(self, loc: float, scale: float, size: tuple[int, ...]) -> jax.Array:
        return loc + scale * jax.random.normal(self._next(), size)

    def standard_normal(self, size: tuple[int, ...], dtype: Any = np.float32) -> jax.Array:
        return jax.random.normal(self._next(), size, dtype)


def _draws(key: jax.Array) -> Any:
    """In the place of a NumPy generator."""
    return _Draws(key)


def _warp() -> tuple[Any, Any]:
    """Warp, and MuJoCo for it; they are no part of a plain installation."""
    missing = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise AtollError(
            f"sampler warp needs {' and '.join(missing)}; install them by `pip install 'atoll[gpu]'`,"
            " or use sampler native (for a run that exists: --sampler native)"
        )
    warp = importlib.import_module("warp")
    warp.config.log_level = warp.LOG_WARNING  # it reports every kernel that it compiles
    return warp, importlib.import_module("mujoco_warp")


def _need_gpu() -> None:
    if jax.default_backend() != "gpu":
        raise AtollError(
            f"sampler warp needs an NVIDIA GPU, and JAX found {jax.default_backend()} only; `pip install 'atoll[gpu]'`"
            " on a machine that has one, or use sampler native (for a run that exists: --sampler native)"
        )


class Simulation(NamedTuple):
    """What can be done with simulations of one world, inside of compiled programs."""

    step: Callable[[jax.Array, State], State]  # with controls [B, A], all substeps
    forward: Callable[[jax.Array, State], State]  # only find the forces


@cache  # Warp keeps every function that it was given, and so its memory, for good: forgetting one would gain nothing
def _simulation(world: World, count: int) -> Simulation:
    """MuJoCo Warp with its own memory for `count` simulations; a program hands over a state and gets the next."""
    warp, mjw = _warp()
    contacts, constraints = _most(world.model)
    limited = copy.copy(world.model)
    limited.opt.iterations = ITERATIONS
    cuda = jax.default_backend() == "gpu"
    with warp.ScopedDevice("cuda:0" if cuda else "cpu"):
        model = mjw.put_model(limited)
        # Reaching the limit of iterations is no news in single precision, and every simulation would print it.
        model.opt.warn_overflow = _CAPACITY
        # Contacts are counted over all simulations, constraints in each.
        memory = mjw.make_data(limited, nworld=count, naconmax=count * contacts, njmax=constraints)
    sensing = model.opt.disableflags
    numb = sensing | int(mujoco.mjtDisableBit.mjDSBL_SENSOR)

    def steps(data: Any) -> None:
        for left in reversed(range(world.substeps)):
            # Sensors are there for the forces; only those of the last step are wanted.
            model.opt.disableflags = sensing if world.ant and left == 0 else numb
            mjw.step(model, data)

    def forward(data: Any) -> None:
        model.opt.disableflags = sensing
        mjw.forward(model, data)

    return Simulation(*(_called(world, count, memory, work, cuda) for work in (steps, forward)))


def _called(
    world: World, count: int, memory: Any, work: Callable[[Any], None], cuda: bool
) -> Callable[[jax.Array, State], State]:
    """`work` on MuJoCo Warp's data as a function of compiled programs."""
    warp, _ = _warp()
    matrix, forces = warp.array2d(dtype=float), warp.array2d(dtype=warp.spatial_vector)

    def cheetahs(controls: matrix, qpos: matrix, qvel: matrix, warmstart: matrix) -> None:  # type: ignore[valid-type]
        work(dataclasses.replace(memory, ctrl=controls, qpos=qpos, qvel=qvel, qacc_warmstart=warmstart))

    def ants(
        controls: matrix,  # type: ignore[valid-type]
        qpos: matrix,  # type: ignore[valid-type]
        qvel: matrix,  # type: ignore[valid-type]
        warmstart: matrix,  # type: ignore[valid-type]
        contact: forces,  # type: ignore[valid-type]
    ) -> None:
        state = {"qpos": qpos, "qvel": qvel, "qacc_warmstart": warmstart, "cfrc_ext": contact}
        work(dataclasses.replace(memory, ctrl=controls, **state))

    call = warp.jax_callable(
        ants if world.ant else cheetahs,
        num_outputs=4 if world.ant else 3,
        # Kernels are recorded once, with memory of their own, and replayed; on a CPU, for tests, nothing is recorded.
        graph_mode=warp.JaxCallableGraphMode.WARP_STAGED if cuda else warp.JaxCallableGraphMode.NONE,
        output_dims={"contact": (count, world.model.nbody)} if world.ant else None,
        in_out_argnames=["qpos", "qvel", "warmstart"],
    )

    def function(controls: jax.Array, state: State) -> State:
        found = call(controls, state.qpos, state.qvel, state.warmstart)
        return State(*found, *() if world.ant else (None,))

    return function


def _most(model: mujoco.MjModel) -> tuple[int, int]:
    """Contacts and constraints that a simulation can have at most: only the floor is ever touched, limbs pass through.

    A capsule touches it at two points, a sphere at one; a contact is four constraints (a pyramid of friction).
    """
    kinds = [int(kind) for kind in model.geom_type if kind != mujoco.mjtGeom.mjGEOM_PLANE]
    contacts = sum(2 if kind == mujoco.mjtGeom.mjGEOM_CAPSULE else 1 for kind in kinds)
    return contacts, int(model.jnt_limited.sum()) + 4 * contacts


def _centre(model: mujoco.MjModel, qpos: jax.Array) -> jax.Array:
    """Centre of mass [..., 3] of one tree of bodies whose limbs turn on hinges at the origins of their frames.

    It is the torso's place and, of every body, an arm that turns with it: the body's own centre of mass and the origins
    of what hangs on it, by their share of the mass. Number by number, so that XLA fuses it into few kernels.
    """
    arms = model.body_mass[:, None] * model.body_ipos
    for body in range(model.nbody - 1, TORSO, -1):
        parent = model.body_parentid[body]
        arms[parent] += model.body_subtreemass[body] * model.body_pos[body]
        if not model.body_jntnum[body]:  # it turns with its parent
            arms[parent] += arms[body]
    here: Any = tuple(model.body_pos[TORSO].tolist())
    turns: dict[int, tuple[Any, ...]] = {0: (1.0, 0.0, 0.0, 0.0)}  # quaternions
    total: Any = (0.0, 0.0, 0.0)
    for body in range(TORSO, model.nbody):
        turn, first = turns[model.body_parentid[body]], model.body_jntadr[body]
        for joint in range(first, first + model.body_jntnum[body]):
            start, kind, axis = model.jnt_qposadr[joint], model.jnt_type[joint], model.jnt_axis[joint]
            if kind == mujoco.mjtJoint.mjJNT_FREE:
                here, turn = tuple(qpos[..., start + i] for i in range(3)), _unit(qpos[..., start + 3 : start + 7])
            elif kind == mujoco.mjtJoint.mjJNT_SLIDE:
                here = _shifted(here, axis.tolist(), qpos[..., start])
            else:
                half = qpos[..., start] / 2
                turn = _product(turn, (jnp.cos(half), *(float(x) * jnp.sin(half) for x in axis)))
        turns[body] = turn
        if model.body_jntnum[body]:
            total = _shifted(total, _turned(turn, arms[body]))
    # Else XLA would compute all of it anew for every number of an observation.
    centre = jax.lax.optimization_barrier(_shifted(here, total, 1 / float(model.body_subtreemass[TORSO])))
    return jnp.stack(centre, -1)


def _rates(model: mujoco.MjModel, qpos: jax.Array, qvel: jax.Array) -> jax.Array:
    """Change of positions [..., nq] per second."""
    if model.nq == model.nv:
        return qvel
    # A free joint: its quaternion changes by half its product with the angular velocity, given in the body's frame.
    spin = _product(tuple(qpos[..., 3 + i] for i in range(4)), (0.0, *(qvel[..., 3 + i] / 2 for i in range(3))))
    return jnp.concatenate([qvel[..., :3], jnp.stack(spin, -1), qvel[..., 6:]], -1)


def _matrix(quaternion: jax.Array) -> jax.Array:
    """Rotation matrix [..., 9], row by row, of quaternions [..., 4] of any length."""
    way = _unit(quaternion)
    columns = [jnp.stack(jnp.broadcast_arrays(*_turned(way, axis)), -1) for axis in np.eye(3)]
    return jnp.stack(columns, -1).reshape(*quaternion.shape[:-1], 9)


def _unit(quaternion: jax.Array) -> tuple[Any, ...]:
    length = jnp.sqrt((quaternion**2).sum(-1))
    return tuple(quaternion[..., i] / length for i in range(4))


def _product(p: tuple[Any, ...], q: tuple[Any, ...]) -> tuple[Any, ...]:
    """The rotation p after q."""
    (a, b, c, d), (w, x, y, z) = p, q
    return (
        a * w - b * x - c * y - d * z,
        a * x + b * w + c * z - d * y,
        a * y - b * z + c * w + d * x,
        a * z + b * y - c * x + d * w,
    )


def _turned(turn: tuple[Any, ...], vector: Any) -> tuple[Any, ...]:
    """A constant vector, rotated."""
    (w, x, y, z), (a, b, c) = turn, (float(v) for v in vector)
    p, q, r = 2 * (y * c - z * b), 2 * (z * a - x * c), 2 * (x * b - y * a)
    return a + w * p + y * r - z * q, b + w * q + z * p - x * r, c + w * r + x * q - y * p


def _shifted(point: Any, by: Any, times: Any = 1.0) -> tuple[Any, ...]:
    return tuple(x + times * y for x, y in zip(point, by, strict=True))
