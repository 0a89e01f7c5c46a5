"""Optimizers by name: what each is, that Muon and AdamW are one, and that each goes on bitwise."""

import copy
import inspect
import json
import logging

import pytest
import torch
from torch import nn

from headway import ConfigError, Trainer, TrainingArguments
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.model import collect_model
from headway.checkpoint.optimizer import plan_optimizer, split_optimizer
from headway.checkpoint.tensors import ShardReader, write_shards
from headway.config.optimizers import OPTIMIZERS, SPELLINGS
from headway.optim.build import build_optimizer, check_scheduler
from headway.optim.kinds import parameter_kinds
from headway.optim.low_bit import low_bit_class
from headway.optim.multi import JoinedOptimizer
from headway.optim.stochastic_adamw import StochasticAdamW
from headway.strategies.stepping import take_step
from headway.testing import tiny_dataset, tiny_decoder, tiny_llama

LOW_BIT = ("adamw_8bit", "adamw_4bit", "adamw_fp8")


@pytest.fixture
def eager():
    """torchao compiles its update, which takes long on a CPU; what it computes is the same."""
    with torch.compiler.set_stance("force_eager"):
        yield


def build(model, groups=None, **arguments):
    return build_optimizer(model, TrainingArguments(use_cpu=True, **arguments), groups=groups)


def wide_decoder():
    """Large enough that moments of some matrices are quantized, and of others not."""
    return tiny_decoder(hidden_size=64, intermediate_size=128, num_layers=1)


def run(folder, steps=8, resume=False, **arguments):
    settings = {"optim": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1, **arguments}
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=8,
            stop_at=None if steps == 8 else steps,
            per_device_train_batch_size=2,
            save_strategy="steps",
            save_steps=100,
            warmup_steps=3,
            seed=0,
            use_cpu=True,
            resume_from_checkpoint=resume,
            **settings,
        ),
        model_init=wide_decoder,
        train_dataset=tiny_dataset(32, sequence_length=8),
        default_callbacks=False,
    )
    trainer.train()
    return trainer


# -- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "optim_args", "cls", "settings"),
    [
        ("adamw", None, "AdamW", {"betas": (0.8, 0.9), "eps": 1e-6, "fused": True}),
        ("adamw", {"foreach": True}, "AdamW", {"foreach": True}),
        ("adam", {"amsgrad": True}, "Adam", {"amsgrad": True, "fused": True}),
        ("sgd", {"momentum": 0.9, "nesterov": True}, "SGD", {"momentum": 0.9, "fused": False}),
        ("adamw_8bit", None, "AdamW8bit", {"betas": (0.8, 0.9)}),
        ("adamw_4bit", None, "AdamW4bit", {}),
        ("adamw_fp8", {"block_size": 128}, "AdamWFp8", {}),
        ("adamw_bf16", {"moment_dtype": "float32"}, "StochasticAdamW", {"eps": 1e-6}),
        ("muon", None, "JoinedOptimizer", {}),
    ],
)
def test_a_name_and_the_arguments_make_the_optimizer(name, optim_args, cls, settings):
    built = build(
        wide_decoder(),
        optim=name,
        optim_args=optim_args,
        learning_rate=0.25,
        weight_decay=0.5,
        adam_beta1=0.8,
        adam_beta2=0.9,
        adam_epsilon=1e-6,
    )
    assert type(built).__name__ == cls
    for group in built.param_groups:
        assert (group["lr"], group["weight_decay"]) == (0.25, 0.5)
        assert {key: group[key] for key in settings} == settings
        assert isinstance(group["lr"], float), "schedulers and logs get a number"


@pytest.mark.parametrize(
    ("name", "block_size", "says"),
    [
        ("adamw_4bit", 7, "an even number from 2 up, .* got 7"),
        ("adamw_4bit", 0, "an even number from 2 up, .* got 0"),
        ("adamw_8bit", -4, "a whole number from 1 up, .* got -4"),
        ("adamw_8bit", 128.0, "a whole number from 1 up, .* got 128.0"),
        ("adamw_fp8", "256", "a whole number from 1 up, .* got '256'"),
    ],
)
def test_a_block_size_that_torchao_fails_with_is_refused_at_the_start(name, block_size, says):
    with pytest.raises(ConfigError, match=rf"optim_args\.block_size: AdamW\w+ needs {says}"):
        build(wide_decoder(), optim=name, optim_args={"block_size": block_size})


def test_every_allowed_argument_is_one_of_the_class():
    classes = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "muon": torch.optim.Muon,
        "adamw_bf16": StochasticAdamW,
        "adamw_8bit": low_bit_class("AdamW8bit"),
        "adamw_4bit": low_bit_class("AdamW4bit"),
        "adamw_fp8": low_bit_class("AdamWFp8"),
    }
    ours = {"adamw_lr", "adamw_weight_decay", "exclude"}
    assert classes.keys() == OPTIMIZERS.keys()
    for name, cls in classes.items():
        assert set(OPTIMIZERS[name]) - ours <= set(inspect.signature(cls).parameters), name


@pytest.mark.parametrize(("spelling", "name"), SPELLINGS.items())
def test_names_of_transformers_mean_the_same(spelling, name):
    first, second = (build(wide_decoder(), optim=optim) for optim in (spelling, name))
    assert type(first) is type(second)
    from transformers.training_args import OptimizerNames

    assert spelling in {known.value for known in OptimizerNames}


def test_what_goes_before_optim_is_told(caplog):
    args = TrainingArguments(use_cpu=True, optim="sgd", optim_args={"momentum": 0.9})
    with caplog.at_level(logging.WARNING):
        built = build_optimizer(wide_decoder(), args, cls_and_kwargs=(torch.optim.Adam, {}))
    assert type(built) is torch.optim.Adam
    assert "optim='sgd' and optim_args={'momentum': 0.9}: without effect, since" in caplog.text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"lr": 0.5}, "learning_rate=0.1 and weight_decay=0.2 and adam_epsilon=1e-06 and adam_b"),
        ({"lr": 0.1, "weight_decay": 0.2, "eps": 1e-6}, " adam_beta1=0.8: without effect"),
        ({"lr": 0.1, "weight_decay": 0.2, "eps": 1e-6, "betas": (0.8, 0.999)}, ""),
    ],
)
def test_options_that_a_given_optimizer_does_not_go_by_are_told(given, told, caplog):
    args = TrainingArguments(
        use_cpu=True, learning_rate=0.1, weight_decay=0.2, adam_epsilon=1e-6, adam_beta1=0.8
    )
    build_optimizer(tiny_decoder(), args, factory=lambda params: torch.optim.AdamW(params, **given))
    assert told in caplog.text and bool(told) is bool(caplog.text)
    assert ("adam_beta1=0.8: without effect" in caplog.text) is bool(told)
    assert ("optimizer_factory" in caplog.text) is bool(told)


def test_options_of_the_schedule_beside_a_given_scheduler_are_told(caplog):
    optimizer = build(tiny_decoder())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    check_scheduler(scheduler, TrainingArguments(use_cpu=True, learning_rate=0.1))
    assert not caplog.text
    options = {"lr_scheduler_type": "cosine", "warmup_steps": 3}
    check_scheduler(scheduler, TrainingArguments(use_cpu=True, **options))
    assert "lr_scheduler_type='cosine' and warmup_steps=3: without effect, since" in caplog.text
    assert "lr_scheduler_factory" in caplog.text


def test_values_that_the_class_refuses_are_told_with_the_option():
    with pytest.raises(ConfigError, match=r"optim='sgd'.*momentum"):
        build(wide_decoder(), optim="sgd", optim_args={"momentum": -1.0})
    with pytest.raises(ConfigError, match="did you mean 'float32'"):
        build(wide_decoder(), optim="adamw_bf16", optim_args={"moment_dtype": "float23"})
    with pytest.raises(ConfigError, match=r"optim='muon'.*not supported"):
        build(wide_decoder(), optim="muon", optim_args={"adjust_lr_fn": "none"})


def test_plain_muon_for_all_parameters_is_refused_with_the_way_out():
    args = TrainingArguments(use_cpu=True)
    with pytest.raises(ConfigError, match="set optim='muon', which gives AdamW the rest"):
        build_optimizer(wide_decoder(), args, cls_and_kwargs=(torch.optim.Muon, {}))


def test_sgd_takes_sparse_gradients():
    model = nn.Embedding(5, 3, sparse=True)
    built = build(model, optim="sgd", learning_rate=1.0)
    before = model.weight.detach().clone()
    model(torch.tensor([1])).sum().backward()
    built.step()
    assert not torch.equal(model.weight[1], before[1]) and torch.equal(model.weight[2], before[2])


# -- Muon and AdamW as one --------------------------------------------------------------------


def muon_names(optimizer):
    groups = [g for g in optimizer.param_groups if g["optimizer_class"] == "Muon"]
    return {name for group in groups for name in group["param_names"]}


@pytest.mark.parametrize("make", [tiny_decoder, tiny_llama])
@pytest.mark.parametrize("tied", [True, False])
def test_muon_gets_hidden_matrices_and_adamw_all_others(make, tied):
    model = make(**{"tie_embeddings" if make is tiny_decoder else "tie_word_embeddings": tied})
    optimizer = build(model, optim="muon")
    names = {name for name, _ in model.named_parameters()}
    inside = {name for name in names if "_proj" in name}
    assert muon_names(optimizer) == inside and len(inside) == 14
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(names)


def test_a_head_without_an_interface_is_found_by_name_and_more_can_be_excluded():
    model = nn.ModuleDict(
        {
            "body": nn.Linear(3, 3),
            "conv": nn.Conv2d(1, 1, 3),
            "out": nn.Linear(3, 4),
            "head": nn.Linear(3, 4),
        }
    )
    assert muon_names(build(model, optim="muon")) == {"body.weight", "out.weight"}
    narrow = build(model, optim="muon", optim_args={"exclude": r"^out\."})
    assert muon_names(narrow) == {"body.weight"}
    with pytest.raises(ConfigError, match=r"optim_args\.exclude.*does not compile"):
        build(model, optim="muon", optim_args={"exclude": "("})


def loss_of(model, seed):
    ids = torch.randint(0, 258, (2, 8), generator=torch.Generator().manual_seed(seed))
    return model(ids, labels=ids).loss


def test_the_joined_optimizer_does_what_its_parts_would():
    torch.manual_seed(0)
    model = tiny_decoder()
    twin = copy.deepcopy(model)
    joined = build(model, optim="muon", learning_rate=0.01, weight_decay=0.1)
    kinds = parameter_kinds(twin)
    inside = [p for name, p in twin.named_parameters() if "_proj" in name]
    rest = [p for name, p in twin.named_parameters() if "_proj" not in name]
    assert len(kinds) == len(inside) + len(rest)
    parts = [
        torch.optim.Muon(inside, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1, fused=True),
    ]
    for step in range(5):
        loss_of(model, step).backward()
        joined.step()
        joined.zero_grad()
        loss_of(twin, step).backward()
        for part in parts:
            part.step()
            part.zero_grad()
    for (name, first), second in zip(model.named_parameters(), twin.parameters()):
        assert torch.equal(first, second), name


def test_a_schedule_moves_the_rates_of_all_parts():
    model = tiny_decoder()
    arguments = {"optim": "muon", "optim_args": {"adamw_lr": 0.1}, "learning_rate": 1.0}
    optimizer = build(model, **arguments)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    loss_of(model, 0).backward()
    optimizer.step()
    schedule.step()
    rates = {type(part).__name__: part.param_groups[0]["lr"] for part in optimizer.parts}
    assert rates == {"Muon": 0.5, "AdamW": 0.05}


def test_one_state_dict_for_all_parts_and_copies_that_stand_alone():
    torch.manual_seed(0)
    model = tiny_decoder()
    optimizer = build(model, optim="muon")
    loss_of(model, 0).backward()
    optimizer.step()
    twin_model = copy.deepcopy(model)
    for p in twin_model.parameters():
        p.grad = None
    twin = build(twin_model, optim="muon")
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pair = copy.deepcopy((model, optimizer))
    for net, own in ((model, optimizer), (twin_model, twin), pair):
        own.zero_grad()
        loss_of(net, 1).backward()
        own.step()
    for other in (twin_model, pair[0]):
        for first, second in zip(model.parameters(), other.parameters()):
            assert torch.equal(first, second)
    assert pair[1].parts[0].state is pair[1].state is not optimizer.state


def test_closures_and_later_groups_are_refused():
    optimizer = build(tiny_decoder(), optim="muon")
    with pytest.raises(ConfigError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ConfigError, match="no further param groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_a_joined_optimizer_whose_parameters_are_copied_away_refuses_to_step():
    optimizer = build(tiny_decoder(), optim="muon")
    twin = object.__new__(JoinedOptimizer)
    twin.__dict__.update(optimizer.__dict__)
    twin.state = {}
    with pytest.raises(ConfigError, match="needs a single optimizer"):
        twin.step()


def two_adamw(model, second_fused=True):
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    return JoinedOptimizer(
        [
            torch.optim.AdamW(first, lr=0.1, fused=True),
            torch.optim.AdamW(second, lr=0.1, fused=second_fused),
        ]
    )


def test_a_withheld_step_is_withheld_in_all_parts():
    model = tiny_decoder()
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model, 0).backward()
    # On the device, by the flag that fused kernels read.
    take_step(two_adamw(model), torch.tensor(torch.inf), scale=None, reading_waits=True)
    loss_of(model, 0).backward()
    take_step(build(model, optim="muon"), torch.tensor(torch.nan), scale=None, reading_waits=True)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    loss_of(model, 0).backward()
    optimizer = two_adamw(model)
    take_step(optimizer, torch.tensor(1.0), scale=None, reading_waits=True)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_the_scale_of_torchs_scaler_counts_for_its_own_step_alone():
    torch.manual_seed(0)
    model = tiny_decoder()
    twin = copy.deepcopy(model)
    joined, single = two_adamw(model), torch.optim.AdamW(twin.parameters(), lr=0.1, fused=True)
    for net, optimizer in ((model, joined), (twin, single)):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(net, 0)).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
        loss_of(net, 1).backward()
        optimizer.step()
    for first, second in zip(model.parameters(), twin.parameters()):
        assert torch.equal(first, second)


def test_steps_are_withheld_on_the_device_only_if_all_parts_can():
    model = tiny_decoder()
    assert two_adamw(model)._step_supports_amp_scaling
    assert not two_adamw(model, second_fused=False)._step_supports_amp_scaling
    assert not build(model, optim="muon")._step_supports_amp_scaling


def test_muon_with_the_loss_scale_of_fp16(tmp_path):
    trainer = run(tmp_path, optim="muon", mixed_precision="fp16")
    losses = [r["loss"] for r in trainer.state.log_history if "loss" in r]
    assert all(torch.isfinite(torch.tensor(losses))), losses
    assert trainer.strategy.loss_scale.value < 2.0**16 or trainer.state.global_step == 8


# -- resumed equals uninterrupted -------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"optim": "muon"},
        {"optim": "muon", "no_decay_on": ["norm", "embedding"]},
        {"optim": "sgd", "optim_args": {"momentum": 0.9}},
        *({"optim": name} for name in LOW_BIT),
        {"optim": "adamw_8bit", "default_dtype": "bfloat16"},
        {"optim": "adamw_bf16", "default_dtype": "bfloat16"},
        {
            "optim": "adamw_bf16",
            "default_dtype": "bfloat16",
            "optim_args": {"moment_dtype": "float32"},
        },
    ],
    ids=lambda arguments: "-".join(str(value) for value in arguments.values()),
)
def test_a_resumed_run_equals_an_uninterrupted_one_bitwise(tmp_path, eager, arguments):
    whole = run(tmp_path / "whole", **arguments)
    run(tmp_path / "parts", steps=4, **arguments)
    resumed = run(tmp_path / "parts", resume=True, **arguments)
    assert resumed.state.global_step == 8
    first, second = whole.model.state_dict(), resumed.model.state_dict()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    for p, q in zip(whole.model.parameters(), resumed.model.parameters()):
        states = whole.optimizer.state[p], resumed.optimizer.state[q]
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            assert_same(value, states[1][key])


def assert_same(first, second):
    assert type(first) is type(second)
    if hasattr(first, "codes"):
        for name in type(first).tensor_attrs:
            assert torch.equal(
                getattr(first, name).view(torch.uint8), getattr(second, name).view(torch.uint8)
            )
        for name in ("dtype", "block_size", "signed", "shape"):
            assert getattr(first, name, None) == getattr(second, name, None)
    elif isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype and torch.equal(first, second)
    else:
        assert first == second


@pytest.mark.parametrize("name", LOW_BIT)
def test_low_bit_states_are_small_and_stored_by_their_inner_tensors(tmp_path, eager, name):
    from safetensors import safe_open

    trainer = run(tmp_path, steps=2, optim=name)
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values() if "exp_avg" in state]
    quantized = [moment for moment in moments if hasattr(moment, "codes")]
    assert 0 < len(quantized) < len(moments), "of some matrices only"
    [file] = (tmp_path / "checkpoint-2").glob("optimizer-*.safetensors")
    with safe_open(file, framework="pt") as stored:
        names = set(stored.keys())
        codes = stored.get_tensor("exp_avg:codes.model.layers.0.mlp.up_proj.weight")
    assert codes.numel() * codes.element_size() == 8192 // (2 if name == "adamw_4bit" else 1)
    assert "exp_avg_sq:scale.model.layers.0.mlp.up_proj.weight" in names
    assert "exp_avg.model.norm.weight" in names


def test_states_in_use_are_filled_in_place(tmp_path, eager):
    model = nn.Linear(64, 64, bias=False)
    optimizer = build(model, optim="adamw_8bit")

    def step():
        model(torch.ones(1, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    names = collect_model(model).names_by_id()
    encoded, tensors = split_optimizer(optimizer, names)
    write_shards(tmp_path, "optimizer", tensors)
    held = optimizer.state[model.weight]["exp_avg"]
    before = held.codes.clone()
    step()
    assert not torch.equal(held.codes, before)
    reader = ShardReader(tmp_path, "optimizer")
    plan = plan_optimizer(optimizer, names, json.loads(json.dumps(encoded)), reader)
    reader.fill(plan.destinations)
    plan.finish()
    assert optimizer.state[model.weight]["exp_avg"] is held, "no second copy in memory"
    assert torch.equal(held.codes, before)


@pytest.mark.parametrize(
    "change",
    [
        {"class": "Evil"},
        {"class": "OptimState4bit"},
        {"dtype": "nonsense"},
    ],
)
def test_a_state_of_no_allowed_class_or_of_wrong_sizes_is_refused(tmp_path, eager, change):
    model = nn.Linear(64, 64, bias=False)
    optimizer = build(model, optim="adamw_8bit")
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    names = collect_model(model).names_by_id()
    encoded, tensors = split_optimizer(optimizer, names)
    write_shards(tmp_path, "optimizer", tensors)
    encoded["params"]["weight"]["wrapped"]["exp_avg"].update(change)
    fresh = build(model, optim="adamw_8bit")
    with pytest.raises(CheckpointError):
        plan_optimizer(fresh, names, encoded, ShardReader(tmp_path, "optimizer"))


def test_the_state_of_another_class_is_refused(tmp_path):
    run(tmp_path, steps=4, optim="muon")
    exclude = {"exclude": "up_proj|down_proj"}
    with pytest.raises(
        Exception, match=r"up_proj\.weight and 1 more updated by Muon there, by AdamW"
    ):
        run(tmp_path, resume=True, optim="muon", optim_args=exclude)
    with pytest.raises(Exception, match="state of JoinedOptimizer, the run uses AdamW"):
        run(tmp_path, resume=True, optim="adamw")


@pytest.mark.slow
def test_a_low_bit_step_as_torchao_compiles_it():
    torch.manual_seed(0)
    plain, low_bit = (nn.Linear(64, 64, bias=False) for _ in range(2))
    low_bit.load_state_dict(plain.state_dict())
    optimizers = build(plain, learning_rate=0.01), build(low_bit, optim="adamw_8bit")
    optimizers[1].param_groups[0]["lr"] = 0.01
    for _ in range(3):
        x = torch.randn(8, 64)
        for model, optimizer in zip((plain, low_bit), optimizers):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert type(optimizers[1].param_groups[0]["lr"]) is float, "as schedulers and logs know it"
    torch.testing.assert_close(plain.weight, low_bit.weight, atol=2e-3, rtol=0)


def test_the_size_of_low_bit_states_can_be_told_without_values():
    from headway.cli.check import _optimizer_bytes

    with torch.device("meta"):
        model = nn.Linear(256, 256, bias=False)
    assert _optimizer_bytes(build(model)) == 2 * 4 * 256 * 256 + 4
    tables_and_scales = 2 * (256 * 4 + 256 * 4) + 4
    found = _optimizer_bytes(build(model, optim="adamw_8bit"))
    assert found == 2 * 256 * 256 + tables_and_scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optim", ["adamw", "adam", "sgd"])
def test_weights_of_every_dtype_move(optim, dtype):
    """torch's fused SGD passes over half precision on a CPU."""
    model = nn.Linear(64, 64).to(dtype)
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer = build(model, optim=optim, learning_rate=0.1)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for weight, then in zip(model.parameters(), before):
        assert (weight != then).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_sgd_that_would_stand_still_is_refused(dtype):
    with pytest.raises(ConfigError, match=r"fused=True .* leave fused out"):
        build(nn.Linear(8, 8).to(dtype), optim="sgd", optim_args={"fused": True})
    build(nn.Linear(8, 8), optim="sgd", optim_args={"fused": True})


@pytest.mark.parametrize("place", ["optimizer_cls_and_kwargs", "optimizer_groups"])
def test_a_rate_that_is_a_tensor_is_the_same_for_the_next_run(place, tmp_path):
    rate = torch.tensor(0.25)
    given = {
        "optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": rate}),
        "optimizer_groups": {"all": {"regex": ".", "config": {"lr": rate}}},
    }[place]
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, save_strategy="no", logging_steps=1, use_cpu=True
        ),
        model_init=tiny_decoder,
        train_dataset=tiny_dataset(32, sequence_length=8),
        default_callbacks=False,
        **{place: given},
    )
    for _ in range(2):
        trainer.train()
        rates = [r["learning_rate"] for r in trainer.state.log_history if "loss" in r]
        assert rates == [0.25, 0.125]
    assert rate == 0.25
