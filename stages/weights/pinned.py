"""A store's memory registered with the CUDA driver: a GPU then reads it as it reads pinned memory."""

import warnings
from weakref import WeakSet

import torch

from pipeline.gps.store import Store

_READ_ONLY = 8
"""cudaHostRegisterReadOnly: readers map a store so."""
_pinned: "WeakSet[Store]" = WeakSet()


def pin(store: Store) -> None:
    """Once in this process, for as long as it lives. It takes seconds for each 10 GB: at a start, never in a shift.
    Where the driver refuses it is said, and reads go on as before."""
    if store in _pinned or any(store.pile_of.values()):  # of a dealt one, its holes would get memory
        return
    _pinned.add(store)
    cudart = torch.cuda.cudart()
    for image in store.images():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            address = torch.frombuffer(image, dtype=torch.uint8).data_ptr()
        if error := int(cudart.cudaHostRegister(address, len(image), _READ_ONLY)):
            print(f"{store.name} is not pinned: the driver answers {error}", flush=True)
            return
