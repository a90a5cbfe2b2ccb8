from pathlib import Path

from pipeline.run_folder import RunFolder


def test_an_attempt_whose_marker_was_removed_is_not_begun_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.create()
    assert [run.begin_attempt(), run.begin_attempt()] == [1, 2]
    for attempt in (1, 2):
        run.attempt_marker(attempt).unlink()
    assert run.attempts() == [1, 2]
    assert run.begin_attempt() == 3
