import importlib.util

import pytest

from headway.data.tokenizer import ByteTokenizer, load_tokenizer
from headway.errors import ConfigError

TEXTS = [
    "plain",
    "two  spaces,\ttabs\nand lines\r\n",
    "Größe 漢字 🙂 é",
    "it's 1234 <|endoftext|> \x00\x7f",
    " leading and trailing ",
    "".join(map(chr, range(1, 0x250))),
]


def test_bytes():
    coder = ByteTokenizer()
    assert coder.encode("hé") == [104, 195, 169]
    assert coder.encode(b"\xff", add_eos=True) == [255, 256]
    assert coder.decode([104, 195, 169, 256, 257]) == "hé"
    assert len(coder) == coder.vocab_size == 258
    for text in (*TEXTS, "", b"\xff\0"):
        for add_eos in (True, False):
            assert coder.encode_array(text, add_eos).tolist() == coder.encode(text, add_eos)


def test_transformers_reads_what_we_save(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = ByteTokenizer()
    ours.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (len(theirs), theirs.eos_token_id, theirs.pad_token_id) == (258, 256, 257)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text == ours.decode(ours.encode(text))
    # Saved again by transformers it is still ours.
    theirs.save_pretrained(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again") == ours
    adapted = load_tokenizer(theirs)
    assert adapted.encode_batch(TEXTS, add_eos=True) == ours.encode_batch(TEXTS, add_eos=True)
    assert adapted.decode(adapted.encode("abc", add_eos=True)) == "abc"


def test_our_own_folder_needs_no_package(tmp_path, monkeypatch):
    ByteTokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *a: None)
    assert load_tokenizer(str(tmp_path)) == ByteTokenizer()
    assert load_tokenizer(tmp_path / "tokenizer.json") == ByteTokenizer()


@pytest.fixture
def word_level():
    tokenizers = pytest.importorskip("tokenizers")
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "<unk>": 2, "</s>": 3}, unk_token="<unk>")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return core


def test_tokenizers_object_and_folder(tmp_path, word_level):
    adapted = load_tokenizer(word_level)
    assert adapted.encode("a b c", add_eos=True) == [0, 1, 2, 3]
    assert (adapted.vocab_size, adapted.eos_token_id, adapted.pad_token_id) == (4, 3, None)
    adapted.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("b a") == [1, 0]
    assert loaded.digest == adapted.digest != ByteTokenizer().digest
    assert loaded.eos_token_id == 3


def test_missing_package_names_the_extra(tmp_path, word_level, monkeypatch):
    word_level.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda *a: None)
    with pytest.raises(ConfigError, match=r"headway\[tokenizers\]"):
        load_tokenizer(tmp_path)


def test_unknown_specs(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'bytes'"):
        load_tokenizer("bites")
    with pytest.raises(ConfigError, match="not understood"):
        load_tokenizer(3)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
