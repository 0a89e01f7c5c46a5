"""Run files: what they become, and how each mistake is told (file, line, key)."""

import json
import re
import sys
from pathlib import Path

import pytest

from headway import TrainingArguments
from headway.config import load_run, resolved_config
from headway.config.components import _try_callback
from headway.config.load import _Files
from headway.errors import ConfigError

MODEL = "model: {vocab_size: 64, hidden_size: 16, num_layers: 1, num_heads: 2}\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write_file(text, name="run.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    return write_file


def problems_of(path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_run(path, overrides)
    return caught.value.problems


def test_a_whole_run(write):
    path = write(
        MODEL
        + "tokenizer: bytes\n"
        + "data:\n  train:\n    class_path: SyntheticDataset\n"
        + "    init_args: {num_samples: 8, sequence_length: 4, vocab_size: 64}\n"
        + "args:\n  learning_rate: 5e-5\n  max_grad_norm: 1\n  eval_strategy: no\n"
        + "  output_dir: out\n  train_for: 2B tokens\n"
        + "optimizer_groups:\n  no_decay: {regex: norm|bias, config: {weight_decay: 0.0}}\n"
        + "callbacks:\n  - ProgressCallback\n"
        + "default_callbacks: false\n"
    )
    run = load_run(path)
    assert run.model.class_path == "Decoder" and run.model.init_args["hidden_size"] == 16
    assert run.args.learning_rate == 5e-5 and run.args.eval_strategy == "no"
    assert run.args.max_grad_norm == 1.0 and run.args.train_for == "2B tokens"
    assert run.data.train.class_path == "SyntheticDataset" and run.data.eval is None
    assert run.callbacks[0].class_path == "ProgressCallback" and not run.default_callbacks
    assert run.optimizer_groups["no_decay"]["config"] == {"weight_decay": 0.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("args: {max_stepz: 1}\n", "run.yaml:2: args.max_stepz: unknown option .*'max_steps'"),
        ("args:\n  seed: x\n", "run.yaml:3: args.seed: must be int, got 'x'"),
        ("args:\n  warmup_steps: '5'\n", "run.yaml:3: .*write the number without quotes"),
        ("args:\n  learning_rate: 0,003\n", "run.yaml:3: .*write it with a point: 0.003"),
        ("args:\n  use_cpu: yes\n", "run.yaml:3: args.use_cpu: must be bool.*true or false"),
        ("args:\n  adam_beta1: 2\n", "run.yaml:3: args.adam_beta1: must lie in"),
        ("args:\n  report_to: [wadb]\n", "run.yaml:3: args.report_to: .*did you mean 'wandb'"),
        ("args:\n  logging_steps: 5\n  log_every: 5\n", r"run.yaml:4: args.log_every: .*_steps=5"),
        ("args: 3\n", "run.yaml:2: args: must be a mapping"),
        ("learning_rate: 3\n", "run.yaml:2: learning_rate: .*did you mean 'args.learning_rate'"),
        ("dta: 3\n", "run.yaml:2: dta: unknown key 'dta'; did you mean 'data'"),
        ("trainer: dpp\n", "run.yaml:2: trainer: unknown trainer 'dpp'; did you mean 'ddp'"),
        ("tokenizer: 5\n", "run.yaml:2: tokenizer: must be str or None"),
        ("default_callbacks: 5\n", "run.yaml:2: default_callbacks: must be bool"),
        ("data:\n  trian: {}\n", "run.yaml:3: data.trian: .*did you mean 'train'"),
        ("data: 3\n", "run.yaml:2: data: must be a mapping"),
        ("data:\n  train: 3\n", "run.yaml:3: data.train: must be a class_path"),
        ("data:\n  train: TokenDatset\n", "run.yaml:3: data.train.class_path: .*'TokenDataset'"),
        ("data:\n  train: {init_args: {}}\n", "run.yaml:3: data.train: needs a class_path"),
        ("data:\n  train: {class_path: x.Y, args: 1}\n", "data.train.args: .*'init_args'"),
        ("callbacks: 3\n", "run.yaml:2: callbacks: must be a list or a mapping"),
        ("callbacks:\n  - ProgresCallback\n", "run.yaml:3: callbacks.0.*'ProgressCallback'"),
        ("optimizer_groups: [1]\n", "run.yaml:2: optimizer_groups: must be a mapping"),
        ("optimizer_groups:\n  a: {}\n", "run.yaml:3: optimizer_groups.a: needs a regex"),
        ("optimizer_groups:\n  __default__: {regex: a}\n", "run.yaml:3: .*reserved"),
        ("optimizer_groups:\n  a: {regexp: a}\n", "optimizer_groups.a.regexp: .*'regex'"),
        ("tokenizer: a\ntokenizer: b\n", "run.yaml:3: the key 'tokenizer' is given twice"),
        ("tokenizer: !!python/name:os.system\n", "run.yaml:2: the tag .* is not allowed"),
        ("tokenizer: !!python/object/apply:os.system [ls]\n", "run.yaml:2: the tag"),
        ("a: [1, 2\n", "run.yaml:3: not valid YAML"),
        ("? [a, b]\n: 1\n", "run.yaml:2: a key must be plain text"),
        ("a: &a [*a]\n", "an alias contains itself"),
    ],
)
def test_mistakes_name_file_line_and_key(write, text, expected):
    problems = problems_of(write(MODEL + text))
    anywhere = "" if expected.startswith("run") else ".*"
    assert any(re.match(anywhere + expected, problem) for problem in problems), problems


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml: the file is empty"),
        ("# nothing\n", "run.yaml: the file is empty"),
        ("- a\n", "run.yaml:1: the file must hold a mapping of keys, found a list"),
        ("just text\n", "run.yaml:1: the file must hold a mapping"),
        ("args: {}\n", "run.yaml: model: missing"),
        ("model: {vocab_size: 8}\n", "run.yaml:1: model: missing arguments: hidden_size"),
        ("model:\n  vocab_sze: 8\n", "run.yaml:2: model.vocab_sze: .*'vocab_size'"),
        ("model: {class_path: pretrained, init_args: {dir: x}}\n", "model: missing argument"),
    ],
)
def test_files_that_are_no_runs(write, text, expected):
    problems = problems_of(write(text))
    assert any(re.match(expected, p) or re.search(f": {expected}", p) for p in problems), problems


def test_unreadable_files(tmp_path):
    assert "no such file" in problems_of(tmp_path / "absent.yaml")[0]
    assert "is a folder" in problems_of(tmp_path)[0]
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in problems_of(tmp_path / "binary.yaml")[0]


def test_alias_bomb_is_stopped(write):
    lines = ["a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "more than" in problems_of(write("\n".join(lines)))[0]


def test_deep_nesting_is_stopped(write):
    assert "nested too deeply" in problems_of(write("a: " + "[" * 5000))[0]


def test_numbers_as_written(write):
    path = write(MODEL + "args: {learning_rate: 1e-3, adam_epsilon: 1.0E-8, max_steps: 1_000}\n")
    args = load_run(path).args
    assert (args.learning_rate, args.adam_epsilon, args.max_steps) == (1e-3, 1e-8, 1000)


def test_anchors_and_merge_keys(write):
    path = write(
        "base: &sizes {vocab_size: 64, hidden_size: 16, num_layers: 1, num_heads: 2}\n"
        "model: {<<: *sizes, num_layers: 3}\n"
    )
    problems = problems_of(path)
    assert len(problems) == 1 and "'base'" in problems[0]
    run = load_run(
        write("model: {<<: {vocab_size: 64, hidden_size: 16, num_heads: 2}, num_layers: 3}\n")
    )
    assert run.model.init_args["num_layers"] == 3 and run.model.init_args["num_heads"] == 2


def test_extends(write):
    write(
        MODEL
        + "args: {max_steps: 100, warmup_steps: 4, save_total_limit: 5}\n"
        + "optimizer_groups:\n  a: {regex: x, config: {lr: 1.0}}\n  b: {regex: y}\n"
        + "callbacks: [ProgressCallback, InfoCallback]\n",
        "conf/base.yaml",
    )
    write("extends: base.yaml\nargs: {seed: 3, save_total_limit: null}\n", "conf/middle.yaml")
    path = write(
        "extends: conf/middle.yaml\n"
        "args: {max_steps: 5}\n"
        "optimizer_groups:\n  a: {regex: z}\n  b: null\n"
        "callbacks: [InfoCallback]\n"
    )
    run = load_run(path)
    assert (run.args.max_steps, run.args.warmup_steps, run.args.seed) == (5, 4, 3)
    assert run.args.save_total_limit == 2
    assert run.optimizer_groups == {"a": {"regex": "z"}}
    assert [callback.class_path for callback in run.callbacks] == ["InfoCallback"]


def test_extends_points_at_the_file_with_the_mistake(write):
    write(MODEL + "args:\n  seed: x\n", "base.yaml")
    assert problems_of(write("extends: [base.yaml]\n"))[0].startswith("base.yaml:3: args.seed")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("extends: run.yaml\n", "extend each other"),
        ("extends: absent.yaml\n", "run.yaml:1: extends: no such file"),
        ("extends: 3\n", "run.yaml:1: extends: must name a file"),
    ],
)
def test_extends_refused(write, text, expected):
    assert expected in problems_of(write(text))[0]


def test_another_class_drops_the_inherited_arguments(write):
    write("optimizer: {class_path: a.B, init_args: {momentum: 1}}\n" + MODEL, "base.yaml")
    write("extends: base.yaml\noptimizer: {class_path: c.D, init_args: {lr: 1}}\n")
    tree = _Files().read(Path("run.yaml"), [])
    assert tree.plain()["optimizer"] == {"class_path": "c.D", "init_args": {"lr": 1}}


def test_overrides(write):
    path = write(MODEL + "callbacks:\n  - class_path: ProgressCallback\n    init_args: {}\n")
    run = load_run(
        path,
        [
            "--args.max_steps=100",
            "args.learning_rate=1e-3",
            "model.num_layers=2",
            "args.save_total_limit=null",
            "callbacks.0.init_args.use_tqdm=false",
        ],
    )
    assert run.args.max_steps == 100 and run.args.learning_rate == 1e-3
    assert run.model.init_args["num_layers"] == 2 and run.args.save_total_limit is None
    assert run.callbacks[0].init_args == {"use_tqdm": False}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--args.max_stepz=1", "command line: args.max_stepz: .*did you mean 'max_steps'"),
        ("--args.max_steps=many", "command line: args.max_steps: must be int, got 'many'"),
        ("--args.max_steps", "command line: --args.max_steps: an override looks like"),
        ("--arg.max_steps=1", "command line: arg: unknown key 'arg'; did you mean 'args'"),
        ("--args.max_steps=[1", "command line: --args.max_steps: .*not valid YAML"),
        ("--callbacks.3=x", "command line: --callbacks.3: callbacks is a list of 1"),
    ],
)
def test_overrides_refused(write, override, expected):
    problems = problems_of(write(MODEL + "callbacks: [InfoCallback]\n"), [override])
    assert len(problems) == 1 and re.match(expected, problems[0]), problems


@pytest.mark.parametrize(
    ("option", "place"),
    [
        ("model.learning_rate", "args.learning_rate"),
        ("args.sequence_length", "data.train.init_args.sequence_length"),
        ("sequence_length", "data.train.init_args.sequence_length"),
        ("data.train.init_args.num_layers", "model.num_layers"),
        ("data.train.sequence_length", "data.train.init_args.sequence_length"),
    ],
)
def test_an_option_in_the_wrong_section_is_told_its_place(write, option, place):
    data = "data: {train: {class_path: TextDataset, init_args: {files: texts}}}\n"
    (problem,) = problems_of(write(MODEL + data), [f"--{option}=8"])
    assert problem.startswith(f"command line: {option}: unknown ")
    assert problem.endswith(f"; did you mean '{place}'?")


def test_all_mistakes_at_once(write):
    path = write("modle: 1\nargs:\n  sed: 1\n  max_steps: 0\ntrainer: x\n")
    assert len(problems_of(path, ["args.seed=x"])) == 6


def test_resolved_configuration_reads_back(write):
    run = load_run(write(MODEL + "args: {eval_every: 20min, dataloader_num_workers: 1}\n"))
    again = load_run(write(json.dumps(resolved_config(run)), "resolved.yaml"))
    assert again == run


def test_a_run_file_is_warned_about_options_without_effect(tmp_path, caplog):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {vocab_size: 8, hidden_size: 8, num_layers: 1, num_heads: 1}\n"
        "args: {torch_compile_mode: reduce-overhead}\n"
    )
    with caplog.at_level("WARNING"):
        load_run(path)
    assert "without effect, since torch_compile is False" in caplog.text
    with pytest.warns(UserWarning, match="without effect"):
        TrainingArguments.from_dict({"torch_compile_mode": "reduce-overhead"})


CALLBACKS = """\
callbacks:
  gc:
    class_path: GarbageCollectorCallback
    init_args:
      full_every: 3
      gc_interval: 0
  hang: {class_path: HangWatchdogCallback, init_args: {limit_s: -1, action: abrt}}
  convert: {class_path: HFConverterCallback, init_args: {debug: true}}
  skip:
    class_path: StepSkipRange
    init_args: {start: 5, stop: 4}
  wandb: {class_path: WandBCallback, init_args: {project: kite}}
"""


def test_values_that_callbacks_refuse_are_told_with_their_lines_all_at_once(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed: that is told when it is built
    path = write(MODEL + CALLBACKS)
    (gc, limit, action, debug, skip) = problems_of(path)
    assert gc.startswith("run.yaml:7: callbacks.gc.init_args.gc_interval: ")
    assert "GarbageCollectorCallback: gc_interval: 0 given" in gc
    assert limit.startswith("run.yaml:8: callbacks.hang.init_args.limit_s: ") and "-1" in limit
    assert (
        action.startswith("run.yaml:8: callbacks.hang.init_args.action: ") and "'abort'" in action
    )
    assert debug.startswith("run.yaml:9: callbacks.convert.init_args.debug: ")
    assert skip.startswith("run.yaml:12: callbacks.skip.init_args.stop: ") and "start=5" in skip
    given = problems_of(path, ["--callbacks.gc.init_args.gc_interval=-7"])
    assert given[0].startswith("command line: callbacks.gc.init_args.gc_interval: ")


def test_what_follows_from_a_refused_value_is_not_told_as_a_mistake():
    def make(validate=False, debug=False):
        if validate not in (True, False):
            raise ConfigError(f"Kind: validate: {validate!r} given; allowed: true or false")
        if debug and not validate:
            raise ConfigError("Kind: debug: True given; it needs validate")

    found = _try_callback(make, {"debug": True, "validate": "x"}, "at")
    assert [problem.options for problem in found] == [("at.validate",)]


def test_a_file_that_is_no_mapping_is_not_shown_in_full(write):
    (problem,) = problems_of(write("1 2 3 " * 500))
    assert "must hold a mapping of keys, found '1 2 3" in problem and len(problem) < 300


def test_a_program_is_no_run_file(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("args = dict(max_steps=1)\n")
    with pytest.raises(ConfigError, match=r"train.py: is a Python program, .* with torchrun"):
        load_run(program)
