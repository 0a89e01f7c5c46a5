"""The names that `headway.strategies` offers."""

from __future__ import annotations

import pytest

import headway.strategies
from headway.testing import assert_no_import


def test_every_name_is_there() -> None:
    for name in headway.strategies.__all__:
        assert getattr(headway.strategies, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'AcelerateStrategy'"):
        headway.strategies.AcelerateStrategy  # noqa: B018


@pytest.mark.parametrize("package", ["accelerate", "deepspeed"])
def test_optional_packages_are_not_imported(package: str) -> None:
    names = ", ".join(headway.strategies.__all__)
    assert_no_import(f"from headway.strategies import {names}", package)


def test_deepspeeds_configuration_is_built_without_torch() -> None:
    assert_no_import(
        "from headway.strategies import build_deepspeed_config\n"
        "build_deepspeed_config({'zero_stage': 1}, world_size=1)",
        "torch",
    )
