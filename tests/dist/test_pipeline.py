"""Pipelines of real ranks against one device, their checkpoints, and what they refuse."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from pipeline_jobs import CPU, Case, batches_of, count, make_pipeline, source_of, train, train_all
from torch import nn

from headway.checkpoint import CheckpointContents, CheckpointManager
from headway.checkpoint.distributed import DistributedRanks
from headway.data.windows import Window
from headway.dist import init_distributed
from headway.dist.agreement import exchange
from headway.errors import ConfigError
from headway.models.hf import load_pretrained
from headway.strategies.objective import Objective
from headway.strategies.single import SingleDevice
from headway.testing import run_ranks

SCHEDULES = (
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
TIED = {"tie_embeddings": True}


def check_equal(cases, by_rank, rel=1e-6):
    for number, case in enumerate(cases):
        for found in by_rank:
            piped, alone = found[number]
            assert piped.losses == pytest.approx(alone.losses, rel=rel), case
            assert piped.norms == pytest.approx(alone.norms, rel=rel), case
            assert piped.eval_loss == pytest.approx(alone.eval_loss, rel=rel), case
            assert piped.tokens == alone.tokens, case
            torch.testing.assert_close(piped.logits, alone.logits, rtol=1e-4, atol=1e-5)
            assert piped.events == alone.events, "one event for each schedule step"
            assert piped.losses == by_rank[0][number][0].losses, "ranks differ"
            assert piped.norms == by_rank[0][number][0].norms, "ranks differ"


@pytest.mark.timeout(300)
def test_two_ranks_train_as_one_device_under_every_schedule():
    cases = [Case(schedule, model=TIED) for schedule in SCHEDULES]
    by_rank = run_ranks(train_all, 2, cases, timeout_s=200)
    check_equal(cases, by_rank)
    for number in range(len(cases)):
        held = [found[number][0].num_parameters for found in by_rank]
        assert max(held) < by_rank[0][number][1].num_parameters, "no rank holds the whole model"


@pytest.mark.timeout(400)
def test_four_ranks_train_as_one_device_under_every_schedule():
    pieces = {"n_microbatches": 8}
    cases = [Case(schedule, 8, model=TIED, arguments=pieces, steps=3) for schedule in SCHEDULES]
    check_equal(cases, run_ranks(train_all, 4, cases, timeout_s=300), rel=2e-6)


@pytest.mark.timeout(300)
def test_pipelines_side_by_side_train_as_one_device():
    size = {"pipeline_size": 2}
    cases = [
        Case("GPipe", model=TIED, arguments=size),
        Case("1F1B", arguments=size),
        Case("ZBVZeroBubble", model=TIED, arguments=size),
    ]
    check_equal(cases, run_ranks(train_all, 4, cases, timeout_s=200), rel=2e-6)


@pytest.mark.timeout(300)
def test_batches_of_other_shapes_models_and_losses():
    ragged = ((8, 16), (5, 16), (8, 9), (3, 24))
    cases = [
        Case("GPipe", shapes=ragged),
        Case("ZBVZeroBubble", shapes=ragged),
        Case("1F1B", shapes=tuple((8, length) for length in range(6, 14)), steps=2),
        *(Case(name, recompute=True) for name in ("1F1B", "InterleavedZeroBubble", "DualPipeV")),
        Case("GPipe", family="llama", model={"tie_word_embeddings": True}),
        Case("ZBVZeroBubble", family="llama", recompute=True),
        Case("Interleaved1F1B", own_loss=True),
        Case("LoopedBFS", 6, arguments={"is_multistage": True, "stages_per_rank": 3}),
        Case("GPipe", arguments={"n_microbatches": 2}),
    ]
    check_equal(cases, run_ranks(train_all, 2, cases, timeout_s=200))


# -- runs that repeat, stand-ins, sampling ------------------------------------------------------


def repeat_and_sample():
    case = Case("Interleaved1F1B", model={"dropout": 0.1, **TIED})
    first, second = (train(make_pipeline(case), case) for _ in range(2))
    strategy = make_pipeline(case)
    model = strategy.setup(source_of(case))
    objective = Objective(model)
    real, stand_in = (batches_of(case)[0][n] for n in range(2))
    gradients = []
    for window in (
        Window([real], count([real]), 0, 0),
        Window([real, stand_in], count([real]), 0, 0, num_fillers=1),
    ):
        model.eval()  # no dropout
        strategy.forward_backward(window, objective, count([real]), lambda event: None)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()
    prompt = torch.tensor([[3, 4, 5], [6, 7, 8]])
    torch.manual_seed(strategy.context.rank)  # ranks that drew by themselves would differ
    drawn = strategy.generate(prompt, max_new_tokens=8, temperature=2.0, top_k=50)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    padded = torch.tensor([[9, 9, 3, 4], [5, 6, 7, 8]])
    options = {"max_new_tokens": 4, "do_sample": False}
    rows = strategy.generate(padded, attention_mask=mask, **options)[0, 4:]
    alone = strategy.generate(padded[:1, 2:], **options)[0, 2:]
    equal = {name: torch.equal(grad, gradients[1][name]) for name, grad in gradients[0].items()}
    return {
        "runs": [(run.losses, run.norms) for run in (first, second)],
        "stand-in counts": [name for name, same in equal.items() if not same],
        "drawn": drawn.tolist(),
        "padding": (rows.tolist(), alone.tolist()),
        "training": model.training,
    }


@pytest.mark.timeout(120)
def test_runs_repeat_stand_ins_weigh_nothing_and_all_ranks_sample_alike():
    by_rank = run_ranks(repeat_and_sample, 2, timeout_s=90)
    for found in by_rank:
        assert found["runs"][0] == found["runs"][1], "dropout from the same seeds"
        assert found["stand-in counts"] == []
        assert found["drawn"] == by_rank[0]["drawn"]
        assert found["padding"][0] == found["padding"][1]


# -- a model_init that draws its own numbers ------------------------------------------------------


def draw_apart(family, model):
    """Each rank's values after two steps, and what a single process has on rank 0 at the start."""
    case = Case(family=family, model=model, arguments={"pipeline_size": 2}, steps=2)
    strategy = make_pipeline(case)
    source = source_of(case)
    make = source.make

    def make_by_rank():
        torch.manual_seed(10 + strategy.context.rank)
        return make()

    source.make = make_by_rank
    part = strategy.setup(source)
    start = {name: p.detach().clone() for name, p in part.named_parameters()}
    torch.manual_seed(10)
    wanted = dict(make().named_parameters(remove_duplicate=False))
    other = [name for name, value in start.items() if not torch.equal(value, wanted[name])]
    optimizer, objective = torch.optim.AdamW(part.parameters(), lr=1e-2), Objective(part)
    shard = strategy.data_shard()
    for batches in batches_of(case):
        own = [
            {name: value.chunk(shard.world_size)[shard.rank] for name, value in batch.items()}
            for batch in batches
        ]
        window = Window(own, count(own), 0, 0)
        loss = strategy.forward_backward(window, objective, count(batches), lambda event: None)
        strategy.apply(optimizer, loss, strategy.clip(1.0))
    return other, {name: p.detach().clone() for name, p in part.named_parameters()}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("family", "model", "num_ranks"),
    [("llama", {"tie_word_embeddings": True}, 2), ("llama", {}, 4), ("decoder", TIED, 2)],
)
def test_ranks_that_draw_apart_train_the_values_of_the_first(family, model, num_ranks):
    by_rank = run_ranks(draw_apart, num_ranks, family, model, timeout_s=120)
    ends = {}
    num_shared = 0
    for other, end in by_rank:
        assert other == []
        for name, value in end.items():
            num_shared += name in ends
            assert torch.equal(value, ends.setdefault(name, value)), name
    assert num_shared >= 1, "a tied copy, or a replica"


# -- a splitter of one's own --------------------------------------------------------------------


class Tower(nn.Module):
    """Not a model we know: no config, hidden states of half the length."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(258, 12)
        self.middle = nn.Linear(24, 24)
        self.head = nn.Linear(24, 3)

    def forward(self, input_ids, labels=None):
        hidden = self.embed(input_ids)
        hidden = self.middle(hidden.reshape(len(hidden), -1, 24)).tanh()
        return {"logits": self.head(hidden.mean(1))}


class Lower(nn.Module):
    def __init__(self, tower):
        super().__init__()
        self.embed, self.middle = tower.embed, tower.middle

    def output_shape(self, input_shape):
        return (input_shape[0], input_shape[1] // 2, 24)

    def forward(self, x):
        x = self.embed(x)
        return self.middle(x.reshape(len(x), -1, 24)).tanh()


class Upper(nn.Module):
    def __init__(self, tower):
        super().__init__()
        self.head = tower.head

    def forward(self, x, **inputs):
        return {"logits": self.head(x.mean(1))}


def split_tower(model, num_stages):
    return [Lower(model), Upper(model)]


def classify():
    from headway.strategies.source import ModelSource

    def train_tower(strategy):
        torch.manual_seed(0)
        model = strategy.setup(ModelSource(make=Tower))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        objective = Objective(model)
        ids = torch.arange(8 * 6).view(8, 6)
        batch = {"input_ids": ids, "labels": torch.arange(8) % 3}
        losses = []
        for _ in range(4):
            window = Window([batch], 8, 0, 0)
            loss = strategy.forward_backward(window, objective, 8, lambda event: None)
            norm = strategy.clip(1.0)
            strategy.apply(optimizer, loss, norm)
            losses += [strategy.reduce(loss, "sum").item(), norm.item()]
        step = strategy.eval_forward(batch, objective)
        return [*losses, strategy.reduce(torch.as_tensor(step.loss_sum), "sum").item()]

    return train_tower(make_pipeline(Case(), splitter=split_tower)), train_tower(SingleDevice(CPU))


@pytest.mark.timeout(120)
def test_a_splitter_of_ones_own():
    for piped, alone in run_ranks(classify, 2, timeout_s=60):
        assert piped == pytest.approx(alone, rel=1e-6)


class NormedTower(Tower):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(24)


class NormedLower(Lower):
    def __init__(self, tower):
        super().__init__(tower)
        self.norm = tower.norm

    def forward(self, x):
        return self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


def meet():
    """The running mean of every rank before pipelines meet and after, for a save and a feed."""
    from headway.data.loader import WindowLoader
    from headway.strategies.source import ModelSource

    case = Case(arguments={"pipeline_size": 2})
    strategy = make_pipeline(case, splitter=lambda model, num: [NormedLower(model), Upper(model)])
    model = strategy.setup(ModelSource(make=NormedTower))
    shard = strategy.data_shard()
    draw = torch.Generator().manual_seed(shard.rank)
    batch = {"input_ids": torch.randint(0, 258, (4, 6), generator=draw)}
    batch["labels"] = torch.arange(4) % 3
    samples = [{"input_ids": [n] * 6, "labels": 0} for n in range(8)]
    place = {"rank": shard.rank, "world_size": shard.world_size}
    loader = WindowLoader(samples, batch_size=4, collate_fn=stack, shuffle=False, **place)

    def means():
        own = dict(model.named_buffers()).get("norm.running_mean")
        return [mean for mean in exchange(None if own is None else own.tolist()) if mean]

    seen = []
    for act in (strategy.before_save, lambda: next(strategy.feed(loader, training=False))):
        window = Window([batch], 4, 0, 0)
        strategy.forward_backward(window, Objective(model), 8, lambda event: None)
        before = means()
        act()
        seen.append((before, means()))
    return seen


@pytest.mark.timeout(120)
def test_pipelines_have_the_buffers_of_the_first_in_a_save_and_in_an_evaluation():
    for found in run_ranks(meet, 4, timeout_s=90):
        for means, joined in found:
            assert means[0] != means[1], "each pipeline has its own data"
            assert joined == [means[0], means[0]]


# -- checkpoints --------------------------------------------------------------------------------


def take_steps(strategy, case, folder, *, load, save):
    """Go on from a checkpoint, or from the start, for some steps; the losses, and the tensors."""
    torch.manual_seed(0 if load is None else 99)  # values that a load must replace
    model = strategy.setup(source_of(case))
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if "embed" in n], "lr": 1e-3},
            {"params": [p for n, p in model.named_parameters() if "embed" not in n], "lr": 2e-3},
        ]
    )
    contents = CheckpointContents(model, optimizer, trainer_state={"global_step": 3})
    contents.model_config = model.hf_config() if hasattr(model, "hf_config") else None
    several = strategy.name == "pipeline"
    manager = CheckpointManager(folder, ranks=DistributedRanks() if several else None)
    if load is not None:
        manager.load(contents, load)
    loaded = {name: t.detach().clone() for name, t in model.state_dict().items()}
    moments = {
        name: optimizer.state[p]["exp_avg"].clone()
        for name, p in model.named_parameters()
        if p in optimizer.state
    }
    objective, losses = Objective(model), []
    steps = batches_of(replace(case, steps=6))
    for batches in steps[3:] if load is not None else steps[:3]:
        window = Window(batches, count(batches), 0, 0)
        loss = strategy.forward_backward(window, objective, count(batches), lambda event: None)
        strategy.apply(optimizer, loss, strategy.clip(1.0))
        losses.append(strategy.reduce(loss, "sum").item())
    if save:
        manager.save(contents, step=3)
    return losses, loaded, moments


def save(folder, case):
    strategy = make_pipeline(case)
    return take_steps(strategy, case, folder, load=None, save=True)[0]


def go_on(folder, cases_and_checkpoints):
    return [
        take_steps(make_pipeline(case), case, folder, load=checkpoint, save=False)
        for case, checkpoint in cases_and_checkpoints
    ]


@pytest.mark.timeout(400)
def test_what_two_ranks_saved_one_device_and_four_ranks_go_on_with(tmp_path):
    case = Case("GPipe", 8, model=TIED)
    alone = SingleDevice(CPU)
    wanted, _, _ = take_steps(alone, case, tmp_path / "one", load=None, save=True)
    by_one = tmp_path / "one" / "checkpoint-3"
    after, values, moments = take_steps(alone, case, tmp_path / "x", load=by_one, save=False)

    before = run_ranks(save, 2, tmp_path / "two", case, timeout_s=120)
    assert before[0] == before[1] == pytest.approx(wanted, rel=1e-6)
    by_two = tmp_path / "two" / "checkpoint-3"
    losses, loaded, _ = take_steps(alone, case, tmp_path / "x", load=by_two, save=False)
    assert losses == pytest.approx(after, rel=2e-6)
    assert loaded.keys() == values.keys()
    folder = load_pretrained(by_two).state_dict()
    for name, tensor in loaded.items():
        assert torch.equal(folder[name], tensor), "it is a model folder, too"

    jobs = [(case, by_two), (replace(case, schedule="ZBVZeroBubble"), by_one)]
    by_rank = run_ranks(go_on, 4, tmp_path / "y", jobs, timeout_s=200)
    for number, source in enumerate((loaded, values)):
        names = set()
        for found in by_rank:
            losses, held, own_moments = found[number]
            assert losses == pytest.approx(after, rel=2e-6)
            names |= held.keys()
            for name, tensor in held.items():
                assert torch.equal(tensor, source[name]), name
            for name, moment in own_moments.items() if source is values else ():
                assert torch.equal(moment, moments[name]), name
        assert names == values.keys()


def test_a_tied_weight_is_stored_once(tmp_path):
    from headway.checkpoint.tensors import ShardReader

    run_ranks(save, 2, tmp_path, Case(model=TIED), timeout_s=90)
    reader = ShardReader(tmp_path / "checkpoint-3", "model")
    assert "lm_head.weight" not in reader.weight_map
    assert reader.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    states = ShardReader(tmp_path / "checkpoint-3", "optimizer").weight_map
    assert "exp_avg.model.embed_tokens.weight" in states
    assert not any("lm_head" in name for name in states)


# -- what is refused, on every rank ---------------------------------------------------------------


def message_of(act, *args, **kwargs):
    try:
        act(*args, **kwargs)
    except ConfigError as error:
        return str(error)
    return ""


def stack(samples):
    return {name: torch.tensor([one[name] for one in samples]) for name in samples[0]}


def refusals():
    from headway.data.loader import WindowLoader
    from headway.strategies.source import ModelSource

    rank = init_distributed(use_cpu=True).rank
    said = {
        "depth": message_of(make_pipeline(Case(layers=1)).setup, source_of(Case(layers=1))),
        "ready": message_of(
            make_pipeline(Case()).setup, ModelSource(model=source_of(Case()).build())
        ),
        "splitter": message_of(
            make_pipeline(Case(), splitter=lambda model, num: [model, model]).setup,
            source_of(Case()),
        ),
        "schedule": message_of(make_pipeline, Case("1F1B", arguments={"n_microbatches": 1})),
    }
    told: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("headway.strategies.pipeline")
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    flags = ("debug_pipeline", "debug_split_model", "debug_model_params", "debug_model_init")
    strategy = make_pipeline(Case(arguments=dict.fromkeys(flags, True)))
    strategy.setup(source_of(Case()))
    said["debug"] = {
        "layout": any("schedule GPipe" in line and "place" in line for line in told),
        "split": any("stage 1 on rank 1" in line for line in told) == (rank == 0),
        "parameters": any("parameter model.layers" in line and "cpu" in line for line in told),
        "values": any("initial value of model.layers" in line for line in told),
    }
    pair = (torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64))
    said["pair"] = message_of(strategy.eval_forward, pair, None)
    prompt = torch.zeros(1, 120, dtype=torch.int64)
    said["length"] = message_of(strategy.generate, prompt, max_new_tokens=20)
    data = [{"input_ids": [rank, n], "labels": [rank, n]} for n in range(16)]
    loader = WindowLoader(data, batch_size=8, collate_fn=stack, shuffle=False)
    said["data"] = message_of(next, strategy.feed(loader))
    return said


@pytest.mark.timeout(120)
def test_what_cannot_work_is_refused_on_every_rank():
    first, second = run_ranks(refusals, 2, timeout_s=60)
    assert first == second
    assert all(first.pop("debug").values())
    for name, words in {
        "depth": ("pipeline_size", "2 stages", "1 layers"),
        "ready": ("model:", "model_init"),
        "splitter": ("model_splitter", "is on 2 stages"),
        "schedule": ("n_microbatches=1", "1F1B", "2"),
        "pair": ("input_ids", "tuple"),
        "length": ("max_new_tokens=20", "140", "128"),
        "data": ("different batches", "same samples"),
    }.items():
        for word in words:
            assert word in first[name], name
