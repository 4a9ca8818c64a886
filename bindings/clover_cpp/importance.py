"""`Importance`: how large the inputs of the weights' columns are in the passes of a model."""

import ctypes as c

import numpy as np

from . import native


class Importance:
    """Gathers from all passes of the `Clover` objects (of one model) that it is given to, while `paused` is false."""

    def __init__(self):
        self._handle, self._paused = c.c_void_p(), False
        self._lib = native.library()
        native.check(self._lib.clover_imatrix_new(self._handle))

    def __del__(self):
        if hasattr(self, "_lib"):
            self._lib.clover_imatrix_free(self._handle)

    @property
    def paused(self):
        """Whether passes are left out."""
        return self._paused

    @paused.setter
    def paused(self, value):
        self._paused = bool(value)
        self._lib.clover_imatrix_pause(self._handle, self._paused)

    def entries(self):
        """Copies of what was gathered: tensor name -> (sums of squared inputs, float32 [matrices, columns]; inputs seen by each
        matrix, int64 [matrices]). Not while one of its models is in use by another thread."""
        found = {}
        for i in range(self._lib.clover_imatrix_count(self._handle)):
            entry = native.ImatrixEntry()
            native.check(self._lib.clover_imatrix_get(self._handle, i, entry, c.sizeof(entry)))
            sums = np.ctypeslib.as_array(entry.sums, (entry.n_matrices, entry.n_columns))
            found[entry.name.decode()] = sums.copy(), np.ctypeslib.as_array(entry.counts, (entry.n_matrices,)).copy()
        return found
