"""Compiled code is kept for later processes, in a folder that outlives the machine's restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from headway import TrainingArguments
from headway.errors import ConfigError
from headway.strategies.compile_cache import choose_folder, compile_cache

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def arguments(**options):
    return TrainingArguments(torch_compile=True, **options)


@pytest.fixture(autouse=True)
def users_folders(tmp_path, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    own = {"TORCHINDUCTOR_CACHE_DIR": "/somewhere"}
    assert choose_folder(None, {}) == tmp_path / ".cache/headway/compile"
    assert choose_folder(None, {"XDG_CACHE_HOME": "/var/x"}) == Path("/var/x/headway/compile")
    assert choose_folder(None, {"XDG_CACHE_HOME": "x"}) == tmp_path / ".cache/headway/compile"
    assert choose_folder(None, own) == Path("/somewhere")
    assert choose_folder("~/here", own) == tmp_path / "here"
    # What torch wrote there nobody asked for; the option may name the same folder all the same.
    torchs = default_cache_dir()
    assert choose_folder(None, {NAMES[0]: torchs}) == tmp_path / ".cache/headway/compile"
    assert choose_folder(torchs, {}) == Path(torchs)


def test_it_is_set_for_the_time_of_a_run(tmp_path, monkeypatch):
    with compile_cache(arguments()):
        assert os.environ[NAMES[0]] == str(tmp_path / "cache/headway/compile")
        assert (tmp_path / "cache/headway/compile").is_dir()
        os.environ[NAMES[1]] = "what the compiler writes there"
    assert not [name for name in NAMES if name in os.environ]
    monkeypatch.setenv(NAMES[0], str(tmp_path / "mine"))
    with pytest.raises(KeyError), compile_cache(arguments(torch_compile_cache=str(tmp_path / "a"))):
        assert os.environ[NAMES[0]] == str(tmp_path / "a")
        raise KeyError
    assert os.environ[NAMES[0]] == str(tmp_path / "mine")


def test_nothing_is_touched_where_nothing_is_kept(tmp_path):
    for args in (TrainingArguments(), arguments(torch_compile_backend="eager")):
        with compile_cache(args):
            assert NAMES[0] not in os.environ
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path, caplog):
    (tmp_path / "file").touch()
    with compile_cache(arguments(torch_compile_cache=str(tmp_path / "file" / "below"))):
        assert NAMES[0] not in os.environ
    assert "torch_compile_cache" in caplog.text and "file/below" in caplog.text


def test_options():
    with pytest.raises(ConfigError, match="torch_compile_cache must not be empty"):
        arguments(torch_compile_cache="")
    with pytest.warns(UserWarning, match="torch_compile_cache='x': without effect"):
        TrainingArguments(torch_compile_cache="x")


FACTOR = 2.0


class Doubled(torch.autograd.Function):
    """A gradient of its own, as those of kernels are."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * FACTOR


@pytest.mark.slow
def test_a_graph_with_a_gradient_of_its_own_is_kept(monkeypatch):
    def gradient():
        torch._dynamo.reset()
        counters["aot_autograd"].clear()
        x = torch.ones(4, requires_grad=True)
        with compile_cache(arguments()):
            torch.compile(lambda x: Doubled.apply(x).sin())(x).sum().backward()
        return x.grad

    found = counters["aot_autograd"]
    first = gradient()
    assert found["autograd_cache_saved"] > 0 and not found["autograd_cache_bypass"]
    assert torch.equal(gradient(), first)
    assert found["autograd_cache_hit"] > 0 and not found["autograd_cache_miss"]
    monkeypatch.setitem(globals(), "FACTOR", 3.0)  # which makes another graph of it
    torch.testing.assert_close(gradient(), first * 1.5)
    assert found["autograd_cache_miss"] > 0


RUN = """
import json, sys
from torch._dynamo.utils import counters
from headway.testing import tiny_decoder, tiny_trainer

trainer = tiny_trainer(
    sys.argv[1], max_steps=3, torch_compile=True, mixed_precision="bf16", seed=1
)
trainer.model_init = lambda: tiny_decoder(num_layers=3)
trainer.train()
kept = {**counters["inductor"], **counters["aot_autograd"]}
print(json.dumps({
    "graphs": counters["stats"]["unique_graphs"],
    "losses": [r["loss"] for r in trainer.state.log_history if "loss" in r],
    **{key: count for key, count in kept.items() if "cache" in key},
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(480)  # C++ compilers at work
def test_a_second_process_compiles_nothing(tmp_path):
    def run(name):
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(tmp_path / name)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, second = run("a"), run("b")
    assert first["graphs"] == second["graphs"] == 1  # three blocks, three steps
    assert first["losses"] == second["losses"]
    assert first["fxgraph_cache_miss"] == second["fxgraph_cache_hit"] == 2  # forward and backward
    assert second["autograd_cache_hit"] == 1
    assert first["autograd_cache_miss"] == 1  # and is not traced once more for dynamic shapes
    assert not [key for key in (*first, *second) if "bypass" in key]
    assert not [key for key in second if "miss" in key]
