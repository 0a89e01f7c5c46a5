"""What a resume chooses, what it restores, and what it says about changes."""

import json
import logging
import os
import signal

import pytest
import torch

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.callbacks import CheckpointerCallback, JsonLogger
from headway.checkpoint import CheckpointError, read_manifest, verify
from headway.checkpoint.digest import digest_bytes
from headway.checkpoint.manifest import write_manifest
from headway.checkpoint.storage import FileRecord, Storage
from headway.cli.main import main
from headway.data.fingerprint import fingerprint_data
from headway.data.loader import WindowLoader
from headway.data.tokenizer import ByteTokenizer
from headway.errors import ConfigError
from headway.testing import tiny_dataset, tiny_decoder, tiny_trainer
from headway.trainers.fingerprints import fingerprint_tokenizer
from headway.trainers.resume import ResumeReport, compare_configs


def make(folder, steps, *, model=tiny_decoder, data=None, tokenizer=None, groups=None, **arguments):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 20,
        "save_steps": 2,
        "save_total_limit": None,
        "learning_rate": 1e-2,
        "stop_at": steps,
        "seed": 3,
        "use_cpu": True,
        **arguments,
    }
    return Trainer(
        args=TrainingArguments(**settings),
        model_init=model,
        train_dataset=tiny_dataset(48, sequence_length=8) if data is None else data,
        processing_class=tokenizer,
        optimizer_groups=groups,
        default_callbacks=False,
    )


def train(folder, steps, **changes):
    trainer = make(folder, steps, **changes)
    trainer.train()
    return trainer


def report(folder, step):
    return json.loads((folder / "run" / f"resume-{step}.json").read_text())


def differences(folder, step):
    return {item["key"]: item for item in report(folder, step)["differences"]}


def spoil(path):
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


# Which checkpoint


def test_a_path_that_does_not_exist_is_an_error(tmp_path):
    train(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"checkpoint-9 does not exist.*checkpoint-2"):
        train(tmp_path, 4, resume_from_checkpoint=str(tmp_path / "checkpoint-9"))


def test_what_is_no_path_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint must be .*, got 5"):
        make(tmp_path, 2).train(resume_from_checkpoint=5)


def test_false_starts_afresh_only_when_told_to_overwrite(tmp_path):
    train(tmp_path, 2)
    with pytest.raises(ConfigError, match="overwrite_output_dir=True"):
        train(tmp_path, 4, resume_from_checkpoint=False)
    again = make(tmp_path, 1, resume_from_checkpoint=False, overwrite_output_dir=True)
    assert again.train().global_step == 1
    assert not (tmp_path / "run" / "resume-2.json").exists()


def test_a_fresh_start_at_a_used_address_deletes_nothing(tmp_path):
    pytest.importorskip("fsspec")
    place = {"checkpoint_address": f"file://{tmp_path}/bucket"}
    make(tmp_path / "first", 4, **place).train()
    fresh = {"resume_from_checkpoint": False, "overwrite_output_dir": True}
    with pytest.raises(ConfigError, match=r"checkpoint-4; choose another checkpoint_address$"):
        make(tmp_path / "second", 6, save_total_limit=1, **place, **fresh).train()
    assert [verify(tmp_path / "bucket" / f"checkpoint-{step}") for step in (2, 4)] == [[], []]


def test_the_newest_is_told_by_the_save_counter(tmp_path):
    train(tmp_path, 6)
    train(tmp_path, 3, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    # 6 was saved before 3, so the run goes on from 3.
    assert train(tmp_path, 4).state.global_step == 4
    assert report(tmp_path, 3)["checkpoint"].endswith("checkpoint-3")


def test_a_damaged_newest_is_named_file_by_file_and_passed_over(tmp_path, caplog):
    train(tmp_path, 6)
    files = [
        tmp_path / "checkpoint-6" / "model-00001-of-00001.safetensors",
        tmp_path / "checkpoint-6" / "trainer_state.json",
        tmp_path / "checkpoint-4" / "checkpoint_manifest.json",
    ]
    for file in files:
        spoil(file)
    with caplog.at_level(logging.WARNING):
        train(tmp_path, 5)
    assert all(str(file) in caplog.text for file in files)
    told = report(tmp_path, 2)
    assert told["checkpoint"].endswith("checkpoint-2") and len(told["damaged"]) == 3


@pytest.mark.parametrize("prefix", ["model", "optimizer"])
def test_what_a_damaged_file_left_in_the_tensors_is_overwritten(tmp_path, prefix):
    straight_on = train(tmp_path / "a", 6)
    train(tmp_path / "b", 4)
    file = tmp_path / "b" / "checkpoint-4" / f"{prefix}-00001-of-00001.safetensors"
    spoil(file)
    with pytest.raises(CheckpointError, match=file.name):
        train(tmp_path / "b", 6, resume_from_checkpoint=str(file.parent))
    resumed = train(tmp_path / "b", 6)
    told = report(tmp_path / "b", 2)
    assert told["checkpoint"].endswith("checkpoint-2")
    assert len(told["damaged"]) == 1 and str(file) in told["damaged"][0]
    for a, b in zip(straight_on.model.parameters(), resumed.model.parameters()):
        assert torch.equal(a, b)


def test_the_policy_can_be_to_stop(tmp_path):
    train(tmp_path, 4)
    file = tmp_path / "checkpoint-4" / "optimizer-00001-of-00001.safetensors"
    spoil(file)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path, 5, on_damaged_checkpoint="stop")
    assert str(file) in str(caught.value) and "checkpoint-2" in str(caught.value)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("unreadable", [False, True])
def test_damage_to_an_older_checkpoint_is_no_matter(unreadable, tmp_path, caplog):
    train(tmp_path, 6)
    file = tmp_path / "checkpoint-2" / "checkpoint_manifest.json"
    if unreadable:
        file.write_text("{")
    else:  # it can be read, and is not what was committed
        file.write_text(file.read_text().replace('"metric"', '"Metric"'))
    with caplog.at_level(logging.WARNING):
        assert train(tmp_path, 7, on_damaged_checkpoint="stop").state.global_step == 7
    assert "damaged" not in caplog.text and report(tmp_path, 6)["damaged"] == []


def test_a_damaged_checkpoint_pushes_out_no_good_one(tmp_path):
    train(tmp_path, 6, save_total_limit=2)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6"]
    spoil(tmp_path / "checkpoint-6" / "optimizer-00001-of-00001.safetensors")
    train(tmp_path, 5, save_total_limit=2)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    # Saved again, it is a good one among others.
    train(tmp_path, 6, save_total_limit=2)
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-6"]
    assert not verify(tmp_path / "checkpoint-6")


def names(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_nothing_whole_is_left_is_an_error_under_both_policies(tmp_path):
    train(tmp_path, 2)
    spoil(tmp_path / "checkpoint-2" / "trainer_state.json")
    for policy in ("fallback", "stop"):
        with pytest.raises(CheckpointError, match="no older one is whole"):
            train(tmp_path, 4, on_damaged_checkpoint=policy)


def test_a_damaged_path_is_not_replaced_by_another(tmp_path):
    train(tmp_path, 4)
    file = tmp_path / "checkpoint-4" / "trainer_state.json"
    spoil(file)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json is damaged"):
        train(tmp_path, 6, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


# What is restored


def test_load_components_chooses(tmp_path, caplog):
    first = train(tmp_path / "a", 4)
    path = str(tmp_path / "a" / "checkpoint-4")
    with caplog.at_level(logging.WARNING):
        second = make(
            tmp_path / "b", 1, seed=8, resume_from_checkpoint=path, load_components=["model"]
        )
        seen = {}

        class Look:
            def on_train_begin(self, model, state, optimizer):
                seen["weights"] = {k: v.clone() for k, v in model.state_dict().items()}
                seen["step"], seen["seed"] = state.global_step, state.seed
                seen["moments"] = len(optimizer.state)

        second.add_callback(Look())
        second.train()
    for name, value in first.model.state_dict().items():
        assert torch.equal(seen["weights"][name], value), name
    assert (seen["step"], seen["seed"], seen["moments"]) == (0, 8, 0)
    assert "not restored (load_components): callbacks, dataset, optimizer, rng" in caplog.text
    assert report(tmp_path / "b", 4)["loaded"] == ["model"]


@pytest.mark.parametrize(
    ("parts", "rate"),
    [
        # 20 steps from 1e-2 down to 0 in a line: after 4 steps 0.8 of it
        (None, 8e-3),
        (["model", "trainer", "scheduler"], 8e-3),
        (["model", "trainer", "optimizer"], 5e-4),  # a schedule of its own, from its first step
        (["model", "trainer"], 5e-4),
    ],
)
def test_the_rate_that_counts_is_the_scheduler_s(tmp_path, parts, rate):
    train(tmp_path, 4)
    second = make(tmp_path, 5, learning_rate=5e-4, load_components=parts)
    rates = []

    class Look:
        def on_step_begin(self, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    second.add_callback(Look())
    second.train()
    assert rates == [pytest.approx(rate, rel=1e-12)]
    told = report(tmp_path, 4)["overruled"]
    if rate == 8e-3:
        assert [(t["setting"], t["configured"], t["in_force"]) for t in told] == [
            ("lr", 5e-4, 1e-2)
        ]
        assert "args.learning_rate" not in differences(tmp_path, 4)
    else:
        assert told == [] and differences(tmp_path, 4)["args.learning_rate"]["winner"] == "current"


# What is told


def test_every_changed_option_is_told_with_the_value_that_counts(tmp_path, caplog):
    train(tmp_path, 4, weight_decay=0.0)
    with caplog.at_level(logging.INFO):
        second = train(
            tmp_path, 6, max_steps=40, seed=9, weight_decay=0.5, warmup_steps=2, logging_steps=7
        )
    winners = {key: item["winner"] for key, item in differences(tmp_path, 4).items()}
    assert winners == {
        "args.max_steps": "current",
        "args.seed": "checkpoint",
        "args.warmup_steps": "current",
        "args.logging_steps": "current",
        "args.stop_at": "current",
    }
    assert second.state.seed == 3 and second.state.max_steps == 40
    assert second.optimizer.param_groups[0]["weight_decay"] == 0.0
    # The new curve at the stored step: 4 steps after 2 of warm-up, of 38.
    rate = second.optimizer.param_groups[0]["lr"]
    assert rate == pytest.approx(1e-2 * (1 - (6 - 2) / 38), rel=1e-9)
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("args.seed was 3 and is now 9; the checkpoint's value counts" in w for w in warned)
    line = "weight_decay of the param group __default__: configured 0.5, in force 0.0 from the"
    assert any(w.startswith(line) for w in warned)
    assert not any("max_steps" in w for w in warned)


CHANGED = {"learning_rate": 5e-3, "adam_beta1": 0.5, "weight_decay": 0.5, "seed": 9}


def test_what_does_not_count_is_told_at_every_resume(tmp_path):
    train(tmp_path, 2)
    for step in (2, 3):  # the second checkpoint's own configuration has the new values
        train(tmp_path, step + 1, **CHANGED)
        told = {
            t["setting"]: (t["configured"], t["in_force"])
            for t in report(tmp_path, step)["overruled"]
        }
        assert told == {
            "lr": (5e-3, 1e-2),
            "betas": ([0.5, 0.999], [0.9, 0.999]),
            "weight_decay": (0.5, 0.0),
        }
        assert differences(tmp_path, step)["args.seed"]["saved"] == 3
    train(tmp_path, 5, learning_rate=1e-2)
    assert report(tmp_path, 4)["overruled"] == [], "the configured values are in force again"


def test_the_advice_about_a_setting_that_does_not_count_helps(tmp_path):
    train(tmp_path, 2)
    changed = {name: CHANGED[name] for name in ("learning_rate", "weight_decay")}
    train(tmp_path, 3, **changed)
    for item in report(tmp_path, 2)["overruled"]:
        command = item["advice"].split("`")[1].replace("CHECKPOINT", str(tmp_path / "checkpoint-3"))
        assert main([*command.split()[1:], "--no-backup"]) == 0
    group = train(tmp_path, 4, **changed).optimizer.param_groups[0]
    assert (group["initial_lr"], group["weight_decay"]) == (5e-3, 0.5)
    assert report(tmp_path, 3)["overruled"] == []


NORMS = {"norms": {"regex": "norm", "config": {"weight_decay": 0.1}}}
EMBED = {"embed": {"regex": "embed", "config": {"lr": 2e-3}}}


def test_parameters_are_grouped_as_configured_and_their_state_goes_along(tmp_path, caplog):
    first = train(tmp_path, 4, groups=NORMS, weight_decay=0.5)
    moments = by_name(first)
    second = make(tmp_path, 5, groups=EMBED, weight_decay=0.7)
    seen = {}

    class Look:
        def on_step_begin(self, optimizer):
            seen["moments"] = {k: v.clone() for k, v in by_name(second).items()}
            for group in optimizer.param_groups:
                seen[group["group_name"]] = {**group}

    second.add_callback(Look())
    with caplog.at_level(logging.WARNING):
        second.train()
    found = seen.pop("moments")
    assert found.keys() == moments.keys()
    assert all(torch.equal(found[name], moments[name]) for name in moments)
    assert seen.keys() == {"embed", "__default__"}
    # 4 of 20 steps down to 0: a new group follows its schedule from its own rate.
    assert seen["embed"]["param_names"] == ["model.embed_tokens.weight"]
    assert seen["embed"]["lr"] == pytest.approx(0.8 * 2e-3, rel=1e-12)
    assert seen["embed"]["weight_decay"] == 0.7
    assert seen["__default__"]["lr"] == pytest.approx(0.8e-2, rel=1e-12)
    assert seen["__default__"]["weight_decay"] == 0.5
    told = report(tmp_path, 4)
    assert [(t["setting"], t["groups"]) for t in told["overruled"]] == [
        ("weight_decay", ["__default__"])
    ]
    into_embed, out_of_norms = told["regrouped"]
    assert "embed_tokens.weight is in the param group embed now, in __default__" in into_embed
    assert "the configured ones, since it is new" in into_embed
    assert "in the param group __default__ now, in norms in the checkpoint" in out_of_norms
    assert all(line in caplog.text for line in told["regrouped"])
    train(tmp_path, 6, groups=EMBED, weight_decay=0.5)
    assert report(tmp_path, 5)["regrouped"] == [], "as in the newest checkpoint"


def by_name(trainer):
    return {
        name: trainer.optimizer.state[parameter]["exp_avg"]
        for group in trainer.optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"])
    }


def test_groups_in_another_order_keep_their_rates(tmp_path, caplog):
    both = {"norms": {"regex": "norm", "config": {"lr": 4e-3}}, **EMBED}
    train(tmp_path, 4, groups=both)
    with caplog.at_level(logging.WARNING):
        second = train(tmp_path, 6, groups=dict(reversed(both.items())))
    rates = {g["group_name"]: g["lr"] / 0.7 for g in second.optimizer.param_groups}
    assert rates == pytest.approx({"embed": 2e-3, "norms": 4e-3, "__default__": 1e-2})
    told = report(tmp_path, 4)
    assert told["overruled"] == told["regrouped"] == told["schedule"] == [] and not caplog.text


def test_the_stored_seed_also_seeds_the_evaluation(tmp_path):
    train(tmp_path, 2)
    second = make(tmp_path, 4, seed=9)
    second.eval_dataset = tiny_dataset(4, sequence_length=8)
    second.train()
    assert second._eval_loader.seed == 3


def test_without_a_change_nothing_is_told(tmp_path, caplog):
    train(tmp_path, 4)
    with caplog.at_level(logging.WARNING):
        train(tmp_path, None)
    told = report(tmp_path, 4)
    assert [item["key"] for item in told["differences"]] == ["args.stop_at"]
    assert all(facts["same"] for facts in told["fingerprints"].values())
    assert told["damaged"] == told["left_out"] == [] and caplog.records == []


def test_another_model_is_an_error_that_names_the_tensors(tmp_path):
    train(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"does not fit the model.*layers"):
        train(tmp_path, 4, model=lambda: tiny_decoder(num_layers=3))
    with pytest.raises(CheckpointError, match=r"is \[\d+, 32\] there"):
        train(tmp_path, 4, model=lambda: tiny_decoder(hidden_size=64))


def test_less_data_than_was_read_is_told_with_what_to_do(tmp_path):
    train(tmp_path, 4)
    less = tiny_dataset(4, sequence_length=8)
    with pytest.raises(ConfigError, match=r"dataset\.json: .*beyond the dataset.*load_components"):
        train(tmp_path, 6, data=less)
    kept = ["model", "optimizer", "scheduler", "trainer", "rng"]
    assert train(tmp_path, 6, data=less, load_components=kept).state.global_step == 6


@pytest.mark.parametrize("part", ["data", "tokenizer"])
def test_other_data_or_another_tokenizer_is_a_warning(tmp_path, caplog, part):
    class Other(ByteTokenizer):
        digest = "another"

    train(tmp_path, 2, tokenizer=ByteTokenizer())
    changes = {"data": tiny_dataset(48, sequence_length=8, seed=5), "tokenizer": Other()}
    with caplog.at_level(logging.WARNING):
        train(tmp_path, 4, **{"tokenizer": ByteTokenizer(), part: changes[part]})
    assert f"the {part} is not the one of the checkpoint" in caplog.text
    same = {name: facts["same"] for name, facts in report(tmp_path, 2)["fingerprints"].items()}
    assert same == {"model": True, "data": True, "tokenizer": True, part: False}


def test_the_fingerprint_of_data():
    def of(dataset, seed=1):
        return fingerprint_data(WindowLoader(dataset, batch_size=2, seed=seed))

    data = tiny_dataset(16, sequence_length=8)
    assert of(data) == of([dict(sample) for sample in data]) == of(data, seed=2)
    assert of(data) != of(data[:-1])
    changed = [*data[:-1], {**data[-1], "labels": [0] * 8}]
    assert of(data) != of(changed)

    class Random:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"input_ids": torch.randint(9, (3,))}

    torch.manual_seed(0)
    first = of(Random())
    torch.rand(7)
    state = torch.get_rng_state()
    assert of(Random()) == first, "randomness inside a sample follows the seed"
    assert torch.equal(torch.get_rng_state(), state), "looking must not move the generators"
    assert of(iter(data)) == {"kind": "iterable", "num_samples": None}


def test_token_files_are_told_apart_by_their_digest(tmp_path):
    from headway.data.datasets import TokenDataset
    from headway.data.mixing import MixedDataset
    from headway.data.tokens import TokenFileWriter

    datasets = []
    for number in range(2):
        with TokenFileWriter(tmp_path / f"{number}.hwt") as writer:
            for start in range(50):
                # They differ only where no sample is looked at.
                writer.add_document([start + (number if start == 10 else 0)] * 10)
        datasets.append(TokenDataset(tmp_path / f"{number}.hwt", sequence_length=10))
    found = [fingerprint_data(WindowLoader(data, batch_size=2)) for data in datasets]
    assert found[0]["samples"] == found[1]["samples"]
    assert found[0]["token_files"] != found[1]["token_files"]
    mixed = fingerprint_data(WindowLoader(MixedDataset(datasets), batch_size=2))
    assert mixed["token_files"] == found[0]["token_files"] + found[1]["token_files"]


# A hostile checkpoint


def put(path, name, data):
    """Put other content into a committed checkpoint, with all digests right."""
    manifest = read_manifest(path)
    (path / name).write_bytes(data)
    manifest.files[name] = FileRecord(len(data), digest_bytes(data, manifest.digest_algorithm))
    (path / "checkpoint_manifest.json").unlink()
    write_manifest(path, manifest, Storage(path.parent))


@pytest.mark.parametrize("name", ["trainer_state.json", "run/config.json", "state/optimizer.json"])
@pytest.mark.parametrize(
    "data", [b"[" * 200_000 + b"]" * 200_000, b'{"seed": ' + b"9" * 5_000 + b"}", b"[]"]
)
def test_json_that_is_not_what_it_should_be_is_refused_by_name(name, data, tmp_path):
    train(tmp_path, 2)
    put(tmp_path / "checkpoint-2", name, data)
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path, 4)
    assert str(tmp_path / "checkpoint-2" / name) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("global_step", "2"), ("global_step", -1), ("epoch", None), ("log_history", {"a": 1})],
)
def test_counters_that_count_nothing_are_refused_by_name(key, value, tmp_path):
    train(tmp_path, 2)
    path = tmp_path / "checkpoint-2"
    state = json.loads((path / "trainer_state.json").read_text())
    put(path, "trainer_state.json", json.dumps({**state, key: value}).encode())
    with pytest.raises(CheckpointError, match=rf"trainer_state\.json: {key}"):
        train(tmp_path, 4)


def test_a_vocabulary_in_another_order_is_another_tokenizer():
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")

    def make_tokenizer(*words):
        vocabulary = {word: number for number, word in enumerate(words)}
        core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
        return transformers.PreTrainedTokenizerFast(tokenizer_object=core)

    first, same, other = make_tokenizer(*"abc"), make_tokenizer(*"abc"), make_tokenizer(*"acb")
    assert first.vocab_size == other.vocab_size
    assert fingerprint_tokenizer(first) == fingerprint_tokenizer(same)
    assert fingerprint_tokenizer(first) != fingerprint_tokenizer(other)
    other = make_tokenizer(*"abc")
    other.add_tokens(["new"])
    assert fingerprint_tokenizer(first) != fingerprint_tokenizer(other)


def test_a_difference_inside_a_list_is_named_by_its_place():
    saved = {"optimizer_groups": [{"pattern": "a", "lr": 1.0}, {"pattern": "b"}], "same": [1, 2]}
    now = {"optimizer_groups": [{"pattern": "a", "lr": 2.0}], "same": [1, 2]}
    found = compare_configs(saved, now, ["model"])
    assert [(item.key, item.saved, item.current) for item in found] == [
        ("optimizer_groups.0.lr", 1.0, 2.0),
        ("optimizer_groups.1.pattern", "b", "absent"),
    ]


def test_options_that_only_one_of_two_trainers_has_are_not_told(caplog):
    saved = {"trainer": "ddp", "args": {"max_steps": 4, "ddp": {"init_sync": True}}}
    now = {"trainer": "single", "args": {"max_steps": 6, "new": 1}}
    report = ResumeReport(
        "checkpoint-2", 2, 1, ["model"], [], "", [], compare_configs(saved, now, ["model"]), {}, {}
    )
    with caplog.at_level("INFO"):
        report.log()
    told = [record.getMessage() for record in caplog.records[1:]]
    assert len(told) == 2 and told[0].startswith("args.max_steps was 4 and is now 6")
    assert told[1].startswith("trainer was 'ddp' and is now 'single'")
    assert len(report.differences) == 4, "the file of the resume has them all"


def test_a_run_that_is_complete_is_not_evaluated_again(tmp_path):
    def run(max_steps, **changes):
        args = TrainingArguments(
            output_dir=str(tmp_path), max_steps=max_steps, seed=1, use_cpu=True, save_steps=3,
            eval_strategy="steps", eval_steps=2, **changes,
        )  # fmt: skip
        data = tiny_dataset(16, sequence_length=8)
        trainer = Trainer(model=tiny_decoder(), args=args, train_dataset=data, eval_dataset=data)
        trainer.train()
        logged = map(json.loads, (tmp_path / "trainer_logs.jsonl").read_text().splitlines())
        records = [log["global_step"] for log in logged if "eval_loss" in log]
        history = [log["step"] for log in trainer.state.log_history if "eval_loss" in log]
        return history, records

    assert run(5) == ([2, 4, 5], [2, 4, 5])
    first = read_manifest(tmp_path / "checkpoint-5")
    assert run(5) == ([2, 4, 5], [2, 4, 5])
    again = read_manifest(tmp_path / "checkpoint-5")
    assert again.metrics["eval_loss"] == first.metrics["eval_loss"]
    assert run(6) == ([2, 4, 5, 6], [2, 4, 5, 6])
    for _ in range(2):  # no checkpoint has that one
        assert run(7, save_strategy="no") == ([2, 4, 5, 6, 7], [2, 4, 5, 6, 7])


@pytest.mark.parametrize("changes", [
    {"metric_for_best_model": "eval_score", "load_best_model_at_end": True},
    {"best_model_metric": "score", "preserve_best_model": True},
])  # fmt: skip
def test_a_complete_run_is_evaluated_again_for_a_metric_that_it_did_not_have(tmp_path, changes):
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    tiny_trainer(tmp_path, max_steps=2, **saving).train()
    again = tiny_trainer(tmp_path, max_steps=2, **saving, **changes)
    again.compute_metrics = lambda found: {"score": 0.5}
    again.train()
    assert read_manifest(tmp_path / "out" / "checkpoint-2").metric == 0.5


@pytest.mark.parametrize("evaluating", [
    {"eval_strategy": "steps", "eval_steps": 3}, {"eval_strategy": "epoch"}, {},
])  # fmt: skip
@pytest.mark.parametrize("saving", [
    {"save_strategy": "steps", "save_steps": 2, "max_steps": 4},
    {"save_strategy": "epoch", "num_train_epochs": 1},
    {"save_strategy": "steps", "save_steps": 3, "max_steps": 4},
    {"save_strategy": "steps", "save_steps": 4, "num_train_epochs": 1},
])  # fmt: skip
def test_the_checkpoint_of_the_end_has_its_last_records(tmp_path, saving, evaluating):
    trainer = tiny_trainer(tmp_path, [JsonLogger()], logging_steps=3, **saving, **evaluating)
    trainer.train()
    log = tmp_path / "out" / "trainer_logs.jsonl"
    before = log.read_text()
    last = json.loads(before.splitlines()[-1])
    assert last["type"] == "summary" and last["train_loss"] > 1
    history = trainer.state.log_history[:-1]
    evaluated = [one["step"] for one in history if "eval_loss" in one]
    assert len(evaluated) == len(set(evaluated)), "each step once"
    (end,) = (tmp_path / "out").glob(f"checkpoint-{trainer.state.global_step}")
    assert json.loads((end / "trainer_state.json").read_text())["log_history"] == history
    again = tiny_trainer(tmp_path, [JsonLogger()], logging_steps=3, **saving, **evaluating)
    again.train()
    assert again.state.log_history == history
    assert log.read_text() == before


class _SavesWhatItEvaluates(TrainerCallback):
    def on_evaluate(self, control):
        control.should_save = True


def test_a_save_that_the_last_evaluation_asks_for_has_the_last_records_too(tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 3, "max_steps": 4}
    trainer = tiny_trainer(tmp_path, [_SavesWhatItEvaluates()], save_strategy="no", **settings)
    trainer.train()
    stored = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert stored["log_history"] == trainer.state.log_history[:-1]


def test_a_run_that_is_interrupted_in_its_last_step_only_saves(tmp_path, caplog):
    class Interrupts(TrainerCallback):
        def on_step_end(self, state):
            if state.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    settings = {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 2, "max_steps": 4}
    trainer = tiny_trainer(tmp_path, [Interrupts()], save_strategy="steps", **settings)
    trainer.train()
    assert (tmp_path / "out" / "checkpoint-4").is_dir()
    assert "ended early" not in caplog.text


def test_a_save_that_the_last_evaluation_asks_for_stays_as_that_of_the_end(tmp_path):
    callbacks = [CheckpointerCallback(100), _SavesWhatItEvaluates()]
    settings = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    tiny_trainer(tmp_path, callbacks, **settings).train()
    saved = [read_manifest(tmp_path / "out" / f"checkpoint-{step}") for step in (2, 4)]
    assert [bool(one.metadata.get("permanent")) for one in saved] == [False, True]
