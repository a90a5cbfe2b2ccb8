"""What a run leaves behind: checkpoints, evaluations, rows for those who track it."""

from pydantic import Field

from pipeline.config_types import Int, Paths, Section


class Checkpoint(Section):
    uri: str = Field(default="", description="Any fsspec URL; empty: the run folder's checkpoints/")
    save_freq: Int = Field(default=10, ge=1, description="Steps between checkpoints; the last step is always saved")
    keep: Int = Field(default=2, ge=1, description="So many are kept, the newest ones")


class Evaluate(Section):
    freq: Int = Field(
        default=0, ge=0, description="Steps between evaluations; 0: never. Also before the first step and at the end"
    )
    num_prompts: Int = Field(default=256, ge=1, description="The first so many of data.val_files")
    samples: Int = Field(default=1, ge=1, description="Responses per prompt")
    seed: Int = Field(default=1, ge=0, description="Of the sampled answers, the same at each evaluation")
    function: str = Field(
        default="", description="module:name of compute_score(data_source, solution_str, ground_truth, extra_info)"
    )


class Tracking(Section):
    uri: str = Field(
        default="",
        description="MLflow URI; empty: MLFLOW_TRACKING_URI, else the run folder's mlflow.db; `none`: no MLflow",
    )
    experiment: str = Field(default="pivot-pipeline", min_length=1, description="MLflow experiment of the run")
    also: Paths = Field(
        default=[],
        description="Own sinks beside MLflow: module:name or path/to/file.py:name of what has start, log and close",
    )
