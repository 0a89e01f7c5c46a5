"""A storage that fails or dies at a chosen operation, and small contents to save."""

import shutil

import torch
from torch import nn

from headway.checkpoint import CheckpointContents, RNGState, SharingPattern, StateComponent
from headway.checkpoint.storage import Storage


class Died(BaseException):
    """Stands for the end of the process: nothing after it reaches the disk."""


class CountingStorage(Storage):
    """Counts operations; at number `fail_at` raises, and if `dies`, at all that follow too."""

    def __init__(self, root, fail_at=None, *, dies=True):
        super().__init__(root)
        self.fail_at, self.dies, self.count = fail_at, dies, 0
        self.failed = False

    def tick(self):
        """Whether this operation is the one to fail; raises if the process is dead already."""
        if self.failed and self.dies:
            raise Died
        self.count += 1
        if self.count == self.fail_at:
            self.failed = True
            return True
        return False

    def error(self):
        return Died() if self.dies else OSError(28, "No space left on device")

    def make_dir(self, path):
        if self.tick():
            raise self.error()
        super().make_dir(path)

    def create(self, path):
        if self.tick():
            raise self.error()
        return _TornFile(self, super().create(path))

    def sync_file(self, path):
        if self.tick():
            raise self.error()
        super().sync_file(path)

    def sync_dir(self, path):
        if self.tick():
            raise self.error()
        super().sync_dir(path)

    def rename(self, source, target):
        if self.tick():
            raise self.error()
        super().rename(source, target)

    def delete_tree(self, path):
        if self.tick():
            victims = sorted(path.rglob("*.json"))
            victims[0].unlink()
            raise self.error()
        shutil.rmtree(path)


class _TornFile:
    def __init__(self, storage, file):
        self._storage, self._file = storage, file

    def write(self, data):
        if self._storage.tick():
            self._file.write(bytes(data)[: len(data) // 2])
            raise self._storage.error()
        return self._file.write(data)

    def close(self):
        self._file.close()


class Counter:
    """A stateful object with one number and one tensor."""

    def __init__(self, value=0):
        self.value = value
        self.tensor = torch.full((3,), float(value))

    def state_dict(self):
        return {"value": self.value, "tensor": self.tensor, "seen": (1, {"a": float("nan")})}

    def load_state_dict(self, state_dict):
        self.value = state_dict["value"]
        self.tensor = state_dict["tensor"]


class TiedModel(nn.Module):
    """An embedding, a layer and a head that shares the embedding's weight."""

    def __init__(self, seed=0, width=4):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.layer = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)
        self.lm_head = nn.Linear(width, 7, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        return self.lm_head(self.drop(self.layer(self.norm(self.embed(ids)))))


def make_contents(seed=0, value=0, **changes):
    model = TiedModel(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    fields = {
        "model": model,
        "optimizer": optimizer,
        "components": [
            StateComponent("rng", RNGState(), SharingPattern.PER_RANK),
            StateComponent("counter", Counter(value), SharingPattern.GLOBAL),
        ],
        "trainer_state": {"global_step": value, "log_history": [{"loss": 1.0, "step": 1}]},
    }
    return CheckpointContents(**{**fields, **changes})


def train(contents, num_steps):
    losses = []
    for _ in range(num_steps):
        ids = torch.randint(0, 7, (6,))
        loss = nn.functional.cross_entropy(contents.model(ids), ids)
        loss.backward()
        contents.optimizer.step()
        contents.optimizer.zero_grad()
        losses.append(loss.item())
    return losses
