"""What a checkpointer is to leave on the disk, written down once more in other words.

The model knows nothing of the callback's code: it walks through the steps of runs, of which some
are killed, and keeps a list of what lies there.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """The options of one run's callback."""

    save: int | None = None
    ephemeral: int | None = None
    cooldown: int | None = None
    fixed: tuple[int, ...] = ()
    most: int | None = None
    remove: str = "ephemeral_only"
    pre_train: bool | None = None


@dataclass(frozen=True)
class Run:
    """One process: where it ends and how, and what is asked of it meanwhile."""

    settings: Settings
    num_steps: int
    end: str
    """`completed`, `interrupted` (a last save is made) or `killed`."""
    requests: frozenset[int] = frozenset()
    blocked: frozenset[int] = frozenset()
    from_older: int = 0
    """How many checkpoints back it resumes, where there are so many."""


@dataclass
class Stored:
    step: int
    lifetime: str


@dataclass
class Reference:
    """Checkpoints in the order in which they were made."""

    disk: list[Stored] = field(default_factory=list)
    permanent_ever: set[int] = field(default_factory=set)

    def play(self, run: Run) -> None:
        s, start, last = run.settings, 0, None
        if self.disk:
            start = last = self.disk[-1 - min(run.from_older, len(self.disk) - 1)].step
        wants_first = s.pre_train if s.pre_train is not None else not self.disk
        if start == 0 and wants_first:
            self.save(0, "permanent", s)
            last = 0
        for step in range(start + 1, start + run.num_steps + 1):
            ends = step == start + run.num_steps
            due = bool(s.save) and step % s.save == 0
            lifetime = None
            if step in s.fixed or (due and s.most is None):
                lifetime = "permanent"
            elif due or step in run.requests:
                lifetime = "regular"
            elif s.ephemeral and step % s.ephemeral == 0 and step not in run.blocked:
                far = last is None or not s.cooldown or step - last >= s.cooldown
                lifetime = "ephemeral" if far else None
            if ends and run.end == "completed":
                lifetime = "permanent"
            if ends and run.end == "interrupted" and lifetime is None:
                lifetime = "regular"
            if lifetime is not None:
                self.save(step, lifetime, s)
                last = step

    def save(self, step: int, lifetime: str, s: Settings) -> None:
        for old in [one for one in self.disk if one.step == step]:
            self.disk.remove(old)
            if old.lifetime == "permanent":
                lifetime = "permanent"
        self.disk.append(Stored(step, lifetime))
        if lifetime == "permanent":
            self.permanent_ever.add(step)
        if s.remove == "never":
            return
        regular = [one for one in self.disk if one.lifetime == "regular"]
        if s.most is not None:
            regular = regular[-s.most :]
        elif s.remove == "all_non_permanent":
            regular = []
        self.disk = [
            one
            for one in self.disk
            if one.lifetime == "permanent" or one in regular or one is self.disk[-1]
        ]
