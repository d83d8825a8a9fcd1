"""The twin of `simulate`: a training that goes update by update, with exact fractions, written from its docstrings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from variable_batch_size.adaptive import ControlInput, Throughput
from variable_batch_size.lab.cluster import CapacityTrace
from variable_batch_size.lab.simulation import NoiseCurve, Overheads
from variable_batch_size.rules import Rule, RuleInput, adascale_gain
from variable_batch_size.rules.base import Noise, needs_noise
from variable_batch_size.trace import BatchTrace

INFINITE = Fraction(10**30)


@dataclass
class Done:
    """One kept update, or one that was lost."""

    begin: Fraction
    end: Fraction
    size: int  # chosen
    samples: int
    total_samples: int  # up to and with this update
    total_progress: Fraction
    pending: list[tuple[int, int, ControlInput | None]]  # all answers so far: first update, batch size, question


@dataclass
class SlowSimulation:
    capacity: CapacityTrace
    controller: Any
    throughput: Throughput
    rule: Rule
    ref_batchsize: int
    noise: NoiseCurve | None = None
    start: int | None = None
    bounds: tuple[int, int] = (1, 2**53)
    every: int | None = None
    delay: int = 0
    minibatch_size: int | None = None
    dataset_size: int | None = None
    devices_per_node: int = 1
    overheads: Overheads | None = None
    until: float | None = None
    by: str = "progress"

    kept: list[Done] = field(default_factory=list)
    saves: list[tuple[Fraction, int]] = field(default_factory=list)  # complete at, number of updates
    seconds: dict[str, Fraction] = field(default_factory=dict)
    preemptions: int = 0
    restarts: int = 0

    def run(self) -> SlowSimulation:
        self.costs = self.overheads or Overheads()
        self.now, self.cause = Fraction(0), "start"
        self.end = Fraction(self.capacity.end)
        if self.by == "seconds" and self.until is not None:
            self.end = min(self.end, Fraction(self.until))
        self.seconds = dict.fromkeys(["productive", "redone", "restarting", "saving", "idle"], Fraction(0))
        self.saves = [(Fraction(0), 0)]
        columns = self.capacity.seconds.tolist(), self.capacity.nodes.tolist()
        self.rows = [(Fraction(time), nodes) for time, nodes in zip(*columns, strict=True)]
        self.first_pending = [] if self.start is None else [(0, self.start, None)]
        while not self.over():
            nodes = self.staying(self.now)
            if nodes < self.costs.least_nodes:
                self.idle()
            elif self.restart(nodes):
                self.train(nodes)
        self.seconds["productive"] += sum((done.end - done.begin for done in self.kept), Fraction(0))
        return self

    # What is known at a time

    def nodes(self, time: Fraction) -> int:
        return [nodes for begin, nodes in self.rows if begin <= time][-1]

    def staying(self, time: Fraction) -> int:
        notice = Fraction(self.costs.notice)
        ahead = [second for second, _ in self.rows if time <= second <= time + notice]
        return min(self.nodes(second) for second in [time, *ahead])

    def times(self) -> list[Fraction]:
        """All times at which the nodes, or what is known of them, may change."""
        rows = {second for second, _ in self.rows}
        return sorted({*rows, *(second - Fraction(self.costs.notice) for second in rows), self.end})

    def kill(self, nodes: int, since: Fraction) -> Fraction:
        """When nodes leave that are used."""
        if self.overheads is None:
            return INFINITE
        return next((time for time in [since, *self.times()] if time >= since and self.nodes(time) < nodes), INFINITE)

    def over(self) -> bool:
        totals = {"updates": self.updates, "samples": self.samples, "progress": self.progress}
        reached = self.by in totals and self.until is not None and totals[self.by] >= self.until
        trace = self.controller
        stops = isinstance(trace, BatchTrace) and trace.on_end == "stop" and self.updates >= len(trace)
        return reached or stops or self.now >= self.end

    @property
    def updates(self) -> int:
        return len(self.kept)

    @property
    def samples(self) -> int:
        return self.kept[-1].total_samples if self.kept else 0

    @property
    def progress(self) -> Fraction:
        return self.kept[-1].total_progress if self.kept else Fraction(0)

    # What the training does

    def spend(self, state: str, until: Fraction) -> None:
        until = min(until, self.end)
        self.seconds[state] += until - self.now
        self.now = until

    def idle(self) -> None:
        self.spend("idle", next((time for time in self.times() if time > self.now), self.end))

    def restart(self, nodes: int) -> bool:
        self.restarts += self.cause != "start"
        started = self.now + Fraction(self.costs.restart_seconds(nodes, self.cause))  # type: ignore[arg-type]
        for time in self.times():
            if self.now < time < started and time < self.end and self.staying(time) < nodes:
                self.spend("restarting", time)
                self.preemptions, self.cause = self.preemptions + 1, "preemption"
                return False
        self.spend("restarting", started)
        return self.now == started

    def train(self, nodes: int) -> None:
        began = continued = self.now
        kill, fresh = self.kill(nodes, self.now), True
        while not self.over():
            if self.now >= kill and self.costs.notice == 0:
                return self.die()
            known = self.staying(self.now)
            if known < nodes or (known > nodes and self.now >= began + Fraction(self.costs.grow_every)):
                self.stop(nodes, kill)
                return None
            if self.is_due(continued):
                if not self.save(kill, self.costs.blocking):
                    return None
                continued = self.now
            elif not self.update(nodes, kill, fresh):
                return None
            else:
                fresh = False
        return None

    def is_due(self, continued: Fraction) -> bool:
        if self.costs.save_every is None:
            return False
        return self.now >= max(continued + Fraction(self.costs.save_every), self.saves[-1][0])

    def save(self, kill: Fraction, blocking: bool) -> bool:
        complete = self.now + Fraction(self.costs.save)
        if not blocking:
            self.saves.append((complete, self.updates))
            return True
        self.spend("saving", min(complete, kill))
        if complete > self.end and kill >= self.end:
            return False
        if complete > kill:
            self.die()
            return False
        self.saves.append((complete, self.updates))
        return True

    def stop(self, nodes: int, kill: Fraction) -> None:
        saved = max((number for complete, number in self.saves if complete <= self.now), default=0)
        if saved == self.updates or self.save(kill, True):
            self.saves = [(self.now, self.updates)]
            fewer = self.staying(self.now) < nodes
            self.preemptions += fewer
            self.cause = "preemption" if fewer else "growth"

    def die(self) -> None:
        saved = max(number for complete, number in self.saves if complete <= self.now)
        lost, self.kept = self.kept[saved:], self.kept[:saved]
        self.seconds["redone"] += sum((done.end - done.begin for done in lost), Fraction(0))
        self.saves = [(self.now, saved)]
        self.preemptions, self.cause = self.preemptions + 1, "preemption"

    def update(self, nodes: int, kill: Fraction, fresh: bool) -> bool:
        devices = nodes * self.devices_per_node
        size, pending = self.batch_size(devices, fresh)
        samples = size
        if self.dataset_size is not None:
            samples = min(size, self.dataset_size - self.samples % self.dataset_size)
        spread = not (needs_noise(self.rule) or needs_noise(self.controller))
        ends = self.now + Fraction(self.throughput.seconds(samples, devices, self.minibatch_size, spread=spread))
        if ends > min(kill, self.end):
            self.spend("redone" if kill < self.end else "idle", min(kill, self.end))
            if kill < self.end:
                self.die()
            return False
        scaling = self.rule(RuleInput(samples, self.ref_batchsize, self.updates, self.samples, self.noise_of(samples)))
        totals = self.samples + samples, self.progress + Fraction(scaling.progress)
        self.kept.append(Done(self.now, ends, size, samples, *totals, pending))
        self.now = ends
        return True

    def noise_of(self, samples: int | None) -> Noise | None:
        if self.noise is None:
            return None
        rows = range(len(self.noise.progress))
        row = max((row for row in rows if self.noise.progress[row] <= self.progress), default=0)
        sigma2, mu2 = self.noise.sigma2[row], self.noise.mu2[row]
        gain = 1.0 if samples is None else adascale_gain(sigma2, mu2, samples, self.ref_batchsize)
        return Noise(sigma2, mu2, gain, self.updates)

    def batch_size(self, devices: int, fresh: bool) -> tuple[int, list[tuple[int, int, ControlInput | None]]]:
        if isinstance(self.controller, BatchTrace):
            return self.controller.batch_size(self.updates), []
        pending = list(self.kept[-1].pending if self.kept else self.first_pending)
        if fresh and self.kept:
            pending = self.asked_again(pending, devices)
        if not self.kept or (self.every is not None and self.updates % self.every == 0):
            last = pending[-1][1] if pending else None
            totals = self.updates, self.samples, float(self.progress)
            asked = ControlInput(devices, last, self.minibatch_size, *totals, self.noise_of(last), self.throughput)
            pending.append((self.updates + self.delay if pending else self.updates, self.answer(asked), asked))
        return [size for begins, size, _ in pending if begins <= self.updates][-1], pending

    def answer(self, asked: ControlInput) -> int:
        control: Callable[[ControlInput], int] = self.controller
        return min(max(control(asked), self.bounds[0]), self.bounds[1])

    def asked_again(
        self, pending: list[tuple[int, int, ControlInput | None]], devices: int
    ) -> list[tuple[int, int, ControlInput | None]]:
        """The questions whose answers count, or will count, with these devices, from the first answer that changes."""
        now = self.updates
        counts = [row for row, (begins, _, _) in enumerate(pending) if begins <= now][-1]
        moved = [
            (begins, size, asked if asked is None else replace(asked, devices=devices))
            for begins, size, asked in pending[counts:]
        ]
        others = [asked is not None and asked.devices != devices for _, _, asked in pending[counts:]]
        same = [
            asked is None or not other or self.answer(asked) == size
            for (_, size, asked), other in zip(moved, others, strict=True)
        ]
        first = same.index(False) if False in same else len(same)
        present = pending[counts][1]
        found = pending[:counts]
        for row, (begins, size, asked) in enumerate(moved):
            if row >= first and asked is not None and others[row]:
                asked = replace(asked, batch_size=present)
                begins, size = max(begins, now), self.answer(asked)
            found.append((begins, size, asked))
            present = size
        return found
