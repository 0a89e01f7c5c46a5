import gzip
import json
import os
import tarfile
from pathlib import Path

import pytest

from headway.data import PromptDataset, TextDataset
from headway.data.text import inspect_tokens, prepare_tokens
from headway.data.tokenizer import load_tokenizer
from headway.data.tokens import TokenFile
from headway.errors import ConfigError


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("bee")
    (folder / "a.py").write_bytes(b"caf\xe9")
    (folder / "sub" / "c.txt").write_text("one\n\ntwo\n")
    (folder / "image.bin").write_bytes(b"\0\1\2")
    (folder / ".hidden").write_text("no")
    return folder


def documents(path):
    file = TokenFile(path)
    return [bytes(i for i in file.document(n) if i < 256) for n in range(file.num_documents)]


@pytest.mark.timeout(30)
def test_a_pipe_in_a_folder_is_not_waited_for(corpus, tmp_path):
    os.mkfifo(corpus / "sub" / "pipe")
    stats = prepare_tokens(corpus, tmp_path / "o.hwt")
    assert [Path(s).name for s in stats["skipped_files"]] == ["image.bin", "pipe"]


def test_folder_in_sorted_order_without_binaries(corpus, tmp_path):
    out = tmp_path / "o.hwt"
    stats = prepare_tokens(corpus, out)
    assert documents(out) == [b"caf\xe9", b"bee", b"one\n\ntwo\n"]
    assert stats["num_documents"] == stats["num_files"] == 3
    assert stats["num_tokens"] == 4 + 3 + 9 + 3
    assert [s.rpartition("/")[2] for s in stats["skipped_files"]] == ["image.bin"]
    prepare_tokens(corpus, out, include="*.txt", eos=False)
    assert documents(out) == [b"bee", b"one\n\ntwo\n"]


def test_an_archive_in_a_folder_is_no_text(corpus, tmp_path):
    with tarfile.open(corpus / "more.tar.gz", "w:gz") as archive:
        archive.add(corpus / "b.txt", "b.txt")
    with gzip.open(corpus / "sub" / "d.txt.gz", "wb") as file:
        file.write(b"zip")
    stats = prepare_tokens(corpus, tmp_path / "o.hwt", include=["*.txt", "*.gz"])
    assert documents(tmp_path / "o.hwt") == [b"bee", b"one\n\ntwo\n", b"zip"]
    assert [Path(s).name for s in stats["skipped_files"]] == ["more.tar.gz"]
    (corpus / "half.txt.gz").write_bytes(gzip.compress(b"x" * 1000)[:-12])
    with pytest.raises(ConfigError, match=r"half\.txt\.gz cannot be read"):
        prepare_tokens(corpus, tmp_path / "o.hwt")
    damaged = bytearray(gzip.compress(b"x" * 1000))
    damaged[10:14] = b"\xff" * 4
    (corpus / "half.txt.gz").write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"half\.txt\.gz cannot be read"):
        prepare_tokens(corpus, tmp_path / "o.hwt")


def test_what_is_not_utf8_is_replaced_and_told(corpus, tmp_path, caplog):
    record = '{"text": "a\\ud83d\\ude00b\\ud83dc"}\n{"text": "d"}\n'  # a pair, then a half
    (corpus / "sub" / "e.jsonl").write_text(record)
    tokenizers = pytest.importorskip("tokenizers")
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")
    )
    coder = load_tokenizer(core)
    stats = prepare_tokens(corpus, tmp_path / "o.hwt", tokenizer=coder, eos=False)
    damaged = ["a.py", "e.jsonl"]
    assert [Path(s).name for s in stats["damaged_files"]] == damaged
    TextDataset(tokenizer=coder, files=corpus, sequence_length=4)
    assert "2 files are not text in UTF-8 throughout" in caplog.text and "a.py" in caplog.text
    # The byte tokenizer takes bytes as they are; JSON has none for half of a character.
    stats = prepare_tokens(corpus, tmp_path / "o.hwt")
    assert [Path(s).name for s in stats["damaged_files"]] == damaged[1:]
    assert documents(tmp_path / "o.hwt")[-2:] == ["a\U0001f600b\ufffdc".encode(), b"d"]
    assert TextDataset(["b\ud83d"], sequence_length=5)[0]["input_ids"].tolist()[0] == ord("b")
    assert len(TextDataset(["b\ud83d"], coder, sequence_length=5)) == 1
    assert caplog.text.count("1 texts hold halves of characters") == 2
    pairs = [{"prompt": "a", "completion": "b\ud83d"}]
    assert PromptDataset(pairs)[0]["input_ids"].tolist()[:5] == list("ab\ufffd".encode())
    assert "1 prompts or completions hold halves of characters" in caplog.text


def test_lines_and_jsonl(corpus, tmp_path):
    out = tmp_path / "o.hwt"
    prepare_tokens(corpus / "sub" / "c.txt", out, format="lines")
    assert documents(out) == [b"one", b"two"]
    lines = [json.dumps({"body": text}) for text in ("x", "", "zé")]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n\n")
    with gzip.open(tmp_path / "e.jsonl.gz", "wt") as file:
        file.write('{"body": "zip"}')
    prepare_tokens([tmp_path / "d.jsonl", tmp_path / "e.jsonl.gz"], out, text_key="body")
    assert documents(out) == [b"x", "zé".encode(), b"zip"]


def test_workers_change_nothing(corpus, tmp_path):
    prepare_tokens(corpus, tmp_path / "1.hwt")
    prepare_tokens(corpus, tmp_path / "2.hwt", num_workers=2)
    assert (tmp_path / "1.hwt").read_bytes() == (tmp_path / "2.hwt").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{oops\n', r"d\.jsonl:2: not valid JSON"),
        ('{"text": "a"}\n[1]\n', r"d\.jsonl:2: a JSON object"),
        ("[" * 100_000, r"d\.jsonl:1: not valid JSON"),
        ('{"txt": "a"}\n', r"d\.jsonl:1: text_key 'text' is missing.*txt"),
        ('{"text": 3}\n', r"d\.jsonl:1: text_key 'text' is int"),
        ('{"text": null}\n', r"d\.jsonl:1: text_key 'text' is NoneType, not a string"),
        ("\n", "empty"),
    ],
    ids=lambda value: value[:20],
)
def test_bad_jsonl_names_file_and_line(tmp_path, content, message):
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        prepare_tokens(tmp_path / "d.jsonl", tmp_path / "o.hwt")
    assert [p.name for p in tmp_path.iterdir()] == ["d.jsonl"]


def test_bad_inputs(tmp_path):
    out = tmp_path / "o.hwt"
    with pytest.raises(ConfigError, match="does not exist"):
        prepare_tokens(tmp_path / "none.txt", out)
    with pytest.raises(ConfigError, match="no file"):
        prepare_tokens([], out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no readable text file"):
        prepare_tokens(tmp_path / "empty", out)
    with pytest.raises(ConfigError, match="did you mean 'jsonl'"):
        prepare_tokens(tmp_path / "empty", out, format="json")
    (tmp_path / "x.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        prepare_tokens(tmp_path / "x.jsonl.gz", out)
    assert not out.exists()


def test_inspect(corpus, tmp_path):
    out = tmp_path / "o.hwt"
    prepare_tokens(corpus, out)
    facts = inspect_tokens(out, num_samples=2)
    assert facts["num_documents"] == 3
    assert facts["max_token_id"] == 256
    assert facts["tokenizer_matches"] is True
    assert [sample["text"] for sample in facts["samples"]] == ["caf\ufffd", "bee"]
    assert facts["document_tokens"]["min"] == 4
    json.dumps(facts)


def test_a_token_file_is_no_text(corpus, tmp_path):
    tokens = tmp_path / "corpus.hwt"
    prepare_tokens(corpus, tokens)
    with pytest.raises(ConfigError, match=r"inputs: .*corpus.hwt is a token file.*TokenDataset"):
        prepare_tokens(tokens, tmp_path / "again.hwt")
    with pytest.raises(ConfigError, match=r"files: .*corpus.hwt is a token file"):
        TextDataset(files=tokens, sequence_length=4)


def test_no_text_is_told_by_the_option_that_was_to_give_it(tmp_path):
    for none in ("", [], [""]):  # the first would be the current folder, with all that is in it
        with pytest.raises(ConfigError, match="files: no file or folder was given"):
            TextDataset(files=none, sequence_length=4)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match="files: the dataset is empty"):
        TextDataset(files=tmp_path, sequence_length=4)


def test_a_text_is_not_overwritten_by_its_tokens(tmp_path):
    text, tokens = tmp_path / "a.txt", tmp_path / "a.hwt"
    text.write_text("to be or not to be")
    with pytest.raises(ConfigError, match=r"a\.txt exists and is no token file"):
        prepare_tokens(text, text)
    assert text.read_text() == "to be or not to be" and os.listdir(tmp_path) == ["a.txt"]
    tokens.touch()
    for _ in range(2):  # what is empty, or tokens, is replaced
        prepare_tokens(text, tokens)
    TokenFile(tokens).verify()
