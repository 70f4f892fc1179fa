"""What every long-lived process of the service does once it has started."""

from __future__ import annotations

import gc


def settle_heap() -> None:
    """Take what start-up allocated out of the garbage collector's sight, and collect less often.

    A full collection walks every object: modules, templates and tokenizers alone cost 0.2 to 0.6 s in which the
    event loop stands still, several times a second under load.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
