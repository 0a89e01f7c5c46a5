"""Compiled blocks: one graph for all of them, the same losses, the same names."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import replace

import pytest
import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules.module import register_module_forward_hook

from headway import TrainingArguments
from headway.args import FSDP2TrainingArguments
from headway.errors import ConfigError
from headway.models.fused_loss import FusedLoss, chunked_loss
from headway.strategies.compilation import CompileOptions, compile_module
from headway.strategies.forwards import put_back
from headway.strategies.recompute import enable
from headway.strategies.torch_settings import torch_settings
from headway.testing import tiny_dataset, tiny_decoder, tiny_llama, tiny_trainer

EAGER = CompileOptions(backend="eager", full_graph=True)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def num_graphs():
    return counters["stats"]["unique_graphs"]


def run(model, length=16):
    ids = torch.arange(2 * length).view(2, length)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(
    "make", [lambda: tiny_decoder(num_layers=4), lambda: tiny_llama(num_hidden_layers=4)]
)
def test_equal_blocks_are_one_graph(make):
    model = make()
    plain, names = run(model), list(model.state_dict())
    compile_module(model, EAGER)
    for mine, theirs in zip(plain, run(model)):
        torch.testing.assert_close(mine, theirs)
    assert num_graphs() == 1
    run(model, length=24)  # shapes may change
    assert num_graphs() == 1
    assert list(model.state_dict()) == names
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.arange(16).view(2, 8))
    assert num_graphs() == 2  # an evaluation has one of its own


def test_a_block_that_others_listen_to_or_have_changed_is_called():
    """Else a block's sum is added in the next one's graph, and no block is called."""
    torch.manual_seed(0)
    model = tiny_decoder(num_layers=3)
    plain = run(model)
    compile_module(model, EAGER)
    seen, layer = [], model.model.layers[1]
    hook = layer.register_forward_hook(lambda block, given, made: seen.append(made.shape))
    for mine, theirs in zip(plain, run(model)):
        torch.testing.assert_close(mine, theirs)
    assert len(seen) == 1
    hook.remove()
    run(model)
    assert len(seen) == 1
    whole = layer.forward
    layer.forward = lambda *given: seen.append(given[0].shape) or whole(*given)
    for mine, theirs in zip(plain, run(model)):
        torch.testing.assert_close(mine, theirs)
    assert len(seen) == 2
    layer.forward = whole
    everywhere = register_module_forward_hook(lambda module, given, made: seen.append(module))
    try:
        run(model)
    finally:
        everywhere.remove()
    assert layer in seen
    blocks, seen = model.model.layers, []
    blocks[1] = checkpoint_wrapper(
        layer, checkpoint_fn=lambda block, *given: seen.append(block) or block(*given)
    )
    run(model)
    assert seen == [layer]  # what is around it has its attributes, and those that chain it
    blocks[1] = layer
    put_back(model)
    counters.clear()
    run(model)
    assert num_graphs() == 0 and "follow" not in layer.__dict__


@pytest.mark.parametrize("make", [lambda: tiny_decoder(num_layers=3), tiny_llama])
@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_a_hook_inside_a_compiled_block_is_called(tmp_path, make, scope):
    """In whatever block, and set at whatever step: graphs are shared, hooks are not."""
    args = TrainingArguments(output_dir=str(tmp_path), torch_compile=True)
    torch.manual_seed(0)
    model = make()
    compile_module(model, CompileOptions(backend="eager", scope=scope))
    inside = model.model.layers[1].mlp
    with torch_settings(args):
        before = run(model)
        hook = inside.register_forward_hook(lambda module, given, made: made * 0)
        without = run(model)
        hook.remove()
        after = run(model)
    put_back(model)
    assert torch.equal(before[0], after[0])
    inside.register_forward_hook(lambda module, given, made: made * 0)
    torch.testing.assert_close(without[0], run(model)[0])
    assert abs(without[0] - before[0]) > 1e-4


@pytest.mark.parametrize("make", [lambda: tiny_decoder(num_layers=3), tiny_llama])
def test_what_the_backward_pass_compiles_has_the_settings_of_the_run(tmp_path, make):
    """On a GPU it has a thread of its own; one that is begun by another does so on a CPU too."""
    model = make().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    inputs = torch.arange(32).view(2, 16)
    seen = []

    def step():
        loss = model(input_ids=inputs, labels=inputs).loss
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    with torch_settings(TrainingArguments(output_dir=str(tmp_path), torch_compile=True)):
        compile_module(model, CompileOptions(backend="eager"))
        step()
        inside = model.model.layers[1].mlp
        inside.register_forward_hook(lambda *given: seen.append(torch.is_grad_enabled()))
        step()
    assert seen == [False, True]


@pytest.mark.parametrize("frozen", ["embed_tokens", "layers.0.", "layers.1."])
def test_a_chain_of_blocks_has_the_gradients_of_blocks_alone(frozen):
    torch.manual_seed(0)
    model = tiny_decoder(num_layers=3)
    for name, weight in model.named_parameters():
        weight.requires_grad_(frozen not in name)
    ids = torch.arange(32).view(2, 16)

    def grads():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            model(ids, ids).loss.backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    plain = grads()
    compile_module(model, EAGER)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(grads(), plain))


def test_the_first_block_of_a_chain_has_no_graph_of_its_own():
    """It is given something to add as the others are: of the same dtype, with a gradient."""
    model, ids = tiny_decoder(num_layers=3), torch.arange(32).view(2, 16)
    compile_module(model, EAGER)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, ids).loss.backward()
    assert num_graphs() == 1


def test_a_chain_of_blocks_can_be_compiled_as_a_whole_and_differentiated_as_a_function():
    torch.manual_seed(0)
    model, ids = tiny_decoder(num_layers=3), torch.arange(32).view(2, 16)

    def found():
        model.zero_grad()
        model(ids, ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    def total(weights):
        return torch.func.functional_call(model, weights, (ids,)).logits.logsumexp(-1).sum()

    weights = {name: p.detach() for name, p in model.named_parameters()}
    plain, plain_total = found(), torch.func.grad(total)(weights)
    compile_module(model, CompileOptions(backend="aot_eager"))
    for name, gradient in torch.func.grad(total)(weights).items():
        torch.testing.assert_close(gradient, plain_total[name])
    model.model.compile(backend="eager", fullgraph=True)
    for name, gradient in found().items():
        torch.testing.assert_close(gradient, plain[name])


def test_the_norm_that_a_gpu_compiles_is_the_plain_one():
    torch.manual_seed(0)
    model = tiny_decoder(num_layers=2)
    torch.nn.init.normal_(model.model.norm.weight)
    plain = run(model)
    compile_module(model, EAGER, device=torch.device("cuda"))
    for mine, theirs in zip(plain, run(model)):
        torch.testing.assert_close(mine, theirs)
    assert num_graphs() == 2  # of the blocks and of the norm


def test_a_second_model_of_the_class_has_its_own_graphs():
    for number in range(1, 4):
        model = tiny_decoder(num_layers=2)
        compile_module(model, EAGER)
        run(model)
        assert num_graphs() == number


def test_sampling_compiles_nothing():
    for model in (tiny_decoder(num_layers=2), tiny_llama()):
        plain = model.generate(torch.arange(4).view(1, 4), max_new_tokens=4, do_sample=False)
        compile_module(model, EAGER)
        again = model.generate(torch.arange(4).view(1, 4), max_new_tokens=4, do_sample=False)
        assert torch.equal(plain, again)
    assert num_graphs() == 0


def test_recomputed_blocks_are_compiled_with_their_recomputation():
    torch.manual_seed(0)
    model = tiny_decoder(num_layers=3)
    plain = run(model)
    enable(model, "every_2")
    compile_module(model, EAGER)
    for mine, theirs in zip(plain, run(model)):
        torch.testing.assert_close(mine, theirs)
    assert num_graphs() == 2  # those that are recomputed, and the others


def test_copies_and_a_way_back():
    model = tiny_decoder(num_layers=2)
    compile_module(model, EAGER)
    copied = copy.deepcopy(model)
    assert copied.model.layers[0].forward.__self__ is copied.model.layers[0]
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == model.state_dict().keys()
    put_back(model)
    run(model)
    assert num_graphs() == 0


def test_a_whole_that_cannot_be_compiled_is_refused():
    class Inner(nn.Module):
        """Its output layer, for which a fused loss stands in, is in the middle of it."""

        def __init__(self):
            super().__init__()
            self.lm_head = nn.Linear(4, 4)
            self.lm_head.forward = lambda x: x

        def get_output_embeddings(self):
            return self.lm_head

    with pytest.raises(ConfigError, match=r"loss of Inner is made in chunks.*scope='blocks'"):
        compile_module(Inner(), replace(EAGER, scope="model"))
    compile_module(Inner(), replace(EAGER, scope="model", full_graph=False))
    args = {"torch_compile": True, "torch_compile_full_graph": True, "torch_compile_scope": "model"}
    options = CompileOptions.from_args(FSDP2TrainingArguments(**args))
    with pytest.raises(ConfigError, match="under FSDP2, which gathers the weights of each block"):
        options.check(torch.device("cpu"))
    replace(options, scope="blocks").check(torch.device("cpu"))


def test_of_a_part_the_blocks_are_compiled_whatever_the_scope():
    part = tiny_decoder(num_layers=2)
    compile_module(part, replace(EAGER, scope="model"), is_part=True)
    assert "forward" not in part.model.__dict__
    assert all("forward" in layer.__dict__ for layer in part.model.layers)


def test_a_model_without_blocks_is_compiled_whole():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).relu()

    model = Plain()
    compile_module(model, EAGER)
    model(torch.randn(2, 4))
    assert num_graphs() == 1
    assert list(model.state_dict()) == ["linear.weight", "linear.bias"]
    stage = Plain()
    compile_module(stage, EAGER, is_part=True)
    assert "forward" not in stage.__dict__


def test_the_whole_model_where_that_is_asked_for():
    """But for a loss in chunks: that of the decoder, or one that stands in for the output layer."""
    whole = replace(EAGER, scope="model")
    model = tiny_decoder(num_layers=1)
    plain = run(model)
    compile_module(model, whole)
    assert "forward" in model.model.__dict__ and "forward" not in model.model.layers[0].__dict__
    for mine, theirs in zip(plain, run(model)):
        torch.testing.assert_close(mine, theirs)
    assert num_graphs() == 1
    llama, fused = tiny_llama(), tiny_llama()
    FusedLoss(chunked_loss).install(fused)
    for model in (llama, fused):
        compile_module(model, whole)
    assert "forward" in llama.__dict__
    assert "forward" not in fused.__dict__ and "forward" in fused.model.__dict__


class Small(nn.Module):
    """Cheap to compile, for the slow backends."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return x + self.down(torch.tanh(nn.functional.gelu(self.up(x))).sin())

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(258, 16)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": x @ self.embed.weight.T}


def losses_of(folder, model_init=tiny_decoder, **options):
    trainer = tiny_trainer(folder, max_steps=3, **options)
    trainer.model_init = model_init
    trainer.train()
    return [r["loss"] for r in trainer.state.log_history if "loss" in r], trainer


@pytest.mark.parametrize(
    "options",
    [
        {"torch_compile_backend": "aot_eager", "torch_compile_dynamic": False},
        {"torch_compile_backend": "eager", "torch_compile_full_graph": True,
         "gradient_checkpointing": True, "mixed_precision": "no"},
    ],
)  # fmt: skip
def test_training_and_evaluation(tmp_path, options):
    plain, _ = losses_of(tmp_path / "plain")
    losses, trainer = losses_of(tmp_path / "a", torch_compile=True, **options)
    assert losses == pytest.approx(plain, rel=1e-5)
    assert num_graphs() == 1
    trainer.evaluate()
    assert num_graphs() == 2
    assert list(trainer.model.state_dict()) == list(tiny_decoder().state_dict())


def test_inductor_trains_the_same(tmp_path):
    plain, _ = losses_of(tmp_path / "plain", Small)
    losses, _ = losses_of(tmp_path / "a", Small, torch_compile=True)
    assert losses == pytest.approx(plain, rel=1e-4)
    assert num_graphs() == 1


@pytest.mark.slow
def test_a_budget_makes_the_compiler_save_less(tmp_path):
    ids = torch.arange(64).view(2, 32)
    saved = {}
    for budget in (1.0, 0.1):
        model = Small()
        compile_module(model, CompileOptions(backend="aot_eager_decomp_partition"))
        storages = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()  # noqa: B023 - used in this round
            return tensor

        args = TrainingArguments(
            output_dir=str(tmp_path), torch_compile=True, activation_memory_budget=budget
        )
        with torch_settings(args), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            model(ids)["logits"].sum().backward()
        saved[budget] = sum(storages.values())
    assert saved[0.1] < 0.8 * saved[1.0]


def test_workers_start_where_kernels_are_to_be_made(monkeypatch):
    from torch._inductor import async_compile

    started = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: started.append(1))
    CompileOptions().start_workers(torch.device("cpu"))
    CompileOptions(backend="aot_eager").start_workers(torch.device("cuda"))
    assert not started
    CompileOptions().start_workers(torch.device("cuda"))
    assert started


def test_a_run_of_even_and_uneven_batches_is_one_graph(tmp_path):
    """Not one for the second step, nor for the last batch of an epoch, nor for the next epoch."""
    options = {"torch_compile_backend": "eager", "per_device_train_batch_size": 3}
    trainer = tiny_trainer(
        tmp_path, torch_compile=True, mixed_precision="bf16", num_train_epochs=2, **options
    )
    trainer.train_dataset = tiny_dataset(8, sequence_length=16)
    trainer.train()
    assert trainer.state.global_step == 6
    assert num_graphs() == 1


def test_a_number_in_a_block_does_not_double_the_work(tmp_path):
    """Dynamic shapes would make an input of it, and then take that back and start again."""
    joint = counters["aot_autograd"]
    losses_of(tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
    assert joint["total"] == 1 and num_graphs() == 1


def test_unknown_names_are_told_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="torch_compile_backend 'inductr'; did you mean 'induct"):
        tiny_trainer(tmp_path, torch_compile=True, torch_compile_backend="inductr")
    with pytest.raises(ConfigError, match="did you mean 'reduce-overhead'"):
        tiny_trainer(tmp_path, torch_compile=True, torch_compile_mode="reduce-overheat")


def test_autotuning_is_refused_for_an_accumulation_that_follows(tmp_path):
    trainer = tiny_trainer(
        tmp_path, torch_compile=True, torch_compile_mode="max-autotune", global_batch_size=4
    )
    with pytest.raises(ConfigError, match="global_batch_size=4: torch_compile_mode='max-autotune'"):
        trainer.train()


def test_options_of_the_compiler_without_it_are_told():
    with pytest.warns(UserWarning, match="torch_compile_scope='model': without effect"):
        TrainingArguments(torch_compile_scope="model")
    with pytest.warns(UserWarning, match="without effect, since gradient_checkpointing is False"):
        TrainingArguments(gradient_checkpointing_policy="selective")
