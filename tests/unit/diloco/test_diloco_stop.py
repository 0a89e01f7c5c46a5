"""A server that is stopped in the middle of a round ends with the round."""

from __future__ import annotations

import threading
from pathlib import Path

from headway.diloco import replay
from headway.testing.diloco import ToyWorker, serving


def test_a_round_under_way_at_a_stop_is_committed_and_known(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with serving(folder, keep_submissions=True) as server:
        entered = threading.Event()
        commit = server.core.ledger.commit

        def commit_at_the_stop(*args, **kwargs):
            entered.set()
            while not server._stopping:
                threading.Event().wait(0.01)
            return commit(*args, **kwargs)

        worker = ToyWorker(server.address, should_end=lambda: server._stopping).start()
        server.core.ledger.commit = commit_at_the_stop
        training = threading.Thread(target=worker.train, args=(4,), daemon=True)
        training.start()
        assert entered.wait(60)
        assert server.stop()
        training.join(60)
        assert not training.is_alive()
        worker.worker.stop()
    assert server.core.state.commit == 1
    assert server.state_hash == replay(folder).hash
