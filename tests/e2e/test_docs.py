"""Every page of the documentation runs as it stands.

A page's ```python blocks are one script, ```yaml blocks that open with `# file: NAME` are files
it finds, ```bash blocks that open with `# run` are commands. `no-run` after the language excludes
a block. Commands above the first Python block run before the script, the others after it. Scripts
and the command `headway` are processes of their own that find torch imported (warm.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launched import PROGRAM
from warm import warm_programs

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
TIMEOUT_S = 240

FENCE = re.compile(r"(?P<ticks>`{3,})(?P<language>\w*)[ \t]*(?P<tags>[^`\n]*)")


@dataclass
class Block:
    """A fenced block: `line` is the page's line number of the first line inside the fence."""

    language: str
    tags: list[str]
    line: int
    lines: list[str]

    @property
    def first(self) -> str:
        return self.lines[0].strip() if self.lines else ""


def find_blocks(text: str) -> list[Block]:
    blocks: list[Block] = []
    open_ticks, indent = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.lstrip()
        if open_ticks:
            if stripped.rstrip() == open_ticks:
                open_ticks = ""
            else:
                blocks[-1].lines.append(line[indent:] if line[:indent].isspace() else line)
        elif match := FENCE.fullmatch(stripped):
            open_ticks, indent = match["ticks"], len(line) - len(stripped)
            blocks.append(Block(match["language"], match["tags"].split(), number + 1, []))
    assert not open_ticks, f"the block that opens on line {blocks[-1].line - 1} is never closed"
    return [block for block in blocks if "no-run" not in block.tags]


def write_script(blocks: list[Block], path: Path) -> None:
    """Each block stands on the lines it has in the page, so that tracebacks point into it."""
    script: list[str] = []
    for block in blocks:
        script += [""] * (block.line - 1 - len(script)) + block.lines
    path.write_text("\n".join(script) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def warm() -> Iterator[Path]:
    with warm_programs({"headway": [PROGRAM], "warm-python": []}) as folder:
        yield folder


def run(argv: list[str], directory: Path, warm: Path, what: str) -> None:
    folders = [str(warm), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    path = os.pathsep.join(folders)
    environ = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        argv,
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, (
        f"{what} ended with exit code {done.returncode}\n"
        f"stdout:\n{done.stdout[-4000:]}\nstderr:\n{done.stderr[-4000:]}"
    )


def run_page(page: Path, directory: Path, warm: Path) -> None:
    blocks = find_blocks(page.read_text(encoding="utf-8"))
    for block in blocks:
        if block.language in ("yaml", "yml") and (name := re.match(r"# file: (\S+)", block.first)):
            path = directory / name[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(block.lines) + "\n", encoding="utf-8")
    python = [block for block in blocks if block.language == "python"]
    commands = [block for block in blocks if block.language == "bash" and block.first == "# run"]
    start = python[0].line if python else 0
    for block in (block for block in commands if block.line < start):
        run_commands(block, page, directory, warm)
    if python:
        script = directory / f"{page.stem.replace('-', '_')}_page.py"
        write_script(python, script)
        run([str(warm / "warm-python"), script.name], directory, warm, f"the Python of {page.name}")
    for block in (block for block in commands if block.line > start):
        run_commands(block, page, directory, warm)


def run_commands(block: Block, page: Path, directory: Path, warm: Path) -> None:
    argv = ["bash", "-euo", "pipefail", "-c", "\n".join(block.lines)]
    run(argv, directory, warm, f"the commands on line {block.line} of {page.name}")


@pytest.mark.timeout(4 * TIMEOUT_S)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page: Path, tmp_path: Path, warm: Path) -> None:
    run_page(page, tmp_path, warm)


GOOD = """\
A page.

```yaml
# file: conf/run.yaml
key: 5
```

```bash
# run
grep key conf/run.yaml > copied.txt
```

```python
text = open("copied.txt").read()
```

```python no-run
raise SystemExit("never")
```

- in a list

  ```python
  if text:
      open("from_python.txt", "w").write(text)
  ```

```bash
# run
test -s from_python.txt && touch done
```

```bash
exit 1
```
"""


def test_a_page_runs_from_top_to_bottom(tmp_path: Path, warm: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(GOOD)
    run_page(page, tmp_path, warm)
    assert (tmp_path / "from_python.txt").read_text() == "key: 5\n"
    assert (tmp_path / "done").exists()


def test_a_page_without_blocks_passes(tmp_path: Path, warm: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Only words.\n")
    run_page(page, tmp_path, warm)


def test_a_broken_example_fails_with_its_line_in_the_page(tmp_path: Path, warm: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Words.\n\n```python\nx = 1\n```\n\nMore.\n\n```python\nx / 0\n```\n")
    with pytest.raises(AssertionError, match=r"line 10[\s\S]*ZeroDivisionError"):
        run_page(page, tmp_path, warm)


def test_a_failing_command_fails_the_page(tmp_path: Path, warm: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\n# run\nfalse\ntrue\n```\n")
    with pytest.raises(AssertionError, match=r"line 2 of page.md ended with exit code 1"):
        run_page(page, tmp_path, warm)


def test_a_killed_program_fails_the_page(tmp_path: Path, warm: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nimport os\nos.kill(os.getpid(), 9)\n```\n")
    with pytest.raises(AssertionError, match=r"exit code 1[\s\S]*page_page.py was killed"):
        run_page(page, tmp_path, warm)


def test_an_unclosed_block_is_not_passed_over(tmp_path: Path, warm: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n")
    with pytest.raises(AssertionError, match="line 1 is never closed"):
        run_page(page, tmp_path, warm)
