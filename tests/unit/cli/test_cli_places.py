"""What the command line says of files and folders that are not where they were said to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.cli.main import main


@pytest.mark.parametrize("verb", ["check", "train"])
def test_data_that_is_not_there_is_told_with_its_line_and_where_it_was_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    run_file = tmp_path / "run.yaml"
    data = "class_path: TextDataset, init_args: {files: harbour, sequence_length: 8}"
    text = f"data:\n  train: {{{data}}}\nargs: {{output_dir: new}}\n"
    model = "{vocab_size: 258, hidden_size: 16, num_layers: 1, num_heads: 2}"
    run_file.write_text(f"{text}model: {model}\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "harbor").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main([verb, "../run.yaml"]) == 2
    assert capsys.readouterr().err == (
        "error: ../run.yaml:2: data.train: files: harbour does not exist; relative paths begin at "
        f"the current folder, {tmp_path / 'elsewhere'}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main([verb, "run.yaml"]) == 2
    assert "files: harbour does not exist; did you mean 'harbor'?" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
