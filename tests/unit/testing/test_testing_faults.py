"""The fault harness does what it says, so that the proofs prove something."""

import errno
import signal

import pytest

from headway.errors import ConfigError
from headway.testing import Died, Fault, FaultyStorage, ForkServer, Journal, crash_states
from headway.testing import enumerate_operations as list_operations


@pytest.fixture
def storage_with(tmp_path):
    def make(*args, **options):
        return FaultyStorage(tmp_path / "run", Fault(*args, **options))

    return make


def finish(storage):
    file = storage.create(storage.root / "loose")
    file.write(b"abcdefgh")
    file.close()


def begin(storage):
    storage.make_root()
    storage.write_bytes(storage.root / "safe", b"12345678")
    storage.sync_dir(storage.root)


@pytest.mark.parametrize(
    ("action", "operation", "says"),
    [("eror", None, "did you mean 'error'"), ("error", "writ", "did you mean 'write'")],
)
def test_a_misspelt_fault_is_refused(action, operation, says):
    with pytest.raises(ConfigError, match=says):
        Fault(action, at=1, operation=operation)


def test_operations_are_listed_in_order(tmp_path):
    kinds = [o.kind for o in list_operations(begin, tmp_path / "run")]
    assert kinds == [
        "make_dir",
        "sync_dir",
        "create",
        "write",
        "sync_file",
        "sync_dir",
    ]


def test_an_error_comes_at_its_operation_only(storage_with):
    storage = storage_with("error", 1, operation="write", errno=errno.EDQUOT)
    with pytest.raises(OSError) as caught:
        begin(storage)
    assert caught.value.errno == errno.EDQUOT
    assert (storage.root / "safe").read_bytes() == b"1234"
    finish(storage)
    assert (storage.root / "loose").read_bytes() == b"abcdefgh"


def test_a_lasting_error_stays(storage_with):
    storage = storage_with("error", 2, lasting=True)
    with pytest.raises(OSError):
        begin(storage)
    with pytest.raises(OSError, match="No space left"):
        storage.make_dir(storage.root / "more")


def test_a_short_write_is_told_and_made_good_by_the_writer(storage_with):
    storage = storage_with("short_write", 1)
    begin(storage)
    assert storage.struck
    assert (storage.root / "safe").read_bytes() == b"12345678"


def test_a_write_that_only_claims_to_be_whole_is_noticed(storage_with):
    with pytest.raises(OSError, match="4 bytes are there of 8"):
        begin(storage_with("truncate", 1))


def test_after_death_nothing_reaches_the_disk(storage_with):
    storage = storage_with("die", 1, operation="sync_file")
    with pytest.raises(Died):
        begin(storage)
    with pytest.raises(Died):
        finish(storage)
    assert [path.name for path in storage.root.iterdir()] == ["safe"]


def test_a_power_cut_keeps_what_was_synced_and_nothing_else(storage_with):
    storage = storage_with("power_cut", 2, operation="write")
    begin(storage)
    with pytest.raises(Died):
        finish(storage)
    assert [path.name for path in storage.root.iterdir()] == ["safe"]
    assert (storage.root / "safe").read_bytes() == b"12345678"


def test_a_fault_counts_only_the_operations_of_its_rank(tmp_path):
    fault = Fault("die", 1, rank=1)
    begin(FaultyStorage(tmp_path / "run", fault, rank=0))
    with pytest.raises(Died):
        finish(FaultyStorage(tmp_path / "run", fault, rank=1))


def test_a_seed_chooses_the_same_fault_again():
    faults = [Fault.random("error", 50, seed) for seed in range(30)]
    assert faults == [Fault.random("error", 50, seed) for seed in range(30)]
    assert len({(fault.at, fault.errno) for fault in faults}) > 20


def test_crash_states_know_what_a_cut_may_leave(tmp_path):
    journal = Journal(tmp_path)
    storage = FaultyStorage(tmp_path / "run", journal=journal)
    begin(storage)
    finish(storage)
    storage.rename(storage.root / "safe", storage.root / "moved")
    states = list(crash_states(journal, seed=3, num_cuts=30, num_torn=2))
    last = [state for state in states if state.operation is None]
    by_variant = {state.variant: state.directory.files for state in last}
    assert by_variant["killed"] == {"run/moved": b"12345678", "run/loose": b"abcdefgh"}
    assert by_variant["safe"] == {"run/safe": b"12345678"}
    names = {frozenset(files) for files in by_variant.values()}
    assert names == {
        frozenset({"run/safe"}),
        frozenset({"run/moved"}),
        frozenset({"run/safe", "run/loose"}),
        frozenset({"run/moved", "run/loose"}),
    }
    loose = {files["run/loose"] for files in by_variant.values() if "run/loose" in files}
    assert b"" in loose and bytes(8) in loose and any(data[:1] == b"a" for data in loose)
    others = {d for files in by_variant.values() for n, d in files.items() if n != "run/loose"}
    assert others == {b"12345678"}
    torn_states = [s.directory.files for s in states if s.variant.startswith("torn")]
    torn = [files["run/loose"] for files in torn_states if "run/loose" in files]
    assert torn and all(b"abcdefgh".startswith(data) and 0 < len(data) < 8 for data in torn)
    again = crash_states(journal, seed=3, num_cuts=30, num_torn=2)
    assert [state.directory.key() for state in again] == [s.directory.key() for s in states]


def test_a_fork_server_reports_how_its_children_end(tmp_path):
    log = tmp_path / "log"
    with ForkServer(preload=("json",), log=log) as server:
        server.start("json:dumps", obj=1)
        assert server.wait() == 0
        server.start("json:loads", s="{")
        assert server.wait() == 1
        server.start("signal:pause")
        server.kill()
        assert server.wait() == -9
        first, second = server.start("signal:pause"), server.start("signal:pause")
        assert server.wait_any(0) == set()
        server.kill(second, signal.SIGTERM)
        assert server.wait_any(60) == {second}
        assert server.wait(second) == -signal.SIGTERM
        server.kill(first)
        assert server.wait(first) == -9
    assert "JSONDecodeError" in log.read_text()
