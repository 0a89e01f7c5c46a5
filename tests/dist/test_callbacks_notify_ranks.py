"""Who speaks when a rank fails or is killed, on real ranks and a real server."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from headway import DDPTrainer, TrainerCallback
from headway.callbacks import SlackNotifierCallback, WebhookCallback
from headway.dist import init_distributed
from headway.testing import RankFailure, run_ranks, tiny_dataset, tiny_decoder

sys.path.append(str(Path(__file__).parents[1] / "unit/callbacks"))
from local_server import local_server


class Breaks(TrainerCallback):
    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how = rank, how

    def on_step_end(self, args: Any, state: Any) -> None:
        if state.global_step == 2 and args.process_index == self.rank:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("bad luck")


def train(folder: str, url: str, rank: int, how: str) -> None:
    os.environ["NO_PROXY"] = "127.0.0.1"
    init_distributed(use_cpu=True)
    DDPTrainer(
        args={
            "output_dir": folder,
            "per_device_train_batch_size": 2,
            "max_steps": 4,
            "save_strategy": "no",
            "use_cpu": True,
        },
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(16, sequence_length=8),
        callbacks=[
            SlackNotifierCallback(webhook_url=f"{url}/slack"),
            WebhookCallback(f"{url}/hook", events=["start", "end", "failure"]),
            Breaks(rank, how),
        ],
        default_callbacks=False,
    ).train()


@pytest.mark.parametrize(
    ("rank", "how", "words"),
    [
        (1, "raises", "rank 1 of 2 failed: ValueError: callback 'Breaks', on_step_end: bad luck"),
        (0, "killed", "rank 0 of 2 was lost"),
    ],
)
def test_the_failing_rank_is_named_once(tmp_path: Path, rank: int, how: str, words: str) -> None:
    with local_server() as server, pytest.raises(RankFailure):
        run_ranks(train, 2, str(tmp_path), server.url, rank, how, timeout_s=60)
    slack = [json.loads(got.body)["text"] for got in server.got if got.path == "/slack"]
    hook = [json.loads(got.body) for got in server.got if got.path == "/hook"]
    assert len(slack) == 1 and words in slack[0]
    assert [body["event"] for body in hook] == ["start", "failure"]
    assert words in hook[1]["error"]
