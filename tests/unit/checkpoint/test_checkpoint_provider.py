"""A loop of the user's own: a provider of components, saved and loaded through one interface."""

import pytest
import torch
from torch import nn

from headway.checkpoint import (
    CheckpointError,
    CheckpointInterface,
    CheckpointManager,
    ProviderCheckpoints,
    RNGState,
    SharingPattern,
    StateComponent,
    find_latest_checkpoint,
    read_manifest,
    verify,
)
from headway.errors import ConfigError


class Loop:
    """Lists its model, optimizer, schedule and generators."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.state = {"global_step": 0}

    def get_state_components(self):
        pattern = SharingPattern.GLOBAL
        return [
            StateComponent("model", self.model, pattern),
            StateComponent("optimizer", self.optimizer, pattern),
            StateComponent("scheduler", self.schedule, pattern),
            StateComponent("rng", RNGState(), SharingPattern.PER_RANK),
        ]

    def get_process_groups(self):
        return {}

    def train(self, num_steps):
        for _ in range(num_steps):
            self.model(torch.randn(2, 3)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.state["global_step"] += 1
        return self

    def checkpoints(self, folder, **options):
        manager = CheckpointManager(folder, **options)
        return ProviderCheckpoints(
            manager, self, progress=lambda: dict(self.state), loaded=self.state.update
        )


def test_a_loop_goes_on_where_it_was_saved(tmp_path):
    loop = Loop().train(2)
    checkpoints = loop.checkpoints(tmp_path / "run")
    assert isinstance(checkpoints, CheckpointInterface)
    path = checkpoints.save_checkpoint()
    assert path == str(tmp_path / "run" / "checkpoint-2") and not verify(path)
    named = checkpoints.save_checkpoint(str(tmp_path / "named"), checkpoint_id=7)
    assert read_manifest(named).step == 7 and not verify(named)
    expected = loop.train(2).model.weight

    for source in (None, path, named):
        other = Loop(seed=1)
        other.checkpoints(tmp_path / "run").load_checkpoint(source)
        assert other.state["global_step"] == 2
        assert torch.equal(other.train(2).model.weight, expected)


def test_what_is_missing_is_said(tmp_path):
    loop = Loop()
    checkpoints = loop.checkpoints(tmp_path / "run")
    assert checkpoints.resolve_checkpoint_path(None) is None
    assert checkpoints.resolve_checkpoint_path(str(tmp_path / "absent")) is None
    with pytest.raises(CheckpointError, match="run is, or holds, no checkpoint"):
        checkpoints.load_checkpoint()
    with pytest.raises(ConfigError, match="checkpoint_id"):
        checkpoints.save_checkpoint(checkpoint_id="soon")
    bare = ProviderCheckpoints(CheckpointManager(tmp_path / "run"), loop)
    with pytest.raises(ConfigError, match="checkpoint_id"):
        bare.save_checkpoint()
    loop.get_state_components = list
    with pytest.raises(ConfigError, match="'model'"):
        checkpoints.save_checkpoint()
    assert not (tmp_path / "run").exists()


def test_the_best_are_ranked_kept_and_summed_up(tmp_path):
    loop = Loop()
    checkpoints = loop.checkpoints(tmp_path, save_total_limit=1, preserve_n_best=2)
    assert checkpoints.get_best_checkpoints_summary() == "none"
    among = []
    for metric in (3.0, 2.0, 2.5, 4.0, 5.0):
        path = checkpoints.save_checkpoint(checkpoint_id=loop.train(1).state["global_step"])
        among.append(checkpoints.update_best_checkpoints(path, metric))
        assert not verify(path)
    assert among == [True, True, True, False, False]
    assert checkpoints.get_best_checkpoints_summary() == "checkpoint-2 (2), checkpoint-3 (2.5)"
    checkpoints.set_best_checkpoint(str(tmp_path / "checkpoint-5"))
    checkpoints.save_checkpoint(checkpoint_id=6)
    names = sorted(p.name for p in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-3", "checkpoint-5", "checkpoint-6"]
    assert find_latest_checkpoint(tmp_path).endswith("checkpoint-6")


def test_a_model_folder_is_not_overwritten_unasked(tmp_path):
    checkpoints = Loop().checkpoints(tmp_path / "run")
    checkpoints.save_model(str(tmp_path / "model"))
    with pytest.raises(ConfigError, match="overwrite_output_dir=True"):
        checkpoints.save_model(str(tmp_path / "model"))
    checkpoints.save_model(str(tmp_path / "model"), overwrite_output_dir=True)
