"""Device state: moments, step counters and generators come back where they belong."""

import pytest
import torch
from checkpoint_faults import make_contents

from headway.checkpoint import CheckpointManager

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
