"""What only the site knows of a configuration, asked before a run is begun: Slurm's partitions, the judge's server."""

import difflib
import shutil
import socket
from urllib.parse import urlsplit

from pipeline.config import Config
from pipeline.core.errors import ConfigError, SlurmError

_ASK_S = 3.0


def check_site(config: Config, *, in_allocation: bool = False) -> list[str]:
    """What could not be asked from here. Raises ConfigError where there is no Slurm, or no such partition, or where
    nobody listens at the judge's address."""
    notes = [*_of_slurm(config, in_allocation)] if config.cluster.kind == "slurm" else []
    genrm = config.reward.genrm
    if genrm is not None and genrm.endpoint is not None:
        if config.cluster.kind == "local":
            _check_listens(genrm.endpoint.url)
        else:
            notes.append(f"whether the nodes reach {genrm.endpoint.url} (reward.genrm.endpoint.url) is not known here")
    return notes


def _of_slurm(config: Config, in_allocation: bool) -> list[str]:
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        raise ConfigError(
            "cluster.kind is slurm, but there is no Slurm here (no sbatch and sinfo on the PATH): submit on a login "
            "node, or here with --cluster local"
        )
    if in_allocation:
        return []
    from slurm.commands import Clients

    try:
        known = Clients(timeout_s=10.0, tries=1).partitions(hidden=True)
    except SlurmError as error:
        return [f"Slurm does not answer, so its partitions are not known: {str(error).splitlines()[0]}"]
    for name in filter(None, config.cluster.slurm.partition.split(",")):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(
                f"cluster.slurm.partition: Slurm has no partition {name!r}{hint}; valid: {', '.join(known) or 'none'} "
                "(sinfo shows them)"
            )
    return []


def _check_listens(url: str) -> None:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), _ASK_S).close()
    except OSError as error:
        raise ConfigError(
            f"reward.genrm.endpoint.url: nobody listens at {parts.hostname}:{port} ({error.strerror or error}): start "
            f"the judge's server first; curl {url}/models says whether it is up"
        ) from None
