"""`headway data prepare` and `headway data inspect`: token files from text, and what is in them."""

from __future__ import annotations

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    verbs = parser.add_subparsers(dest="action", required=True, metavar="{prepare,inspect}")
    prepare = verbs.add_parser("prepare", help="text files, folders or JSONL to one token file")
    prepare.add_argument("inputs", nargs="+", metavar="INPUT", help="a file or a folder")
    prepare.add_argument("-o", "--output", required=True, metavar="OUT.hwt")
    prepare.add_argument("--tokenizer", default="bytes", help="bytes, a folder, a tokenizer.json")
    prepare.add_argument("--format", help="text (a file is a document), lines or jsonl")
    prepare.add_argument("--text-key", default="text", help="where a JSONL record has its text")
    prepare.add_argument(
        "--include", action="append", metavar="GLOB", help="only these files of a folder"
    )
    prepare.add_argument("--no-eos", action="store_true", help="no end-of-text after documents")
    prepare.add_argument("--workers", type=int, default=1, metavar="N", help="processes")
    prepare.add_argument("--json", action="store_true", help="print JSON")
    inspect = verbs.add_parser("inspect", help="counts, id range, document lengths, first texts")
    inspect.add_argument("file", metavar="FILE", help="a token file")
    inspect.add_argument("--tokenizer", help="to decode with; the byte tokenizer is known")
    inspect.add_argument("--samples", type=int, default=1, metavar="N", help="documents to show")
    inspect.add_argument("--verify", action="store_true", help="read it all, compare digests")
    inspect.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prepare or inspect."""
    return _prepare(options) if options.action == "prepare" else _inspect(options)


def _prepare(options: argparse.Namespace) -> int:
    from headway.cli.messages import print_json, print_table, spell_bytes
    from headway.data.text import list_some, prepare_tokens

    counted = prepare_tokens(
        options.inputs,
        options.output,
        tokenizer=options.tokenizer,
        format=options.format,
        text_key=options.text_key,
        include=options.include,
        eos=not options.no_eos,
        num_workers=options.workers,
    )
    if options.json:
        print_json(counted)
        return 0
    rows = [
        ("file", counted["output"]),
        ("documents", f"{counted['num_documents']:,} from {counted['num_files']:,} files"),
        ("tokens", f"{counted['num_tokens']:,} ({counted['tokenizer']}, {counted['dtype']})"),
        ("text", spell_bytes(counted["num_text_bytes"])),
        ("on disk", spell_bytes(counted["file_bytes"])),
    ]
    if counted["skipped_files"]:
        rows.append(("left out", f"{len(counted['skipped_files'])} files that are not text"))
    damaged = counted["damaged_files"]
    if damaged:
        told = f"in {len(damaged)} files, what is not UTF-8: {list_some(damaged)}"
        rows.append(("replaced", told))
    print_table(rows)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from headway.cli.messages import print_json, print_table, spell_bytes
    from headway.data.text import inspect_tokens
    from headway.data.tokens import TokenFile

    if options.verify:
        TokenFile(options.file).verify()
    found = inspect_tokens(options.file, options.tokenizer, options.samples)
    if options.verify:
        found["verified"] = True
    if options.json:
        print_json(found)
        return 0
    lengths: dict[str, Any] = found["document_tokens"]
    coder = found["tokenizer"]
    rows = [
        ("file", f"{found['path']}, {spell_bytes(found['file_bytes'])}, {found['dtype']}"),
        (
            "tokens",
            f"{found['num_tokens']:,}, ids {found['min_token_id']}..{found['max_token_id']}",
        ),
        (
            "documents",
            f"{found['num_documents']:,}; tokens each: min {lengths['min']:,.0f}, "
            f"median {lengths['p50']:,.0f}, mean {lengths['mean']:,.0f}, max {lengths['max']:,.0f}",
        ),
        ("tokenizer", f"{coder['name']}, {coder['vocab_size']:,} ids" if coder else "not recorded"),
    ]
    if found["tokenizer_matches"] is False:
        rows.append(("warning", "the tokenizer given is not the one the file was made with"))
    if options.verify:
        rows.append(("digests", "all right"))
    for number, sample in enumerate(found["samples"]):
        shown = sample["text"] if sample["text"] is not None else str(sample["ids"])
        rows.append((f"sample {number}", shown))
    print_table(rows)
    return 0
