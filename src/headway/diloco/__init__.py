"""Training one model on machines that are far apart, with rare communication.

Names are loaded when they are first used, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from headway.diloco.client import DiLoCoClient
    from headway.diloco.ledger import replay
    from headway.diloco.server import DiLoCoServer
    from headway.diloco.specification import Specification
    from headway.diloco.worker import DiLoCoWorker

__all__ = ["DiLoCoClient", "DiLoCoServer", "DiLoCoWorker", "Specification", "replay"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    __all__,
    {
        "client": ("DiLoCoClient",),
        "ledger": ("replay",),
        "server": ("DiLoCoServer",),
        "specification": ("Specification",),
        "worker": ("DiLoCoWorker",),
    },
)
