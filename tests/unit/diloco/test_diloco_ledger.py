"""State and ledger on the disk: a round is there whole or not at all, and a replay agrees."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.checkpoint import list_checkpoints
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.storage import Storage
from headway.checkpoint.tensors import read_shards
from headway.diloco.compression import encode
from headway.diloco.core import Core
from headway.diloco.ledger import LEDGER_NAME, Ledger, replay
from headway.diloco.rounds import Submission
from headway.diloco.server_options import ServerOptions
from headway.diloco.wire import compose
from headway.errors import ConfigError
from headway.testing.faults import Died, Fault, FaultyStorage
from headway.testing.proofs.outcome import memory_folder

MODEL = {f"layers.{n}.w": torch.arange(6.0).reshape(2, 3) * (n + 1) for n in range(4)}
OPTIONS: dict[str, Any] = {"num_workers": 2, "keep_submissions": True}


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, where the system has such a place: there are many syncs here."""
    with memory_folder() as place:
        yield place


def make_core(folder: Path, storage: Storage | None = None, **options: Any) -> Core:
    chosen = {**OPTIONS, **options}
    core = Core(MODEL, folder, ServerOptions(**chosen), 0.0)
    core.ledger = Ledger(
        folder,
        storage=storage,
        keep_submissions=core.options.keep_submissions,
        keep_states=core.options.keep_states,
    )
    core.open(0.0)
    return core


def send(core: Core, name: str, seed: int, fragment: int = 0, comm: str = "bf16") -> Submission:
    """What a worker of that name submits to the open round."""
    worker = core.book.workers.get(name) or core.book.register(name, 0.0, comm=comm)
    assert core.state is not None
    names = core.state.fragments[fragment]
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randn(MODEL[n].shape, generator=generator) for n in names}
    message = compose({}, encode(tensors, comm).payloads)
    path = core.ledger.incoming / f"{name}-{seed}.hwdl"
    path.write_bytes(b"".join(bytes(chunk) for chunk in message.chunks()))
    place = core.book.rounds[fragment]
    norm = core.measure(str(path), core.state, fragment, False)
    submission = Submission(
        name, worker.session, place.id, place.number, fragment, message.digest, 1 + seed % 3,
        comm, False, norm, message.num_bytes, str(path),
    )  # fmt: skip
    core.book.accept(worker, submission, 0.0)
    return submission


def do_round(core: Core, number: int, fragment: int = 0) -> None:
    for offset, name in enumerate("ab"):
        send(core, name, 10 * number + offset, fragment)
    while due := core.book.due(0.0):
        job = core.start_round(due[0])
        done = core.carry_out(job)
        assert done is not None
        core.finish_round(job, done, 0.0, 0.0)


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / LEDGER_NAME).read_text().splitlines()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": "float64"},
        {"mode": "async", "async_spread": 0.25},
        {"num_fragments": 3},
        {"dylu": True, "nesterov": False},
    ],
)
def test_a_replay_of_the_ledger_gives_the_same_bits(folder: Path, options: dict) -> None:
    core = make_core(folder, **options)
    for number in range(5):
        do_round(core, number, number % core.options.num_fragments)
    core.close()
    again = replay(folder)
    assert core.state is not None and again.hash == core.state.hash
    for name, tensor in core.state.parameters.items():
        assert torch.equal(again.parameters[name], tensor)
        assert torch.equal(again.velocity[name], core.state.velocity[name])
    hashes = [record["state_hash"] for record in lines_of(folder)]
    assert len(set(hashes)) == len(hashes) == 1 + (10 if core.options.mode == "async" else 5)


def test_a_restart_goes_on_as_if_nothing_had_been(folder: Path) -> None:
    for mode in ("sync", "async"):
        through, stopped = folder / mode / "through", folder / mode / "stopped"
        one = make_core(through, mode=mode)
        for number in range(4):
            do_round(one, number)
        for number in range(4):
            two = make_core(stopped, mode=mode)
            do_round(two, number)
            two.close()
        two = make_core(stopped, mode=mode)
        assert one.state is not None and two.state is not None
        assert two.state.hash == one.state.hash
        assert two.book.rounds[0].number == one.book.rounds[0].number
        one.close(), two.close()
        assert replay(stopped).hash == one.state.hash


def test_the_state_is_a_folder_of_weights_that_is_listed_and_read_like_any_other(
    folder: Path,
) -> None:
    core = make_core(folder, num_fragments=2, keep_submissions=False)
    do_round(core, 1, 0), do_round(core, 2, 1)
    core.close()
    found = list_checkpoints(folder)
    assert [(c.path.name, c.kind) for c in found] == [
        ("export-1", "export"),
        ("export-2", "export"),
    ]
    assert core.state is not None
    weights = read_shards(found[-1].path, "model")
    assert set(weights) == set(MODEL)
    assert all(torch.equal(weights[n], core.state.parameters[n]) for n in MODEL)
    # What a round has not touched is not written again.
    same = [c.path / "model-00001-of-00002.safetensors" for c in found]
    assert os.path.samefile(*same)
    with pytest.raises((ConfigError, FileNotFoundError, CheckpointError)):
        replay(folder)


def count_operations(folder: Path, **options: Any) -> tuple[int, int]:
    """Operations on the disk before a round, and at its end."""
    storage = FaultyStorage(folder)
    core = make_core(folder, storage, **options)
    do_round(core, 1)
    before = storage.num_operations
    do_round(core, 2)
    core.close()
    return before, storage.num_operations


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_a_death_at_any_operation_leaves_the_old_round_or_the_new_one(
    folder: Path, num_fragments: int
) -> None:
    options = {"num_fragments": num_fragments}
    begin, end = count_operations(folder / "counted", **options)
    wanted = {c["commit"]: c["state_hash"] for c in lines_of(folder / "counted")}
    assert end - begin > 15
    seen = set()
    for at in range(begin + 1, end + 1):
        place = folder / str(at)
        storage = FaultyStorage(place, Fault("die", at))
        core = make_core(place, storage, **options)
        do_round(core, 1)
        with pytest.raises(Died):
            do_round(core, 2)
        core.close()
        again = make_core(place, **options)
        assert again.state is not None
        assert again.state.commit in (1, 2)
        assert again.state.hash == wanted[again.state.commit]
        assert again.book.rounds[0].number == again.state.commit + 1
        seen.add(again.state.commit)
        if again.state.commit == 1:
            do_round(again, 2)
        again.close()
        assert replay(place).hash == wanted[2]
        assert [r["commit"] for r in lines_of(place)] == [0, 1, 2]
    assert seen == {1, 2}


def test_a_death_at_any_operation_of_the_beginning_does_not_keep_the_next_from_it(
    folder: Path,
) -> None:
    storage = FaultyStorage(folder / "counted")
    make_core(folder / "counted", storage).close()
    for at in range(1, storage.num_operations + 1):
        place = folder / str(at)
        with pytest.raises(Died):
            make_core(place, FaultyStorage(place, Fault("die", at)))
        again = make_core(place)
        do_round(again, 1)
        again.close()
        assert [r["commit"] for r in lines_of(place)] == [0, 1]


def test_nothing_begins_anew_over_what_is_damaged(folder: Path) -> None:
    core = make_core(folder)
    do_round(core, 1)
    core.close()
    ledger = (folder / LEDGER_NAME).read_bytes()
    (folder / LEDGER_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"ledger.jsonl is gone, but export-1 is there"):
        make_core(folder)
    (folder / LEDGER_NAME).write_bytes(ledger)
    for number in (0, 1):
        (folder / f"export-{number}" / "checkpoint_manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no state that is whole"):
        make_core(folder)


def test_a_ledger_that_is_deleted_under_a_server_is_not_begun_anew(folder: Path) -> None:
    """A line without those before it would be taken for a forged one at the next start."""
    core = make_core(folder)
    do_round(core, 1)
    ledger = (folder / LEDGER_NAME).read_bytes()
    (folder / LEDGER_NAME).unlink()
    with pytest.raises(CheckpointError, match="without it nothing is committed any more"):
        do_round(core, 2)
    (folder / LEDGER_NAME).write_bytes(ledger)
    core.book.reopen(0, 0.0)
    job = core.start_round(0)
    assert core.carry_out(job) is not None
    core.close()
    assert [r["commit"] for r in lines_of(folder)] == [0, 1, 2]


def test_a_folder_that_is_no_servers_is_told_plainly(folder: Path) -> None:
    for place in (folder, folder / "none"):
        with pytest.raises(CheckpointError, match="is no server's folder"):
            replay(place)


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_kill_inside_the_line_of_a_round_does_not_lose_the_round(
    folder: Path, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(folder)
    do_round(core, 1)
    write = os.write

    def torn(descriptor: int, data: Any) -> int:
        write(descriptor, bytes(data)[: int(part * len(data))])
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr("headway.diloco.ledger.os.write", torn)
        with pytest.raises(Died):
            do_round(core, 2)
    core.close()
    again = make_core(folder)
    assert again.state is not None and again.state.commit == 2
    assert [r["commit"] for r in lines_of(folder)] == [0, 1, 2]
    do_round(again, 3)
    again.close()
    assert replay(folder).hash == again.state.hash


def test_a_full_disk_refuses_the_round_and_it_can_be_tried_again(folder: Path) -> None:
    begin, end = count_operations(folder / "counted")
    for at in range(begin + 1, end + 1):
        place = folder / str(at)
        core = make_core(place, FaultyStorage(place, Fault("error", at)))
        do_round(core, 1)
        try:
            do_round(core, 2)
        except (OSError, CheckpointError):
            core.book.reopen(0, 0.0)
            job = core.start_round(0)
            done = core.carry_out(job)
            assert done is not None
            core.finish_round(job, done, 0.0, 0.0)
        assert core.state is not None and core.state.commit == 2
        core.close()
        assert replay(place).hash == core.state.hash


def test_a_line_that_cannot_be_written_is_owed_and_paid_with_the_next_round(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(folder)

    def full(descriptor: int, data: Any) -> int:
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr("headway.diloco.ledger.os.write", full)
        do_round(core, 1)
    assert [r["commit"] for r in lines_of(folder)] == [0]
    do_round(core, 2)
    assert [r["commit"] for r in lines_of(folder)] == [0, 1, 2]
    core.close()
    assert core.state is not None and replay(folder).hash == core.state.hash


def test_no_round_follows_one_whose_line_is_owed_and_a_restart_adds_the_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(folder)

    def full(descriptor: int, data: Any) -> int:
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr("headway.diloco.ledger.os.write", full)
        do_round(core, 1)
        with pytest.raises(OSError, match="full"):
            do_round(core, 2)
    assert not (folder / "export-2").exists()
    core.close()
    again = make_core(folder)
    assert again.state is not None and again.state.commit == 1
    assert [r["commit"] for r in lines_of(folder)] == [0, 1]
    again.close()


def test_a_changed_ledger_is_noticed(folder: Path) -> None:
    core = make_core(folder)
    do_round(core, 1), do_round(core, 2)
    core.close()
    path = folder / LEDGER_NAME
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"weight":1.0', b'"weight":2.0', 1))
    for read in (lambda: replay(folder), lambda: make_core(folder)):
        with pytest.raises(CheckpointError, match="line 2"):
            read()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(CheckpointError, match="line 2"):
        replay(folder)
    path.write_bytes(whole)
    body = next((folder / "submissions").glob("00000001-*"))
    damaged = bytearray(body.read_bytes())
    damaged[-1] ^= 1
    body.write_bytes(damaged)
    with pytest.raises(Exception, match="digest"):
        replay(folder)


def test_a_damaged_state_is_passed_over_and_the_ledger_says_so(folder: Path) -> None:
    core = make_core(folder)
    for number in range(3):
        do_round(core, number)
    core.close()
    shard = folder / "export-3" / "model-00001-of-00001.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    again = make_core(folder)
    assert again.state is not None and again.state.commit == 2
    assert lines_of(folder)[-1]["kind"] == "rollback"
    do_round(again, 7)
    again.close()
    assert again.state.commit == 3 and replay(folder).hash == again.state.hash


def test_two_servers_do_not_share_a_folder_and_a_folder_keeps_its_model(folder: Path) -> None:
    core = make_core(folder)
    with pytest.raises(ConfigError, match="another server works in this folder"):
        make_core(folder)
    core.close()
    other = Core({"w": torch.zeros(3)}, folder, ServerOptions(num_workers=1), 0.0)
    with pytest.raises(ConfigError, match="another model"):
        other.open(0.0)
    for option in ({"mode": "async"}, {"accumulate": "float64"}, {"num_fragments": 2}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            make_core(folder, **option)


def test_other_settings_after_a_restart_are_in_the_ledger(folder: Path) -> None:
    core = make_core(folder)
    do_round(core, 1)
    core.close()
    core = make_core(folder, outer_lr=0.1, outer_momentum=0.5)
    do_round(core, 2)
    core.close()
    assert [r["kind"] for r in lines_of(folder)] == ["begin", "round", "settings", "round"]
    assert core.state is not None and replay(folder).hash == core.state.hash


def test_settings_that_made_no_round_are_followed_by_those_that_do(folder: Path) -> None:
    """The last state was made with the same settings, but the last line says others."""
    for lr, rounds in ((0.7, 1), (0.5, 0), (0.5, 0), (0.7, 1)):
        core = make_core(folder, outer_lr=lr)
        for _ in range(rounds):
            do_round(core, round(10 * lr))
        core.close()
    assert core.state is not None and replay(folder).hash == core.state.hash
    told = [(r["kind"], r.get("lr")) for r in lines_of(folder)]
    changes = [("settings", 0.5), ("settings", 0.7)]
    assert told == [("begin", 0.7), ("round", None), *changes, ("round", None)]


@pytest.mark.parametrize("lr", [0.7, 0.5])
def test_a_replay_knows_the_settings_after_a_state_was_gone_back_from(
    folder: Path, lr: float
) -> None:
    for number, first in enumerate((0.7, 0.5)):
        core = make_core(folder, outer_lr=first)
        do_round(core, number)
        core.close()
    (folder / "export-2" / "model-00001-of-00001.safetensors").write_bytes(b"damaged")
    core = make_core(folder, outer_lr=lr)
    assert core.state is not None and core.state.commit == 1
    do_round(core, 3)
    core.close()
    assert replay(folder).hash == core.state.hash
    told = [r["kind"] for r in lines_of(folder)[4:]]
    assert told == ["rollback", *(["settings"] if lr == 0.7 else []), "round"]


def test_a_round_that_would_leave_no_numbers_is_not_applied(folder: Path) -> None:
    core = make_core(folder, outer_lr=1e30)
    assert core.state is not None
    before = core.state.hash
    worker = core.book.register("a", 0.0, comm="float32")
    huge = {n: torch.full(t.shape, 1e30) for n, t in MODEL.items()}
    message = compose({}, encode(huge, "float32").payloads)
    path = core.ledger.incoming / "huge.hwdl"
    path.write_bytes(b"".join(bytes(chunk) for chunk in message.chunks()))
    place = core.book.rounds[0]
    core.book.accept(
        worker,
        Submission("a", worker.session, place.id, 1, 0, message.digest, 1, "float32", False, 1.0,
                   message.num_bytes, str(path)),
        0.0,
    )  # fmt: skip
    job = core.start_round(0)
    assert core.carry_out(job) is None
    core.give_up_round(job)
    assert core.state.hash == before and not core.book.rounds[0].submissions
    assert core.book.rounds[0].id == place.id and not path.exists()
    assert [r["commit"] for r in lines_of(folder)] == [0]
    core.close()


def test_of_a_round_without_numbers_only_the_largest_is_dropped(folder: Path) -> None:
    core = make_core(folder, outer_lr=1e30)
    paths = {}
    for name, size in (("a", 1e-30), ("b", 1e30), ("c", 1e-30)):
        worker = core.book.register(name, 0.0, comm="float32")
        sent = {n: torch.full(t.shape, size) for n, t in MODEL.items()}
        message = compose({}, encode(sent, "float32").payloads)
        paths[name] = core.ledger.incoming / f"{name}.hwdl"
        paths[name].write_bytes(b"".join(bytes(chunk) for chunk in message.chunks()))
        core.book.accept(
            worker,
            Submission(name, worker.session, core.book.rounds[0].id, 1, 0, message.digest, 1,
                       "float32", False, size, message.num_bytes, str(paths[name])),
            0.0,
        )  # fmt: skip
    job = core.start_round(0)
    assert core.carry_out(job) is None
    core.give_up_round(job)
    assert [s.worker for s in core.book.rounds[0].submissions.values()] == ["a", "c"]
    assert [core.book.workers[name].num_refused for name in "abc"] == [0, 1, 0]
    assert [paths[name].exists() for name in "abc"] == [True, False, True]
    job = core.start_round(0)
    assert core.carry_out(job) is not None
    core.close()


def test_a_momentum_that_is_no_number_is_not_committed(folder: Path) -> None:
    """Parameters would follow it one round later, and a restart would bring it back."""
    core = make_core(folder, mode="async", num_workers=4)
    worker = core.book.register("a", 0.0, comm="float32")
    for number in range(2):
        assert core.state is not None
        sent = {n: torch.full(t.shape, 2e38) for n, t in MODEL.items()}
        message = compose({}, encode(sent, "float32").payloads)
        path = core.ledger.incoming / f"{number}.hwdl"
        path.write_bytes(b"".join(bytes(chunk) for chunk in message.chunks()))
        place = core.book.rounds[0]
        core.book.accept(
            worker,
            Submission("a", worker.session, place.id, place.number, 0, message.digest, 1,
                       "float32", False, 2e38, message.num_bytes, str(path)),
            0.0,
        )  # fmt: skip
        job = core.start_round(0)
        done = core.carry_out(job)
        if done is None:
            core.give_up_round(job)
            break
        core.finish_round(job, done, 0.0, 0.0)
    assert number == 1, "the sum of two is past what a float32 holds"
    groups = (core.state.parameters, core.state.velocity, core.state.buffer)
    assert all(bool(t.isfinite().all()) for group in groups for t in group.values())
    core.close()


def test_no_token_is_in_what_the_server_keeps(folder: Path) -> None:
    core = make_core(folder)
    do_round(core, 1)
    sessions = [worker.session.encode() for worker in core.book.workers.values()]
    core.close()
    for path in folder.rglob("*"):
        if path.is_file():
            assert not any(session in path.read_bytes() for session in sessions), path
