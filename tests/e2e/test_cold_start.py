"""From the command to the first step: what it took is told, and nothing needless is imported."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from headway.testing import tiny_text_files

RUN = """\
model: {vocab_size: 258, hidden_size: 32, num_layers: 2, num_heads: 4, max_seq_len: 64}
tokenizer: bytes
data:
  train: {class_path: TextDataset, init_args: {files: text, sequence_length: 32}}
callbacks: [{class_path: looks.Looks}]
args: {output_dir: out, seed: 1, use_cpu: true, max_steps: 2, per_device_train_batch_size: 4}
"""
LOOKS = """\
import gc
from pathlib import Path
from headway import TrainerCallback

class Looks(TrainerCallback):
    def on_init_end(self):
        Path("looks.txt").write_text(f"{gc.isenabled()} {gc.get_freeze_count() > 100_000}")
"""
# Other trainers, trackers and drawing, none of which such a run asks for.
NEEDLESS = {
    "accelerate", "aiohttp", "bitsandbytes", "comet_ml", "datasets", "deepspeed", "fsspec",
    "IPython", "jinja2", "jsonargparse", "matplotlib", "mlflow", "pandas", "plotly", "psutil",
    "pyarrow", "pydantic", "pytest", "requests", "rich", "scipy", "setuptools", "sklearn",
    "tensorboard", "tokenizers", "torchao", "torchvision", "transformers", "wandb",
}  # fmt: skip
# Parts of torch for which this run has no use.
NEEDLESS_PARTS = {
    "torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.pipelining",
    "torch.utils.cpp_extension", "torch.utils.tensorboard",
}  # fmt: skip


def test_the_start_of_a_run(tmp_path):
    tiny_text_files(tmp_path / "text", num_files=2)
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "looks.py").write_text(LOOKS)
    command = [sys.executable, "-X", "importtime", "-m", "headway", "train", "run.yaml", "--json"]

    def train():
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)

    began_s = time.monotonic()
    done = train()
    passed_s = time.monotonic() - began_s
    told = json.loads(done.stdout)
    phases = told["start_phases_s"]
    assert list(phases) == ["imports", "data", "model", "set-up", "first step"]
    assert abs(sum(phases.values()) - told["first_step_s"]) < 1e-6
    assert phases["imports"] < told["first_step_s"] <= passed_s + 0.05
    assert f"first step after {told['first_step_s']:.1f} s (imports " in done.stderr
    # What was imported is out of the collector's way, which looks again.
    assert (tmp_path / "looks.txt").read_text() == "True True"
    lines = (line.split("|") for line in done.stderr.splitlines() if "import time:" in line)
    imported = {parts[2].strip() for parts in lines}
    assert "torch" in imported
    assert {name.partition(".")[0] for name in imported} & NEEDLESS == set()
    assert imported & NEEDLESS_PARTS == set()
    assert json.loads(train().stdout)["first_step_s"] is None  # there was nothing left to do
