import subprocess
import sys

import pytest

import headway.data

TORCH_FREE = ("datasets", "tokens", "order", "packing", "mixing", "tokenizer", "text", "jsonable")


def test_torch_free_modules_do_not_import_torch():
    code = (
        "import sys, headway.data, "
        + ", ".join(f"headway.data.{name}" for name in TORCH_FREE)
        + "; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_exported_name_exists():
    for name in headway.data.__all__:
        assert getattr(headway.data, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        headway.data.nothing  # noqa: B018
