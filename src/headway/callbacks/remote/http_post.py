"""One message to an HTTP server, tried again while there is hope.

Owns: what is worth another attempt, how long to wait before it, and that no message of an error
holds the address, which may be a secret. Does not own: the thread (sender.py), the body.
"""

from __future__ import annotations

import email.utils
import http.client
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from headway.errors import ConfigError

Make = Callable[[], tuple[bytes, Mapping[str, str]]]
"""Body and headers of a message."""
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_MOST_BYTES = 1 << 16
_AGAIN = (408, 425, 429)
# Of its own: the global generator is training's.
_jitter = random.Random()


class DeliveryError(RuntimeError):
    """A message did not arrive. Its words name the host and not the whole address."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A signed message goes where the user said and nowhere else."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


def check_url(owner: str, option: str, url: object) -> str:
    """An address that can be posted to; what is wrong with another is told without showing it."""
    text = url.strip() if isinstance(url, str) else ""
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or any(character <= " " for character in text):
        raise ConfigError(
            f"{owner}: {option} must be an address that begins with https:// or http://"
        )
    return text


def host_of(url: str) -> str:
    return urlsplit(url).hostname or "?"


def post(
    url: str,
    make: Make,
    *,
    timeout_s: float,
    max_retries: int,
    closing: threading.Event,
) -> None:
    """Send what `make` gives (body and headers, made anew for every attempt).

    Tried again, up to `max_retries` times, after a failed connection and when the server says that
    it is busy or broken; the server may say how long to wait. Once `closing` is set there is no
    more waiting: one last attempt, and that is it.
    """
    opener = urllib.request.build_opener(_NoRedirects)
    for attempt in range(max_retries + 1):
        body, headers = make()
        request = urllib.request.Request(url, data=body, headers=dict(headers), method="POST")
        asked_s: float | None = None
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                answer.read(_MOST_BYTES)
            return
        except urllib.error.HTTPError as error:
            why = f"{host_of(url)} answered {error.code} {error.reason}"
            is_final = error.code < 500 and error.code not in _AGAIN
            asked_s = _retry_after_s(error.headers.get("Retry-After"))
            error.close()
        except (OSError, http.client.HTTPException) as error:
            why = f"{host_of(url)} cannot be reached: {_explain(error)}"
            is_final = False
        if is_final or attempt == max_retries or (closing.is_set() and attempt):
            raise DeliveryError(f"{why} ({attempt + 1} attempts)") from None
        closing.wait(_wait_s(attempt, asked_s))


def _wait_s(attempt: int, asked_s: float | None) -> float:
    if asked_s is not None:
        return min(asked_s, _LONGEST_WAIT_S)
    # Many runs whose server went away do not come back all at once.
    return _jitter.uniform(0.5, 1.0) * min(_FIRST_WAIT_S * 2.0**attempt, _LONGEST_WAIT_S)


def _retry_after_s(told: str | None) -> float | None:
    """What a server asks for: seconds, or a date."""
    if told is None:
        return None
    try:
        return max(0.0, float(told))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(told).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def _explain(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error) or type(error).__name__
