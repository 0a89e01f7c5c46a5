"""The proofs of benchmarks/faults.py in a size that every test run can afford.

HEADWAY_FAULTS_FULL=1 runs the crash points, damage and errors in full size here as well.
"""

import os
import subprocess

import pytest

from headway.checkpoint import CheckpointManager, verify
from headway.testing.contents import make_contents, train
from headway.testing.proofs.crashes import prove_crash_points
from headway.testing.proofs.damage import prove_damage, prove_flips
from headway.testing.proofs.errors import fill_disk, prove_io_errors, prove_training_errors
from headway.testing.proofs.kills import prove_kills
from headway.testing.proofs.ranks import prove_rank_crash_points

FULL = os.environ.get("HEADWAY_FAULTS_FULL") == "1"

pytestmark = pytest.mark.timeout(7200 if FULL else 120)


def test_a_crash_at_any_operation_leaves_the_old_or_the_new_checkpoint():
    outcome = prove_crash_points(10_000 if FULL else 1, seed=1, stride=1 if FULL else 23)
    outcome.require_success()
    assert outcome.counts["points"] > 250
    assert outcome.counts["points with loss of unsynced data"] > 100
    assert outcome.counts["points in a clean-up"] > 0
    assert outcome.counts["states loaded"] > 5


def test_the_death_of_one_rank_or_of_all_leaves_the_old_or_the_new_checkpoint():
    outcome = prove_rank_crash_points(4_000 if FULL else 1, seed=1, stride=1 if FULL else 8)
    outcome.require_success()
    assert outcome.counts["deaths of one rank"] > 10


def test_killed_training_goes_on_by_itself_and_ends_as_if_undisturbed():
    outcome = prove_kills(300 if FULL else 4, seed=1, max_steps=90 if FULL else 12)
    outcome.require_success()
    assert outcome.counts["kills"] >= 4
    assert outcome.counts["kills inside a save"] >= 1


def test_every_flipped_bit_is_detected_and_the_file_named():
    outcome = prove_flips(None if FULL else 400, seed=1)
    outcome.require_success()
    assert outcome.counts["flips"] >= 400
    assert outcome.counts["fallbacks taken"] >= 8


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"0.30000000000000004", b"0.30000000000000005"), (b'"optimizer-0', b'"/ptimizer-0')],
    ids=["a digit that changes no value", "a name that leads elsewhere"],
)
def test_a_flip_in_the_manifest_names_the_manifest(tmp_path, before, after):
    contents = make_contents()
    train(contents, 1)
    path = CheckpointManager(tmp_path).save(contents, 1, metric=0.1 + 0.2)
    manifest = path / "checkpoint_manifest.json"
    data = manifest.read_bytes()
    assert before in data
    manifest.write_bytes(data.replace(before, after, 1))
    assert any(str(manifest) in problem for problem in verify(path))


def test_damaged_files_are_detected_and_the_older_checkpoint_taken():
    outcome = prove_damage(8 if FULL else 1, seed=1)
    outcome.require_success()
    assert outcome.counts["damages"] > 100


def test_errors_of_the_disk_fail_the_save_and_nothing_else():
    outcome = prove_io_errors(600 if FULL else 80, seed=1)
    outcome.require_success()
    assert outcome.counts["errors raised"] > 40
    assert outcome.counts["short write"] > 0


def test_an_error_of_the_disk_ends_training_with_the_last_save_intact():
    outcome = prove_training_errors(100 if FULL else 4, seed=1)
    outcome.require_success()
    assert outcome.counts["errors raised"] >= 2


def test_a_full_disk_fails_the_save_and_room_lets_the_next_succeed(tmp_path):
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("needs the right to mount a file system")
    try:
        outcome = fill_disk(tmp_path, seed=1)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    outcome.require_success()
    assert outcome.counts["saves until full"] >= 2
