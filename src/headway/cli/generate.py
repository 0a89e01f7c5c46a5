"""`headway generate DIR --prompt TEXT`: continues a prompt with a trained model."""

from __future__ import annotations

import argparse

from headway.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("dir", metavar="DIR", help="a model, checkpoint or run folder")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=200, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: off")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    parser.add_argument("--seed", type=int, default=None, help="repeat the same draw")
    parser.add_argument("--tokenizer", help="in place of the folder's own")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps; default: the best there is")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the prompt and its continuation."""
    from headway.cli.messages import print_json
    from headway.cli.model_folder import (
        check_vocabulary,
        find_model_folder,
        load_folder_tokenizer,
        load_model,
    )
    from headway.dist.device import resolve_device

    _check(options)
    folder = find_model_folder(options.dir)
    tokenizer = load_folder_tokenizer(folder, options.tokenizer)
    device = resolve_device(options.device)
    model = load_model(folder).to(device)
    check_vocabulary(model, tokenizer, folder)

    ids = tokenizer.encode(options.prompt)
    new_ids = continue_ids(
        model,
        ids,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        do_sample=not options.greedy,
        eos_token_id=_find_ends(model, tokenizer.eos_token_id),
        seed=options.seed,
    )
    text = tokenizer.decode([*ids, *new_ids])
    if options.json:
        print_json(
            {
                "model": str(folder),
                "prompt": options.prompt,
                "text": text,
                "completion": tokenizer.decode(new_ids),
                "new_tokens": new_ids,
            }
        )
    else:
        print(text)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Find what is wrong before the model is read, which may take a while."""
    problems = []
    if not options.prompt:
        problems.append("--prompt: the text must not be empty")
    if options.max_new_tokens < 1:
        problems.append(f"--max-new-tokens: must be at least 1, got {options.max_new_tokens}")
    if not options.greedy and not options.temperature > 0:
        problems.append(
            f"--temperature: must be above 0, got {options.temperature:g}; "
            f"for the likeliest token at every place give --greedy"
        )
    if options.top_k < 0:
        problems.append(f"--top-k: must be 0 (off) or more, got {options.top_k}")
    if not 0 < options.top_p <= 1:
        problems.append(f"--top-p: must lie above 0 and up to 1, got {options.top_p:g}")
    if options.seed is not None and not -(2**63) <= options.seed < 2**64:
        problems.append(f"--seed: must lie in [-2^63, 2^64 - 1], got {options.seed}")
    if problems:
        raise ConfigError(problems)


def _find_ends(model: object, of_tokenizer: int | None) -> list[int]:
    """The ids that end a text: those of the model, and the tokenizer's. Models that answer in turns
    may have more of them than their tokenizer."""
    from headway.models.generation import configs_of, find_end

    ends, _ = find_end(configs_of(model), None, None)
    return list(dict.fromkeys([*ends, *([] if of_tokenizer is None else [of_tokenizer])]))


def continue_ids(
    model: object, ids: list[int], *, seed: int | None = None, **options: object
) -> list[int]:
    """The ids that follow a prompt's; `options` are those of `headway.models.generate`."""
    import torch

    from headway.models import generate

    assert isinstance(model, torch.nn.Module)
    device = next(model.parameters()).device
    generator = None
    if seed is not None:
        generator = torch.Generator(device=device).manual_seed(seed)
    prompt = torch.tensor([ids], device=device)
    out = generate(model, prompt, generator=generator, **options)  # type: ignore[arg-type]
    new: list[int] = out[0, len(ids) :].tolist()
    return new
