"""The rows of a run in Weights & Biases too: `pip install wandb`, `wandb login`; tracking.also names the class."""


class Wandb:
    def start(self, run):
        import wandb

        self.run = wandb.init(
            project=run.config["tracking"]["experiment"],
            name=run.name,
            id=run.id,  # an attempt that goes on is the same run there
            resume="allow",
            config=run.config,
            dir=f"{run.folder}/cache",
        )

    def log(self, step, metrics):
        self.run.log(metrics, step=step)  # a step that it has already is ignored there

    def close(self, status):
        self.run.finish(exit_code=0 if status == "done" else 1)
