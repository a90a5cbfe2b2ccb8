"""Starts a run's controller as the command line does, prints its pid, and waits to be killed.

python -m tests.slurm.caller RUN_FOLDER detached|attached
"""

import sys
import threading
from pathlib import Path

from pipeline.run_folder import RunFolder
from slurm.local import start_controller

if __name__ == "__main__":
    process = start_controller(RunFolder(Path(sys.argv[1])), sys.argv[2] == "detached")
    print(process.pid, flush=True)
    threading.Event().wait()
