"""Whose fault an error is."""

from __future__ import annotations

import pytest

from headway.dist.failure import is_peer_loss


def raise_again(inner: Exception) -> Exception:
    """An error as it comes from code that wraps it and code that takes it out again."""
    try:
        try:
            try:
                raise inner
            except Exception as error:
                raise RuntimeError("a stage failed") from error
        except RuntimeError as wrapper:
            assert wrapper.__cause__ is not None
            raise wrapper.__cause__ from None
    except Exception as error:
        return error


@pytest.mark.timeout(10)
def test_causes_that_form_a_circle_are_looked_through_once():
    assert not is_peer_loss(raise_again(ValueError("the labels do not fit")))
    assert is_peer_loss(raise_again(RuntimeError("Connection closed by peer [127.0.0.1]")))


def test_the_loss_of_a_rank_is_found_behind_another_error():
    error = ValueError("no batch")
    error.__cause__ = RuntimeError("gloo/transport/tcp/pair.cc: Connection reset by peer")
    assert is_peer_loss(error)
    assert not is_peer_loss(ConnectionResetError("connection reset by peer"))
