"""What the planner would do at a moment of a run that was, or is: costs as measured, or of a kind of GPU."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config import Config
from pipeline.core.core import Core
from pipeline.core.errors import ConfigError
from pipeline.core.events import Event, Role, VersionSealed
from pipeline.core.planner.planner import Plan, decide
from pipeline.core.snapshot import Snapshot
from pipeline.journal import read_journal
from pipeline.simulator.calibrate import calibrated
from pipeline.simulator.forecast import setup_of
from pipeline.simulator.measured import response_lengths, verdict_lengths
from pipeline.simulator.profiles import GPUS, known_model
from pipeline.simulator.replay import Replay
from pipeline.simulator.setup import Measured, Setup, Workload

_TEMPLATE_TOKENS = 30  # of a judge's prompt, beside task and response: small, as the journal does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMoment:
    snapshot: Snapshot
    plan: Plan
    after_s: float
    """Since the attempt began."""
    costs: str
    """Where they come from."""


def gpus_of(config: Config) -> dict[Role, int]:
    roles = config.placement.roles
    return {
        Role.ROLLOUT: roles.rollout.replicas * roles.rollout.slots,
        Role.REWARD: roles.reward.replicas * roles.reward.slots,
        Role.TRAIN: config.trainer.ranks * roles.train.slots,
    }


def look_at_run(
    folder: Path,
    config: Config,
    core: Core,
    journal: Path,
    *,
    is_over: bool,
    gpu: str = "",
    at_s: float | None = None,
    version: int | None = None,
) -> RunMoment:
    """At `at_s` after the attempt began, or when the `version` was published. Neither: at the end of the journal, or of
    a run that is over, when half of the responses of its last whole step were there.

    `gpu`: the costs are those of this kind of GPU; empty: as the run had them. Raises ConfigError where the run does
    not tell enough.
    """
    setup = _profiled(folder, config, gpu) if gpu else _measured(folder, config)
    try:
        replay = Replay(core, setup, gpus_of(config))
        events = list(read_journal(journal))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{folder.name}: {error}") from error
    if not events:
        raise ConfigError(f"{folder.name}: nothing is in its journal yet; ask again in a while")
    begin, end = events[0][0], events[-1][0]
    if at_s is not None and at_s > end - begin:
        raise ConfigError(f"--at {at_s:g}: the attempt is {end - begin:.1f} s old")
    half = _half_of_last(events) if is_over and at_s is None and version is None else None
    now = begin + at_s if at_s is not None else end
    for at, event in events:
        if at_s is not None and at > now:
            break
        try:
            replay.take(at, event)
        except (AssertionError, KeyError) as error:
            raise ConfigError(
                f"{folder.name}: its journal does not fit its config.yaml, or is of another version: "
                f"{type(event).__name__} after {at - begin:.1f} s"
            ) from error
        is_there = version is not None and replay.version >= version
        if is_there or (half is not None and replay.num_closed[half] * 2 >= config.sequences_per_step):
            now = at
            break
    else:
        if version is not None:
            raise ConfigError(f"--version {version}: the attempt has published {replay.version}")
    snapshot = replay.snapshot(now)
    costs = f"as assumed of {gpu.upper()}" if gpu else "as measured in the run"
    plan = decide(snapshot, config.placement.planner.settings())
    return RunMoment(snapshot=snapshot, plan=plan, after_s=now - begin, costs=costs)


def _half_of_last(events: list[tuple[float, Event]]) -> int | None:
    """The last step whose version was published."""
    return max((event.version for _, event in events if isinstance(event, VersionSealed)), default=None)


def _profiled(folder: Path, config: Config, gpu: str) -> Setup:
    return setup_of(config, gpu=gpu, num_gpus=sum(gpus_of(config).values()), lengths=str(folder))


def _measured(folder: Path, config: Config) -> Setup:
    roles = config.placement.roles
    is_plain = config.placement.admission == "barrier" and config.algorithm.staleness == 0
    if not is_plain or roles.rollout.replicas > 1 or roles.reward.replicas > 1:
        raise ConfigError(
            f"{folder.name}: what its engines cost can be read off only where stages do not overlap, with one replica "
            "per role, placement.admission=barrier and algorithm.staleness=0; valid: --gpu, for the costs of a kind"
        )
    try:
        found = calibrated(plain_setup(folder, config), folder)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(
            f"{folder.name}: {_why_not(error, folder)}; valid: later, or --gpu, for the costs of a kind of GPU"
        ) from error
    assert found.measured is not None
    work, most = found.workload, config.rollout.engine.max_num_seqs
    kv_tokens = float(most * (work.mean_prompt_tokens(Role.REWARD) + work.rollout.longest + work.verdict.longest))
    measured = Measured(
        rollout=replace(found.measured.rollout, num_gpus=roles.rollout.slots, kv_tokens=kv_tokens),
        reward=replace(found.measured.reward, num_gpus=roles.reward.slots, kv_tokens=kv_tokens),
        train=found.measured.train,
    )
    try:
        return replace(
            found,
            num_gpus=sum(gpus_of(config).values()),
            rollout_gpus=roles.rollout.slots,
            reward_gpus=roles.reward.slots,
            gpus_per_node=config.cluster.slots_per_node,
            measured=measured,
        )
    except ValueError as error:
        raise ConfigError(f"{folder.name}: {error}") from error


def plain_setup(folder: Path, config: Config) -> Setup:
    """One GPU per role, as `calibrated` wants it. Profile and models do not matter: all costs are measured."""
    try:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise ValueError("a line of its metrics.jsonl is no JSON") from error
    prompts = [row["prompt_length/mean"] for row in rows if "prompt_length/mean" in row]
    if not prompts:
        raise ValueError(f"{folder}: it has no step yet")
    if config.reward.genrm is None:
        raise ValueError("without a judge there is nothing to plan")
    work = Workload(
        num_prompts=config.data.train_batch_size,
        num_each=config.rollout.n,
        rollout=response_lengths(folder, config.rollout.max_response_length),
        verdict=verdict_lengths(folder, config.reward.genrm.max_tokens),
        prompt_tokens=round(prompts[-1]),
        template_tokens=_TEMPLATE_TOKENS,
        shares_prefix=False,
    )
    any_model = known_model("qwen2.5-1.5b")
    return Setup(
        gpu=GPUS["h100"],
        num_gpus=3,
        policy=any_model,
        judge=any_model,
        rollout_gpus=1,
        reward_gpus=1,
        workload=work,
        gpus_per_node=3,
        max_num_seqs=config.rollout.engine.max_num_seqs,
    )


def _why_not(error: Exception, folder: Path) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return f"its metrics lack {error}" if isinstance(error, KeyError) else str(error).removeprefix(f"{folder}: ")
