"""Device state: moments, step counters and generators come back where they belong."""

import pytest
import torch
from checkpoint_faults import make_contents
from torch import nn

from headway.checkpoint import CheckpointContents, CheckpointManager
from headway.checkpoint.ranks import SoloRanks
from headway.checkpoint.side_copy import SideCopy
from headway.checkpoint.staging import Stager

pytestmark = pytest.mark.gpu


def train(contents, num_steps):
    losses = []
    for _ in range(num_steps):
        ids = torch.randint(0, 7, (6,), device="cuda")
        loss = torch.nn.functional.cross_entropy(contents.model(ids), ids)
        loss.backward()
        contents.optimizer.step()
        contents.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def contents_on_device(seed, **options):
    contents = make_contents(seed=seed)
    contents.model.cuda()
    contents.optimizer = torch.optim.AdamW(contents.model.parameters(), lr=0.05, **options)
    return contents


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"capturable": True}])
def test_resume_on_a_device_is_bitwise(tmp_path, options):
    contents = contents_on_device(0, **options)
    train(contents, 3)
    manager = CheckpointManager(tmp_path)
    manager.save(contents, 3)
    expected = train(contents, 3)
    resumed = contents_on_device(1, **options)
    manager.load(resumed)
    for a, b in zip(contents.model.parameters(), resumed.model.parameters()):
        devices = [
            {key: value.device for key, value in one.optimizer.state[param].items()}
            for one, param in ((contents, a), (resumed, b))
        ]
        assert devices[0] == devices[1]
    assert train(resumed, 3) == expected
    assert resumed.model.lm_head.weight is resumed.model.embed.weight


def test_saved_on_a_device_loads_on_the_host_and_back(tmp_path):
    contents = contents_on_device(0, fused=True)
    train(contents, 2)
    manager = CheckpointManager(tmp_path)
    manager.save(contents, 2)
    host = make_contents(seed=1)
    manager.load(host, components=["model", "optimizer"])
    param, there = host.model.layer.weight, contents.model.layer.weight
    state = host.optimizer.state[param]
    assert {value.device.type for value in state.values()} == {"cpu"}
    assert torch.equal(state["exp_avg"], contents.optimizer.state[there]["exp_avg"].cpu())
    manager.save(host, 3)
    back = contents_on_device(2, fused=True)
    manager.load(back, components=["model", "optimizer"])
    assert {v.device.type for v in back.optimizer.state[back.model.layer.weight].values()} == {
        "cuda"
    }


class Large(nn.Module):
    """Weights that take a while to copy, and a buffer that every forward changes."""

    def __init__(self, num_layers=16, width=2048):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))
        self.register_buffer("count", torch.zeros(4_000_000))

    def forward(self, x):
        self.count.add_(1)
        for layer in self.layers:
            x = layer(x)
        return x


def large_contents():
    torch.manual_seed(0)
    model = Large().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    contents = CheckpointContents(model, optimizer)
    step(contents)
    return contents


def step(contents, before_apply=lambda: None):
    x = torch.ones(8, 2048, device="cuda")
    contents.model(x).square().mean().backward()
    before_apply()
    contents.optimizer.step()
    contents.optimizer.zero_grad()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_training_goes_on_during_the_copy_and_none_of_it_is_in_the_checkpoint(
    tmp_path, monkeypatch, share
):
    """Whether all of the state, a part or nothing is cloned on the device first."""
    contents = large_contents()
    manager = CheckpointManager(tmp_path)
    monkeypatch.setattr(SideCopy, "_learn", lambda self: setattr(self, "_share", share))
    manager.reserve(contents)
    for number in range(3):  # the first warms up, all must be right
        torch.cuda.synchronize()
        before = {n: t.clone() for n, t in contents.model.state_dict().items()}
        moment = contents.optimizer.state[contents.model.layers[3].weight]["exp_avg"].clone()
        pending = manager.stage(contents, number)
        for _ in range(2):
            step(contents, manager.wait_before_update)
        path = manager.write(pending)
        again = large_contents()
        manager.load(again, path)
        for name, tensor in again.model.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        found = again.optimizer.state[again.model.layers[3].weight]["exp_avg"]
        assert torch.equal(found, moment)


def test_what_a_forward_writes_to_is_in_the_checkpoint_as_it_was(tmp_path):
    """Parameters that no optimizer has, such as an encoder that follows another one."""
    torch.manual_seed(0)
    model = nn.ParameterDict(
        {"own": torch.randn(4096, 4096), "follows": torch.randn(4096, 4096)}
    ).cuda()
    model["follows"].requires_grad_(False)
    optimizer = torch.optim.AdamW([model["own"]], lr=0.1, fused=True)
    model["own"].grad = torch.randn_like(model["own"])
    optimizer.step()
    contents = CheckpointContents(model, optimizer)
    manager = CheckpointManager(tmp_path)
    manager.reserve(contents)
    follows = model["follows"].detach().clone()
    pending = manager.stage(contents, 1)
    for _ in range(50):
        model["follows"].data.mul_(0.5)
    manager.write(pending)
    torch.cuda.synchronize()
    model["follows"].data.zero_()
    manager.load(contents, components=["model"])
    assert torch.equal(model["follows"], follows)


def test_host_memory_is_page_locked_and_no_larger_than_the_state():
    contents = large_contents()
    stager = Stager(SoloRanks())
    stager.reserve(contents)
    reserved = stager.host_bytes
    staged = stager.stage(contents)
    staged.wait()
    slots = [values[name] for values, name in staged.tensor_slots()]
    size = sum(t.numel() * t.element_size() for t in slots)
    assert stager.host_bytes == reserved <= 1.05 * size
    assert slots[0].is_pinned()


def test_staging_does_not_wait_for_the_device():
    contents = large_contents()
    stager = Stager(SoloRanks())
    stager.stage(contents).wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of a busy device
    started = torch.cuda.Event()
    started.record()
    stager.stage(contents)
    assert not started.query(), "the host got here while the device was still busy"
    torch.cuda.synchronize()


def active_bytes():
    """What the allocator cannot give to anybody else."""
    torch.empty(1, device="cuda")  # it looks at what has become free when it is asked for memory
    return torch.cuda.memory_stats()["active_bytes.all.current"]


def test_clones_are_given_back_when_the_copy_is_through(monkeypatch):
    contents = large_contents()
    monkeypatch.setattr(SideCopy, "_learn", lambda self: setattr(self, "_share", 0.0))
    stager = Stager(SoloRanks())
    stager.stage(contents).wait()
    stager.wait_before_update()  # clones are made after the first step only
    before = active_bytes()
    stager.stage(contents)
    assert active_bytes() > before + 100 * 2**20
    torch.cuda.synchronize()
    assert active_bytes() == before, "though nobody waited for the copy"
