"""The beginnings for kinds of sites: each is a configuration, and Slurm takes the script that comes of it."""

from pathlib import Path

import pytest

from pipeline.config import load_files
from pipeline.run_folder import RunFolder
from slurm.allocation import script
from tests.cluster import SlurmCluster
from tests.scenarios.runs import ROOT

pytestmark = pytest.mark.slurm
SITES = sorted((ROOT / "configs/slurm").glob("*.yaml"))
HERE = ("cluster.slurm.partition=main", "cluster.nodes=2", "cluster.slots_per_node=4", "cluster.slurm.cpus_per_slot=1")


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.stem)
def test_slurm_takes_the_script_of_each_site(cluster: SlurmCluster, folder: Path, site: Path) -> None:
    config = load_files([str(ROOT / "configs/emulated.yaml"), str(site)], HERE)
    text = script(RunFolder(folder / "r"), config)
    path = folder / "job.sh"
    path.write_text(text)
    cluster.client("sbatch", "--test-only", str(path))
    for wanted in (*config.cluster.slurm.setup, config.cluster.slurm.container):
        assert wanted in text


def test_there_is_one_for_each_kind() -> None:
    assert {site.stem for site in SITES} == {"container", "gpu_partition", "modules", "preemptible", "whole_nodes"}
