from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.parse import (
    SEPARATOR,
    JobState,
    NodeState,
    expand_nodes,
    parse_duration,
    parse_jobs,
    parse_jobs_json,
    parse_nodes,
)

SAMPLES = Path(__file__).parent / "samples"
NOW = 1796008385.0
"""When the samples were taken."""
ODD_NAME = f"a|b {SEPARATOR} 'ü"


def sample(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


def line(*fields: str) -> str:
    return SEPARATOR.join(fields)


HEADER = line("JOBID", "STATE", "REASON", "NODELIST", "EXEC_HOST", "TIME_LEFT", "NAME")


def test_the_text_of_a_real_queue() -> None:
    jobs = parse_jobs(sample("squeue.txt"))
    assert len(jobs) == 9
    assert jobs["44033302"] == JobState(
        id="44033302", state="RUNNING", nodes=("n1", "n2"), batch_host="n1", time_left_s=31535980, name="wrap"
    )
    assert jobs["44033304"] == JobState(
        id="44033304", state="PENDING", reason="JobHeldUser", time_left_s=300, name="wrap"
    )
    assert jobs["44033303_2"] == JobState(id="44033303_2", state="PENDING", reason="BeginTime", name=ODD_NAME)
    assert [id for id, job in jobs.items() if job.is_held] == ["44033304", "44033307"]
    assert {id: job.state for id, job in jobs.items() if job.is_ended} == {
        "44033305": "FAILED",
        "44033306": "CANCELLED",
    }


def test_the_json_of_the_same_queue_says_the_same() -> None:
    jobs, text = parse_jobs_json(sample("squeue_22_05.json"), NOW), parse_jobs(sample("squeue.txt"))
    assert jobs.pop("44033303_[0-3%2]").name == ODD_NAME  # squeue's JSON does not spread arrays
    assert jobs.keys() == {id for id in text if "_" not in id}
    assert jobs["44033302"].restarts == 1
    for id, job in jobs.items():
        said = text[id]
        assert (job.state, job.nodes, job.batch_host, job.name) == (said.state, said.nodes, said.batch_host, said.name)
        assert (job.reason, job.is_held, job.is_ended) == (said.reason, said.is_held, said.is_ended)
        assert job.time_left_s == said.time_left_s


def test_the_shapes_of_newer_versions() -> None:
    jobs = parse_jobs_json(sample("squeue_23_11.json"), 1796008385)
    assert jobs["17"] == JobState(
        id="17",
        state="RUNNING",
        nodes=("n1", "n2", "n07"),
        batch_host="n1",
        time_left_s=540,
        name="run one",
        restarts=2,
    )
    completing, waiting, held = jobs["18_3"], jobs["18_[4-9%2]"], jobs["22"]
    assert (completing.state, completing.is_completing, completing.is_ended) == ("CANCELLED", True, False)
    assert (waiting.state, waiting.time_left_s, waiting.is_held) == ("PENDING", 3600, False)
    assert (held.reason, held.is_held, held.time_left_s) == ("launch failed requeued held", True, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "squeue: the site's cache is being rebuilt\n",
        f"{HEADER}\nno job\n",
        f"{HEADER}\n{line('17', 'RUNNING', 'None')}\n",
    ],
)
def test_no_answer_is_not_an_empty_queue(text: str) -> None:
    with pytest.raises(ValueError, match="not a "):
        parse_jobs(text)
    assert parse_jobs(f"{HEADER}\n") == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"jobs": [], "errors": [{"error": "Unable to contact slurm controller"}]}',
        '{"meta": {}}',
        '{"jobs": [{"job_id": 1}]}',
        '{"jobs": [{"job_id": 1, "job_state": []}]}',
    ],
)
def test_no_answer_in_json_is_not_an_empty_queue(text: str) -> None:
    with pytest.raises(ValueError, match="not "):
        parse_jobs_json(text, NOW)
    assert parse_jobs_json('{"jobs": [], "errors": []}', NOW) == {}


@given(st.text(st.characters(blacklist_characters="\n\r", blacklist_categories=("Cs",))))
def test_a_name_may_hold_anything(name: str) -> None:
    text = "\n".join([HEADER, line("7", "RUNNING", "None", "n1", "n1", "1:00", name), "second line"])
    assert parse_jobs(f"{text}\n")["7"].name == f"{name}\nsecond line"


@pytest.mark.parametrize(
    ("state", "reason", "is_ended", "is_held"),
    [
        ("PENDING", "Priority", False, False),
        ("PENDING", "launch failed requeued held", False, True),
        ("PENDING", "JobHoldMaxRequeue", False, True),
        ("REQUEUE_HOLD", "None", False, True),
        ("COMPLETING", "None", False, False),
        ("SUSPENDED", "None", False, False),
        ("PREEMPTED", "None", True, False),
        ("NODE_FAIL", "None", True, False),
        ("OUT_OF_MEMORY", "None", True, False),
    ],
)
def test_what_a_state_means(state: str, reason: str, is_ended: bool, is_held: bool) -> None:
    job = parse_jobs(f"{HEADER}\n{line('7', state, reason, 'n1', 'n1', '1:00', '')}\n")["7"]
    assert (job.is_ended, job.is_held) == (is_ended, is_held)


def test_nodes() -> None:
    lines = [
        line("NODELIST", "STATE", "REASON"),
        line("n1", "mixed", "none"),
        line("n1", "mixed", "none"),
        line("n2", "idle*", "none"),
        line("n3", "down*+", "Not responding"),
        line("n4", "draining", "disk is bad"),
        line("n5", "idle~", "none"),
    ]
    nodes = parse_nodes("\n".join(lines) + "\n")
    assert nodes["n1"] == NodeState(name="n1", state="mixed")
    assert nodes["n3"] == NodeState(name="n3", state="down", is_answering=False, reason="Not responding")
    assert nodes["n4"] == NodeState(name="n4", state="draining", reason="disk is bad")
    assert [node.name for node in nodes.values() if node.is_usable] == ["n1", "n5"]
    for wrong in ("", "n1\n", f"{lines[0]}\nn1 idle\n"):
        with pytest.raises(ValueError, match="not a "):
            parse_nodes(wrong)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:00", 0),
        ("5:00", 300),
        ("1:00:01", 3601),
        ("2-03:04:05", 183845),
        ("364-23:59:40", 31535980),
        *((word, None) for word in ("UNLIMITED", "INVALID", "NOT_SET", "N/A", "")),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", ()),
        ("n1", ("n1",)),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("n[08-10,2],login", ("n08", "n09", "n10", "n2", "login")),
        ("rack[1-2]-n[1,3]-ib", ("rack1-n1-ib", "rack1-n3-ib", "rack2-n1-ib", "rack2-n3-ib")),
    ],
)
def test_lists_of_nodes(text: str, nodes: tuple[str, ...]) -> None:
    assert expand_nodes(text) == nodes
