"""The leading party with the others on machines of their own: the order of calls over a network, and what if one fails.

What is computed is `protocol.step`, to the same numbers. The order of calls saves round trips: all parties are asked at
once where the method lets them work at once; what a party does after learning (give values, act) it is told in the
same frame, or while the next party learns; and what the lead does between two answers is one program.

Every `every` steps all parties write a checkpoint, the lead last. When a party is lost, all go back to the newest step
that everyone has, and the numbers are those of a run that was never interrupted.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import AtollError, check_counts, require
from . import protocol, wire
from .checkpoints import Checkpoints
from .hosted import HostedLead, host_lead
from .networks import Head
from .parties import Lead
from .protocol import Correction, Joint, Noised, Phase, Records, Values
from .remote import Gone, RemotePeer, ask_all
from .service import fingerprint, secret_key
from .training import Tally, exam_key
from .trials import Experiment, Record, Watcher

_AGAIN = 0.5  # seconds between two tries to reach a party
_NOTIFY = 10.0  # seconds a party is missing before it is said


class _Asked(NamedTuple):
    """What an update of the lead brings: for the others, and the records of the next one."""

    told: Any  # Y, its own values and the head; or slopes
    rows: Records | None


def _open(lead: Lead, seen: tuple[Noised, ...], draws: bool) -> tuple[Joint, Any, Records | None]:
    action = lead.choose(seen)
    lead.move(action)
    assert lead.outcome is not None
    return action, jnp.mean(lead.outcome.reward), lead.draw() if draws else None


def _update(lead: Lead, rows: Records, answers: tuple[Values, ...], draws: bool) -> _Asked:
    now = tuple(answer.now for answer in answers)
    y = lead.target(rows, tuple(answer.following for answer in answers))
    if lead.shares_head:
        lead.learn(rows, y, now)
        told: Any = (y, lead.share(rows), lead.head)
    else:
        told = lead.slopes(rows, y, now)
        lead.learn(rows, y, now)
        lead.adopt(None)
    # Nothing that the others still do changes what is drawn next.
    return _Asked(told, lead.draw() if draws else None)


def _adopt(lead: Lead, head: Head) -> None:
    lead.adopt(head)


def _answer_exam(lead: Lead, seen: tuple[Noised, ...]) -> Joint:
    return lead.choose(seen)


def _move_exam(lead: Lead, action: Joint, tally: Tally) -> Tally:
    lead.move(action)
    assert lead.outcome is not None
    return tally.note(lead.outcome)


def remote_step(
    lead: HostedLead, peers: Sequence[RemotePeer], seen: tuple[Noised, ...], updates: int
) -> tuple[tuple[Noised, ...], float]:
    """`protocol.step`; also the mean reward."""
    train = Phase.TRAIN
    action, reward, rows = lead.run(_open, seen, draws=updates > 0)
    if not updates:
        return _each(peers, train, "act", action), float(reward)
    answers = _each(peers, train, "values", rows)
    for left in reversed(range(updates)):
        now = tuple(answer.now for answer in answers)
        told, following = lead.run(_update, rows, answers, draws=left > 0)
        then: tuple[str, Any] = ("values", following) if left else ("act", action)
        if lead.shares_head:
            y, first, head = told
            asked = []
            for peer in peers:
                lesson = ("learn", protocol.lesson(peer.place, rows, y, first, now, head))
                if peer is peers[-1]:
                    head, answer = peer.ask(train, lesson, then)
                else:
                    (head,) = peer.ask(train, lesson)
                    asked.append(peer.send(train, then))
            answers = (*(pending.answers()[0] for pending in asked), answer)
            lead.run(_adopt, head)
        else:
            corrections = [("correct", Correction(rows, slope)) for slope in told]
            both = ask_all(train, [(peer, (one, then)) for peer, one in zip(peers, corrections, strict=True)])
            answers = tuple(answer for _, answer in both)
        rows = following
    return answers, float(reward)


def _each(peers: Sequence[RemotePeer], phase: Phase, call: str, message: Any) -> tuple[Any, ...]:
    """What each party answers to the same."""
    return tuple(answer for (answer,) in ask_all(phase, [(peer, ((call, message),)) for peer in peers]))


class Terms(NamedTuple):
    """How a lead works with parties elsewhere."""

    every: int = 200  # joint steps between checkpoints
    wait: float = 600.0  # seconds to wait for a party that is not there
    secret: bool = True  # draw the lead's first weights and its noise from a key that nobody knows, not from the seed


_EXAMS = (Phase.VALIDATE, Phase.VALIDATE_NOISED)


class RemoteTraining:
    """What `Trials` does for one experiment of method frl, with the passive parties elsewhere."""

    step: int  # joint steps done
    lead: HostedLead
    seen: tuple[Any, ...]
    _kept: list[Any]  # network and head that were best in each exam
    _best: np.ndarray
    _idle: np.ndarray
    _sums: np.ndarray  # of the rewards and losses of this epoch so far
    _curve: np.ndarray  # [epochs, 4]

    def __init__(
        self,
        run: str,
        experiment: Experiment,
        peers: Sequence[RemotePeer],
        folder: Path,
        terms: Terms | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """A run with the hexadecimal name `run`, which keeps its checkpoints in `folder`."""
        require(experiment.method == "frl", f"method is {experiment.method}; parties of their own train frl")
        setup, training = experiment.setup(), experiment.training
        require(
            len(peers) == len(setup.world.shapes) - 1,
            f"there are {len(peers)} addresses of parties, but the world has {len(setup.world.shapes) - 1} views "
            "besides the lead's",
        )
        self._terms = terms or Terms()
        check_counts(checkpoint_every=self._terms.every)
        self._training, self._peers, self._say = training, peers, say
        self._forms = wire.Forms(setup, training.parallel)
        self._run = run
        self._greeting = {"run": run, "settings": experiment.config(), "world": fingerprint(setup)}
        self._files = Checkpoints(folder)
        self._world = setup.world
        self._warmup = training.joint_warmup
        self.steps_of_epoch = training.joint_steps(setup.world)
        self._setup, self._seed = setup, experiment.seed
        self._shunned: set[str] = set()
        self._new()

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return max(0, self.step - self._warmup) // self.steps_of_epoch

    @property
    def finished(self) -> bool:
        """Whether all epochs are done, or validation has not got better for long."""
        return self.epoch >= self._training.epochs or int(self._idle) >= self._training.patience

    @property
    def history(self) -> list[Record]:
        """A record of every epoch, as `Trials` makes them."""
        return [
            {
                "round": epoch,
                "validation": {"quiet": quiet, "noised": noised},
                "training": {"reward": reward, "loss": loss},
            }
            for epoch, (reward, loss, quiet, noised) in enumerate(self._curve[: self.epoch].tolist(), 1)
        ]

    def run(self, watch: Watcher | None = None, stop: threading.Event | None = None) -> tuple[Any, Any] | None:
        """Train until the end, or until `stop` is set; the scores of FRL-1 and FRL-2, or None if stopped."""
        stop = stop or threading.Event()
        while not stop.is_set():
            try:
                self.join(stop)
                while not self.finished and not stop.is_set():
                    self._advance(watch, stop)
                if not stop.is_set():
                    return self._exam(Phase.TEST, 0), self._exam(Phase.TEST_NOISED, 0)
            except Gone as gone:
                self._say(f"{gone}; waiting for it up to {self._terms.wait:g} s")
                if gone.process:
                    self._shunned.add(gone.process)
        return None

    def _advance(self, watch: Watcher | None, stop: threading.Event) -> None:
        """One joint step, and what is due after it."""
        updates = self._training.updates if self.step >= self._warmup else 0
        self.seen, reward = remote_step(self.lead, self._peers, self.seen, updates)
        self.step += 1
        if self.step > self._warmup:
            self._sums += (reward, float(self.lead.state.loss))
            if (self.step - self._warmup) % self.steps_of_epoch == 0:
                self._validate()
                if watch is not None:
                    watch(self.history[-1])
        if self.step % self._terms.every == 0 or self.finished or stop.is_set():
            self._save()

    def _validate(self) -> None:
        """Score all parties, and let them keep what they know where it is the best so far."""
        row, better = [*self._sums / self.steps_of_epoch], False
        for i, phase in enumerate(_EXAMS):
            success = self._exam(phase, self.epoch)[0]
            row.append(success)
            if success > self._best[i]:
                _each(self._peers, phase, "keep", np.int32(self.epoch))
                self._kept[i] = _copy((self.lead.state.net, self.lead.state.head))
                self._best[i], better = success, True
        self._idle = np.asarray(0 if better else self._idle + 1)
        self._curve[self.epoch - 1] = row
        self._sums = np.zeros(2)

    def _exam(self, phase: Phase, epoch: int) -> Any:
        """The world's score of all episodes of a phase."""
        key = exam_key(self._seed, epoch)
        net, head = self._kept[_EXAMS.index(_best_in(phase))] if phase.tests else self._mind()
        lead = self.lead.exam(phase, net, head, key)
        optimal = self._world.optimal(lead.stage.state)
        tally = Tally.blank(optimal)
        lead.begin(phase)
        seen = _each(self._peers, phase, "begin", np.int32(epoch))
        for _ in range(self._world.limit):
            action = lead.run(_answer_exam, seen)
            asked = [peer.send(phase, ("act", action)) for peer in self._peers]
            tally = lead.run(_move_exam, action, tally)
            seen = tuple(pending.answers()[0] for pending in asked)
            if not np.any(tally.alive):
                break
        score = self._world.score(lead.stage.state, tally.played(optimal))
        return score._replace(**{name: float(number) for name, number in score._asdict().items()})

    def _mind(self) -> tuple[Any, Any]:
        return self.lead.state.net, self.lead.state.head

    def _save(self) -> None:
        """Let all parties keep this step, then keep it here: what the lead has, all have."""
        _each(self._peers, Phase.TRAIN, "save", np.int32(self.step))
        self._files.save(self.step, self._held())

    def join(self, stop: threading.Event | None = None) -> None:
        """Wait for all parties, and go on with them from the newest step that all have, or begin."""
        stop = stop or threading.Event()
        there = self._files.readable(self._held())
        common = set(there)
        for peer in self._peers:
            steps = self._greet(peer, stop)
            if stop.is_set():
                return
            if there and not common & set(steps):
                raise AtollError(
                    f"{peer.name} has none of the steps {sorted(common)} from which this run can go on (it has "
                    f"{steps or 'none'}); give it the folder it had, or begin a run with another --name"
                )
            common &= set(steps)
        step = max(common) if there else -1
        for peer in self._peers:
            peer.start(self._run, step)
        if step < 0:
            self._new()
            self.lead.begin(Phase.TRAIN)
            self.seen = _each(self._peers, Phase.TRAIN, "begin", np.int32(0))
            self._save()
            return
        self._put(step, self._files.load(step, self._held()))
        self._say(f"going on after joint step {step}")

    def _greet(self, peer: RemotePeer, stop: threading.Event) -> list[int]:
        end, said = time.monotonic() + self._terms.wait, time.monotonic() + _NOTIFY
        while not stop.is_set():
            try:
                steps = peer.greet(self._forms, **self._greeting)
                if peer.process not in self._shunned:
                    return steps
                why = f"{peer.name} has not been started again since it was refused"
            except Gone as gone:
                why = str(gone)
            if time.monotonic() > end:
                raise AtollError(f"{why}; gave up after {self._terms.wait:g} s; the same command goes on")
            if time.monotonic() > said:
                said = math.inf
                self._say(f"{why}; waiting for it up to {self._terms.wait:g} s")
            stop.wait(_AGAIN)
        return []

    def _new(self) -> None:
        """Nothing learned yet."""
        self.step = 0
        secret = secret_key() if self._terms.secret else None
        self.lead = host_lead(self._setup, self._seed, self._training.parallel, secret)
        self.seen = tuple(
            jax.tree.map(lambda form: np.zeros(form.shape, form.dtype), self._forms.answer("begin", Phase.TRAIN))
            for _ in self._peers
        )
        self._kept = [_copy(self._mind()) for _ in _EXAMS]
        self._best = np.full(len(_EXAMS), -1.0)
        self._idle, self._sums = np.asarray(0), np.zeros(2)
        self._curve = np.full((self._training.epochs, 4), np.nan)

    def _held(self) -> Any:
        """All that a checkpoint holds."""
        figures = (self._best, self._idle, self._sums, self._curve)
        return (self.lead.state, self.lead.stage.state, self.seen, self._kept, figures)

    def _put(self, step: int, held: Any) -> None:
        self.step = step
        self.lead.state, self.lead.stage.state, self.seen, self._kept, figures = held
        self._best, self._idle, self._sums, self._curve = (np.array(x) for x in figures)


def _best_in(phase: Phase) -> Phase:
    return Phase.VALIDATE_NOISED if phase.noised else Phase.VALIDATE


def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)
