"""The memory that an emulated engine or trainer has while it is awake.

It can be seen from outside, as real memory of a GPU can: /proc/PID/maps names the devices that this process was given
for as long as it has it (`/memfd:gpus:0,1 (deleted)`), and Private_Dirty counts the bytes.
"""

import mmap
import os

NAME = "gpus:"
_LONGEST = 200
"""Of a name; the kernel takes 249 bytes."""


class Ballast:
    """From its making to `close`. Private, every page of it written to."""

    def __init__(self, num_bytes: int) -> None:
        fd = os.memfd_create(f"{NAME}{os.environ.get('CUDA_VISIBLE_DEVICES', '')}"[:_LONGEST])
        try:
            os.truncate(fd, mmap.PAGESIZE)
            self._parts = [mmap.mmap(fd, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE)]
        finally:
            os.close(fd)
        if num_bytes:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for at in range(0, num_bytes, mmap.PAGESIZE):
                memory[at] = 1
            self._parts.append(memory)

    def close(self) -> None:
        for part in self._parts:
            part.close()
