"""Experience from Gymnasium environments, on all cores of this machine.

A worker, which is a thread or a process, plays one client at a time: all its episodes side by side, an environment
each, and the policy acts for all of them at once. So what a client experiences depends on its parameters, task and key
alone, not on the workers; and trouble, be it an exception, a number that is not finite or the death of a process, costs
the client that ran into it and nobody else.
"""

import dataclasses
import json
import multiprocessing
import pickle
import signal
import threading
import traceback
import warnings
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import gymnasium
import jax
import numpy as np
from gymnasium import spaces

from ..errors import AtollError
from ..problems.base import Params
from ..problems.gymnasium import Make, load
from .objective import Rollout
from .policies import Policy

Env = gymnasium.Env[Any, Any]
Kind = Literal["threads", "processes"]

_KEPT = 100  # environments that a worker keeps for when their clients play again


class Trouble(Exception):
    """What went wrong for a client: in which part of the work, in which episode (None: in no single one), and how."""

    def __init__(self, part: str, episode: int | None, text: str) -> None:
        super().__init__(part, episode, text)  # all of it, so that it can be pickled
        self.part, self.episode, self.text = part, episode, text

    def of(self, client: int, task: Any) -> str:
        """The story in one line."""
        described = json.dumps(task)
        described = described if len(described) <= 80 else described[:77] + "..."
        episode = "" if self.episode is None else f", episode {self.episode}"
        return f"client {client} (task {described}){episode}: {self.text}"


class Form(NamedTuple):
    """What a policy must know of environments; the same for all clients."""

    observations: int  # numbers in an observation, flattened
    actions: int  # numbers in an action, or how many discrete actions there are
    discrete: bool

    @staticmethod
    def of(env: Env) -> "Form":
        """The form of `env`."""
        seen, acted = env.observation_space, env.action_space
        if not seen.is_np_flattenable:
            raise Trouble("make", None, f"its observation space is {seen}; wrap it so that it can be flattened")
        if isinstance(acted, spaces.Discrete):
            return Form(spaces.flatdim(seen), int(acted.n), True)
        if isinstance(acted, spaces.Box) and np.issubdtype(acted.dtype, np.floating):
            return Form(spaces.flatdim(seen), spaces.flatdim(acted), False)
        raise Trouble("make", None, f"its action space is {acted}; wrap it so that it is Discrete or a Box of floats")


def first_look(make: Make, task: Any) -> Form:
    """The form of all environments, learnt from the first one, which must also start and take a step."""
    env, form = _made(make, task, 0)
    try:
        _check_finite("observation", _reset(env, 0, 0)[None])
        middle = np.zeros(1, int) if form.discrete else np.zeros((1, form.actions))
        obs, reward, _ = _step(env, _Orders(env.action_space).give(middle)[0], 0)
        _check_finite("observation", obs[None])
        _check_finite("reward", np.array([reward]))
    finally:
        _close([env])
    return form


_enrolled: list[tuple[int, Any]] = []
_numbers: dict[tuple[int, str], int] = {}


def enrol(client: int, task: Any) -> int:
    """A number that stands for `client` with `task` in arrays.

    In this process it is the same for the same two, whatever run they are in: so runs whose clients have other tasks
    can go through one sampler at once.
    """
    key = (client, json.dumps(task, sort_keys=True))
    if key not in _numbers:
        _numbers[key] = len(_enrolled)
        _enrolled.append((client, task))
    return _numbers[key]


class Job(NamedTuple):
    """All that a worker must know to play a client."""

    make: str | bytes | Make  # import path, pickled, or the function itself
    form: Form
    episodes: int
    horizon: int
    policy: Policy
    number: int  # that `enrol` gave
    task: Any
    params: Params
    words: np.ndarray  # [2], the key
    patience: float | None  # seconds that a process may take over it (None: any number)


@dataclasses.dataclass(frozen=True)
class GymSampler:
    """Samples `episodes` of at most `horizon` steps per client on `count` workers; tasks are numbers from `enrol`."""

    make: str | bytes | Make
    form: Form
    episodes: int
    horizon: int
    kind: Kind
    count: int
    patience: float | None = None
    _told: dict[int, set[str]] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def prepare(self) -> None:
        """Raise `AtollError` if the workers could not start."""
        _crew(self.kind, self.count).try_one()

    def rollout(self, policy: Policy, params: Params, tasks: Any, keys: Any) -> Rollout:
        """Experience [N, E, H, ...] of clients with params [N, ...], tasks [N] and keys [N]; NaN of those that fail."""
        leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, params))
        words = np.asarray(jax.random.key_data(keys))
        numbers = np.asarray(tasks).tolist()

        def job(row: int, number: int) -> Job:
            mine = jax.tree.unflatten(structure, [leaf[row] for leaf in leaves])
            common = (self.make, self.form, self.episodes, self.horizon, policy)
            return Job(*common, number, _enrolled[number][1], mine, words[row], self.patience)

        found = _crew(self.kind, self.count).play([job(*row) for row in enumerate(numbers)])
        nothing = _blank(self.form, self.episodes, self.horizon, np.nan)
        for row, result in enumerate(found):
            if isinstance(result, Trouble):
                self._tell(numbers[row], result)
                found[row] = nothing
        return Rollout(*(np.stack(leaves) for leaves in zip(*found, strict=True)))

    def _tell(self, number: int, trouble: Trouble) -> None:
        told = self._told.setdefault(number, set())
        follows = trouble.part == "action" and bool(told)  # who failed and learns from it has no model any more
        if trouble.part not in told and not follows:
            told.add(trouble.part)
            story = trouble.of(*_enrolled[number])
            warnings.warn(f"{story}; it is left out each time this happens (said once)", stacklevel=3)


def _blank(form: Form, episodes: int, horizon: int, value: float) -> Rollout:
    shape = (episodes, horizon)
    obs = np.full((*shape, form.observations), value, np.float32)
    action = np.zeros(shape, np.int32) if form.discrete else np.full((*shape, form.actions), value, np.float32)
    return Rollout(obs, action, *(np.full(shape, value, np.float32) for _ in range(3)))


def _play(job: Job, envs: list[Env]) -> Rollout:
    """All episodes of a client, an environment each: [E, H, ...]."""
    episodes, horizon = job.episodes, job.horizon
    rng = np.random.Generator(np.random.Philox(key=job.words.astype(np.uint64)))
    seeds = rng.integers(2**31, size=episodes).tolist()
    noise = job.policy.noise(rng, (horizon, episodes), job.form.actions)
    out = _blank(job.form, episodes, horizon, 0.0)
    obs = np.stack([_reset(env, seed, episode) for episode, (env, seed) in enumerate(zip(envs, seeds, strict=True))])
    _check_finite("observation", obs)
    orders = _Orders(envs[0].action_space)
    alive = np.ones(episodes, bool)
    for t in range(horizon):
        action, log_prob = _act(job, obs, noise[t])
        out.obs[:, t], out.action[:, t], out.log_prob[:, t], out.alive[:, t] = obs, action, log_prob, alive
        told = orders.give(action)
        for episode in np.flatnonzero(alive).tolist():
            obs[episode], out.reward[episode, t], ended = _step(envs[episode], told[episode], episode)
            alive[episode] = not ended
        _check_finite("reward", out.reward[:, t])
        _check_finite("observation", obs)
        obs[~alive] = 0.0
        if not alive.any():
            # Steps after the end count for nothing, but their probabilities must not overflow: the policy acts on.
            later = np.s_[:, t + 1 :]
            action, log_prob = job.policy.act(job.params, out.obs[later].swapaxes(0, 1), noise[t + 1 :])
            out.action[later], out.log_prob[later] = action.swapaxes(0, 1), log_prob.swapaxes(0, 1)
            break
    return out


def _act(job: Job, obs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(over="ignore", invalid="ignore"):  # a model that is not finite is told of below
        action, log_prob = job.policy.act(job.params, obs, noise)
    _check_finite("action", action, log_prob)
    return action, log_prob


class _Orders:
    """From a policy's actions to those of an action space."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self._space = space
        if isinstance(space, spaces.Box):
            self._low, self._high = space.low.reshape(-1), space.high.reshape(-1)
            self._bounded = np.isfinite(self._low) & np.isfinite(self._high)
            low, high = (np.where(self._bounded, bound, 0.0) for bound in (self._low, self._high))
            self._middle, self._half = (high + low) / 2, (high - low) / 2

    def give(self, action: np.ndarray) -> list[Any]:
        """Of actions [E, A]: -1..1 becomes the whole range of a bounded number. Of numbers [E]: counted from start."""
        if isinstance(self._space, spaces.Discrete):
            start = int(self._space.start)
            return [start + number for number in action.tolist()]
        space = self._space
        assert isinstance(space, spaces.Box)
        scaled = np.where(self._bounded, self._middle + self._half * np.clip(action, -1, 1), action)
        told: np.ndarray = np.clip(scaled, self._low, self._high).astype(space.dtype)
        return list(told.reshape(len(action), *space.shape))


def _made(make: Make, task: Any, episode: int) -> tuple[Env, Form]:
    try:
        env = make(task)
        if not isinstance(env, gymnasium.Env):
            raise Trouble("make", episode, f"make returned {env!r}, which is no gymnasium.Env")
        return env, Form.of(env)
    except Trouble:
        raise
    except (Exception, SystemExit) as error:
        _raised("make", episode, error)


def _reset(env: Env, seed: int, episode: int) -> np.ndarray:
    try:
        obs, _ = env.reset(seed=seed)
    except (Exception, SystemExit) as error:
        _raised("reset", episode, error)
    return _flat(env.observation_space, obs, episode)


def _step(env: Env, action: Any, episode: int) -> tuple[np.ndarray, float, bool]:
    try:
        obs, reward, terminated, truncated, _ = env.step(action)
        number, ended = float(np.asarray(reward).item()), bool(terminated or truncated)
    except (Exception, SystemExit) as error:
        _raised("step", episode, error)
    return _flat(env.observation_space, obs, episode), number, ended


def _flat(space: spaces.Space[Any], obs: Any, episode: int) -> np.ndarray:
    box = isinstance(space, spaces.Box)
    try:
        flat = np.asarray(obs if box else spaces.flatten(space, obs), np.float32)
    except Exception as error:
        text = f"an observation does not fit its space {space}: {_words(error)}"
        raise Trouble("observation", episode, text) from error
    if box and flat.shape != space.shape:
        raise Trouble("observation", episode, f"an observation has shape {flat.shape}, its space says {space.shape}")
    if not box and flat.shape != (spaces.flatdim(space),):
        text = f"an observation has {flat.size} numbers, its space has {spaces.flatdim(space)}"
        raise Trouble("observation", episode, text)
    return flat.reshape(-1)


def _check_finite(part: str, *values: np.ndarray) -> None:
    """Every one of `values` [E, ...] must be finite."""
    for value in values:
        if not np.isfinite(value).all():
            fine = np.isfinite(value).reshape(len(value), -1).all(1)
            episode = int(np.argmin(fine))
            text = "its model's action" if part == "action" else f"the {part}"
            raise Trouble(part, episode, f"{text} is not finite: {value[episode].tolist()}")


def _raised(part: str, episode: int, error: BaseException) -> NoReturn:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    raise Trouble(part, episode, f"{part} raised {_words(error)} ({where})") from error


def _words(error: BaseException) -> str:
    """An error's kind, and what it says if it can."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _close(envs: list[Env]) -> None:
    for env in envs:
        with suppress(Exception):  # it is not needed any more: what it says in parting does not matter
            env.close()


class _Player(Protocol):
    def start(self) -> None:
        """Be ready."""
        ...

    def play(self, job: Job) -> Rollout | Trouble:
        """The experience of one client, or why there is none."""
        ...


class _Here:
    """A player in this process; keeps environments for when their clients play again."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, int], list[Env]] = OrderedDict()

    def start(self) -> None:
        """There is nothing to do."""

    def play(self, job: Job) -> Rollout | Trouble:
        """Trouble closes the client's environments: nobody knows what state they are in."""
        key = (job.make, job.number)
        envs = self._kept.pop(key, [])
        try:
            for episode in range(len(envs), job.episodes):
                envs.append(self._new(job, episode, envs))
            found = _play(job, envs[: job.episodes])
        except Trouble as trouble:
            _close(envs)
            return trouble
        self._kept[key] = envs
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _KEPT:
            _close(self._kept.popitem(last=False)[1])
        return found

    def _new(self, job: Job, episode: int, others: list[Env]) -> Env:
        env, form = _made(_function(job.make), job.task, episode)
        if any(env is other for other in others):
            raise Trouble("make", episode, "make returned an environment for the second time; each call must make one")
        if form != job.form:
            _close([env])
            raise Trouble("make", episode, f"its environment has {form}, that of client 0 has {job.form}")
        return env


@cache
def _function(make: str | bytes | Make) -> Make:
    function: Make = pickle.loads(make) if isinstance(make, bytes) else load("make", make)
    return function


class _Elsewhere:
    """A player in a process of its own, started when there is something to play, and again after it died."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None

    def play(self, job: Job) -> Rollout | Trouble:
        """If the process dies over it, so much for this client."""
        self.start()
        try:
            self._pipe.send(job)
            if not self._pipe.poll(job.patience):
                self._drop()
                text = f"its worker process gave no answer in {job.patience:g} s; another one takes its place"
                return Trouble("process", None, text)
            found: Rollout | Trouble | RuntimeError = self._pipe.recv()
        except (EOFError, OSError):
            return Trouble("process", None, f"its worker process died {self._end()}; another one takes its place")
        except BaseException:
            self._drop()
            raise
        if isinstance(found, RuntimeError):
            raise found
        return found

    def start(self) -> None:
        """Start the process, unless it is alive."""
        if self._process is not None and self._process.is_alive():
            return
        context = multiprocessing.get_context("spawn")  # JAX has threads: a forked copy of it would hang
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="atoll-gym", daemon=True)
        self._process.start()
        theirs.close()  # or its end would never be noticed
        try:
            self._pipe.recv()
        except (EOFError, OSError):
            raise AtollError(
                f"a worker process could not start (it ended {self._end()}; its own words are above): a script must "
                "begin its work under `if __name__ == '__main__':`; or let threads play: workers='threads'"
            ) from None
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        """Do without an answer that is still to come: it must not be taken for that to the next question."""
        self._process.kill()
        self._end()

    def _end(self) -> str:
        self._pipe.close()
        self._process.join()
        code, self._process = self._process.exitcode, None
        return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _serve(pipe: Any) -> None:
    """The life of a worker process: plays what it is sent until the other end of the pipe is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first of them decides
    jax.config.update("jax_platforms", "cpu")  # should environments use JAX, the GPU still belongs to the clients
    player = _Here()
    pipe.send("ready")
    with suppress(EOFError, OSError):
        while True:
            packed = pipe.recv_bytes()
            try:
                found: Any = player.play(pickle.loads(packed))
            except Exception as error:
                found = RuntimeError("in a worker process:\n" + "".join(traceback.format_exception(error)))
            pipe.send(found)


class _Crew:
    """Players who share out the work."""

    def __init__(self, kind: Kind, count: int) -> None:
        self._players: list[_Player] = [_Elsewhere() if kind == "processes" else _Here() for _ in range(count)]
        self._pool = ThreadPoolExecutor(count, "atoll-gym")
        self._busy = threading.Lock()

    def try_one(self) -> None:
        """See that players can start."""
        with self._busy:
            self._players[0].start()

    def play(self, jobs: list[Job]) -> list[Any]:
        """What became of each job. A client goes to the player that has its environments, unless another is idle."""
        count = len(self._players)
        found: list[Any] = [None] * len(jobs)
        stacks = [deque(i for i, job in enumerate(jobs) if job.number % count == k) for k in range(count)]

        def take(k: int) -> int | None:
            for stack in stacks[k:] + stacks[:k]:
                with suppress(IndexError):  # it is empty
                    return stack.popleft()
            return None

        def work(k: int) -> None:
            while (i := take(k)) is not None:
                found[i] = self._players[k].play(jobs[i])

        with self._busy:
            list(self._pool.map(work, range(count)) if count > 1 else map(work, range(1)))
        return found


@cache
def _crew(kind: Kind, count: int) -> _Crew:
    """Players stay for all runs of this process."""
    return _Crew(kind, count)
