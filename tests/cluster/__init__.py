"""A real Slurm for tests and benchmarks: `SlurmCluster`, and `require` where there may be none."""

from tests.cluster.cluster import ClusterError, SlurmCluster
from tests.cluster.packages import require

__all__ = ["ClusterError", "SlurmCluster", "require"]
