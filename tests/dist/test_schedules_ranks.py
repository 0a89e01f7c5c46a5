"""A schedule in tokens, with a group's own, on two ranks and across a resume: as in one process."""

from headway import DDPTrainer, DDPTrainingArguments, Trainer, TrainingArguments
from headway.data import SyntheticDataset
from headway.dist import init_distributed
from headway.testing import run_ranks, tiny_decoder

GROUPS = {
    "norms": {
        "regex": "norm",
        "config": {"lr_scheduler": {"type": "constant", "warmup_ratio": 0.5}},
    }
}


class Rates:
    def __init__(self):
        self.rates = []

    def on_step_begin(self, optimizer):
        self.rates.append([float(group["lr"]) for group in optimizer.param_groups])


def train(trainer_class, arguments_class, batch_size, folder, stop_at):
    watch = Rates()
    args = arguments_class(
        output_dir=folder,
        # 22 samples in steps of 4: the last step of an epoch is a smaller one.
        max_steps=7,
        per_device_train_batch_size=batch_size,
        lr_scheduler_unit="tokens",
        lr_scheduler_type="wsd",
        lr_scheduler_kwargs={"decay_ratio": 0.5, "min_lr": 1e-3},
        warmup_ratio=0.3,
        learning_rate=1e-2,
        seed=1,
        use_cpu=True,
        save_steps=3,
        stop_at=stop_at,
    )
    trainer = trainer_class(
        args=args,
        model_init=tiny_decoder,
        train_dataset=SyntheticDataset(22, 16, 258),
        optimizer_groups=GROUPS,
        default_callbacks=False,
        callbacks=[watch],
    )
    trainer.train()
    return watch.rates, trainer.lr_scheduler.changes


def train_on_ranks(folder, stop_at):
    init_distributed(use_cpu=True)
    return train(DDPTrainer, DDPTrainingArguments, 2, folder, stop_at)


def test_rates_on_two_ranks_are_those_of_one_process(tmp_path):
    alone, _ = train(Trainer, TrainingArguments, 4, str(tmp_path / "alone"), None)
    folder = str(tmp_path / "ranks")
    first = run_ranks(train_on_ranks, 2, folder, 3)
    second = run_ranks(train_on_ranks, 2, folder, None)
    for (before, _), (after, changes) in zip(first, second):
        assert [*before, *after] == alone and changes == []
