"""A controller process for tests to kill: one node, one worker; prints their pids, then serves until its end.

python -m tests.slurm.controller RUN_FOLDER
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from pipeline import wire
from tests.slurm.rig import Rig


def main() -> None:
    rig = Rig(Path(sys.argv[1]))
    rig.welcome()
    rig.expect(wire.NodeReady)
    rig.start_worker("rollout-0")
    rig.ready("rollout-0")
    worker = rig.pids["rollout-0"]
    zygote = rig.call("rollout-0", os.getppid)
    print(json.dumps({"agent": rig.agent.pid, "zygote": zygote, "worker": worker}), flush=True)
    rig.runner.run(asyncio.sleep(60))


if __name__ == "__main__":
    main()
