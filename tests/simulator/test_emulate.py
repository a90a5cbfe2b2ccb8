"""A setup as the configuration of a live run: everything fits, and believes what the simulator charges."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pipeline.beliefs import believe
from pipeline.config import Config, load_files
from pipeline.config_room import replicas_of
from pipeline.core.events import INFERENCE, Role
from pipeline.core.modes import ModeName
from pipeline.simulator.admission import Admission
from pipeline.simulator.emulate import Emulation, paper_emulation
from pipeline.simulator.modes import Schedule, shiftable_schedule, static_schedules
from tests.fakes.plan import make_plan


def emulation(group: int = 2, num_gpus: int = 32, **changes: object) -> Emulation:
    emulated = paper_emulation(group, "h800", num_gpus=num_gpus, num_sequences=512)
    return replace(emulated, **changes)  # type: ignore[arg-type]


def config_of(emulated: Emulation, schedule: Schedule, folder: Path) -> Config:
    return load_files([emulated.write(folder, schedule, 9)])


@pytest.mark.parametrize("group", [1, 2, 3])
def test_every_schedule_that_a_run_can_do_is_a_valid_configuration(group: int, tmp_path: Path) -> None:
    emulated = emulation(group)
    schedules = [*static_schedules(emulated.setup), shiftable_schedule(emulated.setup, 16)]
    for schedule in schedules:
        if schedule.admission is Admission.BARRIER:
            continue
        config = config_of(emulated, schedule, tmp_path)
        num = {r.role: r.replicas * r.slots for r in replicas_of(config)}
        assert config.cluster.nodes * config.cluster.slots_per_node == 32
        assert num[Role.TRAIN] == schedule.train
        if schedule.mode is ModeName.DISAGGREGATED:
            assert (num[Role.ROLLOUT], num[Role.REWARD]) == (schedule.rollout, schedule.reward)
        assert config.algorithm.staleness == schedule.staleness


def test_what_no_run_can_do_is_said(tmp_path: Path) -> None:
    barrier = Schedule(mode=ModeName.DISAGGREGATED, rollout=8, reward=8, train=16, admission=Admission.BARRIER)
    with pytest.raises(ValueError, match="as soon as staleness allows it"):
        config_of(emulation(), barrier, tmp_path)


@pytest.mark.parametrize("grain", [1, 16])
def test_a_run_begins_with_the_costs_that_the_simulator_charges(grain: int, tmp_path: Path) -> None:
    emulated = emulation(time_scale=0.25, grain=grain)
    config = config_of(emulated, shiftable_schedule(emulated.setup, 16), tmp_path)
    plan = make_plan(sequences_per_step=512, total_steps=9, staleness=1)
    found = believe(config, plan, at_s=0.0, version=0, train_blocks=(7,), block_slots=4)
    for role in INFERENCE:
        there = emulated.setup.role(role)
        expected = 0.25 * there.iteration.iterations_s(160, 16, 64_000)
        assert found.role(role).cost.iterations_s(160 / grain, 16, 64_000 / grain) == pytest.approx(expected, rel=0.03)
        assert found.role(role).kv_tokens * grain == pytest.approx(there.kv_tokens, rel=0.01)


def test_prompts_are_as_long_as_the_setup_says(tmp_path: Path) -> None:
    from stages.text import ByteTokenizer

    emulated = emulation(grain=8)
    emulated.write_prompts(tmp_path / "p.jsonl", num=3)
    prompts = [yaml.safe_load(line)["prompt"] for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    lengths = [len(ByteTokenizer().encode_chat(prompt)) for prompt in prompts]
    assert lengths == pytest.approx([300 / 8] * 3, abs=2) and len({str(p) for p in prompts}) == 3


def test_what_a_configuration_cannot_say_is_not_compared() -> None:
    emulated = emulation(time_scale=0.125)
    assert emulated.comparable.max_prefill_backlog_s == pytest.approx(8.0)
    assert emulated.comparable.workload.correlation == 0.0 and not emulated.comparable.workload.shares_prefix
