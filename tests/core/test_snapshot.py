"""A snapshot as JSON."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.events import Role
from pipeline.core.iteration import IterationCost
from pipeline.core.snapshot import BlockView, Crowd, RoleView, Snapshot, TrainView

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
COUNTS = st.integers(0, 10**6)
SEVERAL = st.lists(NUMBERS, max_size=4).map(tuple)
ROLES = st.sampled_from(Role)
VIEWS = st.builds(
    RoleView,
    num_slots=COUNTS,
    cost=st.builds(IterationCost, **dict.fromkeys(IterationCost.__dataclass_fields__, NUMBERS)),
    kv_tokens=NUMBERS,
    max_num_seqs=COUNTS,
    prompt_tokens=NUMBERS,
    prefill_tokens=NUMBERS,
    bin_tokens=COUNTS,
    survival=SEVERAL,
    crowds=st.lists(st.builds(Crowd, step=COUNTS, num_waiting=NUMBERS, ages=SEVERAL), max_size=3).map(tuple),
)
BLOCKS = st.builds(
    BlockView,
    index=COUNTS,
    node=COUNTS,
    role=st.none() | ROLES,
    ready_in_s=NUMBERS,
    num_running=COUNTS,
    num_tokens=NUMBERS,
    is_silent=st.booleans(),
)
SNAPSHOTS = st.builds(
    Snapshot,
    at_s=NUMBERS,
    version=COUNTS,
    staleness=COUNTS,
    num_sequences=COUNTS,
    num_admitted=COUNTS,
    num_steps=COUNTS,
    blocks=st.lists(BLOCKS, max_size=3).map(tuple),
    block_slots=COUNTS,
    rollout=VIEWS,
    reward=VIEWS,
    train=st.builds(
        TrainView,
        block_indices=st.lists(COUNTS, max_size=3).map(tuple),
        step_s=NUMBERS,
        is_waiting=st.booleans(),
        left_s=st.none() | NUMBERS,
    ),
    shift_s=st.dictionaries(ROLES, NUMBERS),
    release_s=NUMBERS,
    last_shift_s=st.none() | NUMBERS,
    cycle_s=NUMBERS,
)


@settings(max_examples=100, deadline=None)
@given(SNAPSHOTS)
def test_a_snapshot_goes_through_json_unchanged(snapshot: Snapshot) -> None:
    back = Snapshot.from_json(snapshot.to_json())
    assert back == snapshot and all(isinstance(role, Role) for role in back.shift_s)


@settings(max_examples=5, deadline=None)
@given(SNAPSHOTS)
def test_no_snapshot_with_an_infinite_number_is_written(snapshot: Snapshot) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        replace(snapshot, cycle_s=math.inf).to_json()
