"""Steering a run from outside: the wire's words, the server in rank 0, clients and discovery.

Names are exported lazily; nothing here imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from headway.control.client import AsyncClient, Client, ControlError
    from headway.control.discovery import Job, find_job, list_jobs
    from headway.control.schema import COMMANDS

__all__ = ["COMMANDS", "AsyncClient", "Client", "ControlError", "Job", "find_job", "list_jobs"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "client": ("AsyncClient", "Client", "ControlError"),
        "discovery": ("Job", "find_job", "list_jobs"),
        "schema": ("COMMANDS",),
    },
)
