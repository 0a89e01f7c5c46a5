"""Retention never loses the newest, the best, the pinned; metrics compare as they should."""

import math
import os
import random
from dataclasses import replace

import pytest
from checkpoint_faults import make_contents

from headway.checkpoint import CheckpointManager
from headway.checkpoint.best import is_better, lookup_metric
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.owner import new_nonce
from headway.checkpoint.pins import is_pinned, pin, unpin
from headway.checkpoint.retention import Entry, choose_deletions, rank_by_metric
from headway.config.arguments import greater_is_better
from headway.errors import ConfigError

# More in the long suite: HEADWAY_RETENTION_HISTORIES=100000 takes a minute.
NUM_HISTORIES = int(os.environ.get("HEADWAY_RETENTION_HISTORIES", "2000"))
KINDS = ["training"] * 12 + ["merged", "export"]
METRICS = [None, 0.0, -0.0, 1.0, 2.0, 3.0, -1.0, math.nan, math.inf, -math.inf]


def entries(*metric_values, first=1):
    return [
        Entry(id=f"c{i}", save_counter=i, step=i, metric=m)
        for i, m in enumerate(metric_values, start=first)
    ]


def draw_settings(rng):
    return {
        "limit": rng.choice([None, 1, 1, 2, 3, 5]),
        "num_best": rng.choice([0, 0, 1, 2, 4]),
        "greater_is_better": rng.random() < 0.5,
        "keep_every_n_steps": rng.choice([None, None, 1, 5, 7]),
    }


def draw_save(rng, counter, step):
    permanent = rng.random() < 0.1
    return Entry(
        id=f"c{counter}",
        save_counter=counter,
        step=step,
        metric=rng.choice([*METRICS, rng.uniform(-3, 3)]),
        permanent=permanent,
        pinned=rng.random() < 0.1,
        kind=rng.choice(KINDS),
        ephemeral=not permanent and rng.random() < 0.2,
    )


def check_rule(listed, deleted, limit, num_best, greater_is_better, keep_every_n_steps):
    """The promises, written down once more in other words."""
    gone = [entry for entry in listed if entry.id in deleted]
    kept = [entry for entry in listed if entry.id not in deleted]
    training = [entry for entry in listed if entry.kind == "training"]
    assert len(deleted) == len(set(deleted)) == len(gone)
    assert all(e.kind == "training" and not e.permanent and not e.pinned for e in gone)
    if training:
        assert max(training, key=lambda e: e.save_counter) in kept
    if keep_every_n_steps is not None:
        assert all(e.step % keep_every_n_steps for e in gone)
    scored = [e for e in training if e.metric is not None and e.metric == e.metric]
    for e in gone:
        if e in scored:
            better = [
                o for o in scored
                if (o.metric > e.metric if greater_is_better else o.metric < e.metric)
                or (o.metric == e.metric and o.save_counter < e.save_counter)
            ]  # fmt: skip
            assert len(better) >= num_best, "one of the best was deleted"
    best = sorted(
        scored, key=lambda e: (-e.metric if greater_is_better else e.metric, e.save_counter)
    )[:num_best]
    rest = [
        e for e in training
        if not e.permanent and not e.pinned and e not in best
        and (keep_every_n_steps is None or e.step % keep_every_n_steps)
    ]  # fmt: skip
    ordinary = [e for e in rest if not e.ephemeral]
    allowed = len(ordinary) if limit is None else min(limit, len(ordinary))
    assert [e for e in ordinary if e in kept] == ordinary[len(ordinary) - allowed :]
    assert [e for e in rest if e.ephemeral and e in kept] == [
        e for e in rest if e.ephemeral and e is training[-1]
    ]


@pytest.mark.timeout(900)
def test_random_histories():
    """Saves, rollbacks, pins and unpins, with retention after each save."""
    rng = random.Random(20261115)
    for _ in range(NUM_HISTORIES):
        settings = draw_settings(rng)
        disk, step = [], 0
        best_ever = None
        for counter in range(1, rng.randint(2, 14)):
            step = rng.randint(0, step) if rng.random() < 0.1 else step + rng.randint(1, 5)
            disk = [replace(e, pinned=e.pinned ^ (rng.random() < 0.05)) for e in disk]
            disk.append(draw_save(rng, counter, step))
            shuffled = rng.sample(disk, len(disk))
            deleted = choose_deletions(shuffled, **settings)
            assert deleted == choose_deletions(disk, **settings), "the list's order matters"
            check_rule(disk, deleted, **settings)
            disk = [e for e in disk if e.id not in deleted]
            assert choose_deletions(disk, **settings) == [], "a second pass finds more to delete"
            ranked = rank_by_metric(
                [*disk, *([best_ever] if best_ever else [])],
                greater_is_better=settings["greater_is_better"],
            )
            if ranked and settings["num_best"]:
                best_ever = ranked[0]
                assert best_ever.id in {e.id for e in disk}, "the best save of all was lost"


def test_second_best_enters_the_list():
    assert choose_deletions(entries(3.0, 2.0, 2.5, None), limit=1, num_best=2) == ["c1"]


def test_best_do_not_push_out_the_newest():
    assert choose_deletions(entries(1.0, 2.0, 9.0), limit=2, num_best=2) == []


def test_zero_is_a_metric_and_nan_is_none():
    assert choose_deletions(entries(0.0, 1.0, math.nan, None), limit=1, num_best=1) == ["c2", "c3"]


def test_order_is_the_save_counter_not_the_step():
    rolled_back = [Entry("late", 1, 900), Entry("early", 2, 100), Entry("now", 3, 200)]
    assert choose_deletions(rolled_back, limit=2) == ["late"]


def test_multiples_of_a_step_stay():
    saves = [Entry(f"c{step}", step, step) for step in (5, 10, 15, 20, 25)]
    assert choose_deletions(saves, limit=1, keep_every_n_steps=10) == ["c5", "c15"]


def test_an_ephemeral_one_lives_until_the_next_save():
    saves = [Entry("a", 1, 10), Entry("b", 2, 12, ephemeral=True)]
    assert choose_deletions(saves, limit=1) == []
    saves.append(Entry("c", 3, 14, ephemeral=True))
    assert choose_deletions(saves, limit=1) == choose_deletions(saves, limit=None) == ["b"]
    saves.append(Entry("d", 4, 20))
    assert choose_deletions(saves, limit=2) == ["b", "c"]


def test_perplexity_goes_down():
    assert not greater_is_better("eval_perplexity") and not greater_is_better("loss")
    assert greater_is_better("accuracy")


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 0},
        {"limit": -1},
        {"limit": 1, "num_best": -1},
        {"limit": 1, "keep_every_n_steps": 0},
    ],
)
def test_impossible_limits_are_refused(options):
    with pytest.raises(ConfigError, match="allowed"):
        choose_deletions([], **options)


def test_metric_lookup():
    assert lookup_metric({"eval_loss": 0.0}, "loss") == 0.0
    assert lookup_metric({"loss": 1, "eval_loss": 2.0}, "loss") == 1.0
    assert lookup_metric({"loss": 3.0}, "eval_loss") == 3.0
    assert lookup_metric({"eval_loss": 3.0}, "accuracy") is None


def test_is_better():
    assert is_better(0.0, 1.0, greater_is_better=False)
    assert not is_better(1.0, 1.0, greater_is_better=False)
    assert is_better(2.0, 1.0, greater_is_better=True)
    assert is_better(5.0, None, greater_is_better=False)
    assert is_better(5.0, math.nan, greater_is_better=False)
    assert not is_better(math.nan, None, greater_is_better=True)


def names(path):
    return sorted(p.name for p in path.iterdir())


def test_a_pin_lasts_over_processes_and_can_be_taken_back(tmp_path):
    first = CheckpointManager(tmp_path, save_total_limit=1)
    path = first.save(make_contents(), 1)
    pin(path)
    assert first.resolve(True) == path, "a pin is no damage"
    again = CheckpointManager(tmp_path, save_total_limit=1)
    for step in (2, 3):
        again.save(make_contents(), step)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"] and is_pinned(path)
    unpin(path)
    again.save(make_contents(), 4)
    assert names(tmp_path) == ["checkpoint-4"]
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        pin(tmp_path)


def test_a_pinned_one_outlives_its_successor_of_the_same_step(tmp_path):
    manager = CheckpointManager(tmp_path, save_total_limit=1)
    pin(manager.save(make_contents(value=1), 5))
    manager.save(make_contents(value=2), 5)
    manager.save(make_contents(value=3), 6)
    (kept,) = [name for name in names(tmp_path) if name.startswith("checkpoint-5")]
    assert kept.startswith("checkpoint-5.old-") and is_pinned(tmp_path / kept)
    dead = (
        kept.rpartition(".old-")[0]
        + ".old-"
        + "-".join([*new_nonce().split("-")[:1], "999999999", "1", "ab"])
    )
    (tmp_path / kept).rename(tmp_path / dead)
    manager.save(make_contents(value=4), 5)
    assert manager.clean_leftovers() == [] and is_pinned(tmp_path / dead)


def test_ephemeral_and_permanent_saves(tmp_path):
    manager = CheckpointManager(tmp_path, save_total_limit=1, keep_every_n_steps=10)
    manager.save(make_contents(), 1, permanent=True)
    manager.save(make_contents(), 10)
    manager.save(make_contents(), 11)
    manager.save(make_contents(), 12, ephemeral=True)
    assert names(tmp_path) == [f"checkpoint-{n}" for n in (1, 10, 11, 12)]
    manager.save(make_contents(), 13, ephemeral=True)
    assert names(tmp_path) == [f"checkpoint-{n}" for n in (1, 10, 11, 13)]
    manager.save(make_contents(), 14)
    assert names(tmp_path) == [f"checkpoint-{n}" for n in (1, 10, 14)]
    with pytest.raises(ConfigError, match="permanent or ephemeral"):
        manager.save(make_contents(), 15, permanent=True, ephemeral=True)


def test_only_own_checkpoints_in_the_run_directory_are_deleted(tmp_path):
    other = CheckpointManager(tmp_path / "other", save_total_limit=None)
    outside = [other.save(make_contents(), step) for step in (1, 2)]
    root = tmp_path / "run"
    manager = CheckpointManager(root, save_total_limit=1)
    manager.save(make_contents(), 3)
    (root / "checkpoint-1").symlink_to(outside[0])
    (root / "checkpoint-2-notes").mkdir()
    (root / "checkpoint-0").mkdir()
    (root / "checkpoint-0" / "mine.txt").write_text("x")
    (root / "weights.txt").write_text("x")
    manager.save(make_contents(), 4)
    assert names(root) == [
        "checkpoint-0", "checkpoint-1", "checkpoint-2-notes", "checkpoint-4", "weights.txt",
    ]  # fmt: skip
    assert names(tmp_path / "other") == ["checkpoint-1", "checkpoint-2"]
    assert (outside[0] / "trainer_state.json").is_file()
