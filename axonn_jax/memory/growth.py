"""Keeps freed memory from piling up while something else needs the room."""

import threading

from axonn_jax.memory.host import can_give_back, give_back_freed_memory, resident

_POLL_S = 0.02


class Growth:
    """Has freed memory given back whenever the process has grown by more than `margin` bytes, until it is closed.

    Of a trainer without a pipeline the temporaries stay in their place (`memory.temporaries`); this is for what else
    moves: the programs of a pipeline, an evaluation, an offloaded update.
    """

    def __init__(self, margin: int):
        self._margin, self._closed = margin, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="axonn-growth", daemon=True)
        if can_give_back():
            self._thread.start()

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        allowed = resident() + self._margin
        while not self._closed.wait(_POLL_S):
            if resident() > allowed:
                give_back_freed_memory()
                allowed = max(allowed, resident() + self._margin)  # what is still there is in use
