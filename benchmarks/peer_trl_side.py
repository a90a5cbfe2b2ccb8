"""The other side of peer_trl.py, run by the Python of an environment of its own, which has TRL and not this project.

peer_trl_side.py train MODEL TRAIN OUT JSON     JSON: settings, as peer_trl.py gives them; prints one line of JSON
peer_trl_side.py eval MODEL VAL JSON            accuracy of a model folder, by sampled answers to held-out prompts
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCORES = {
    "digit_sort": lambda answer, truth: float(answer.rsplit(";", 1)[-1] == truth),  # as stages.checkers:digit_sort
    "says_it": lambda answer, truth: float(truth in answer),
}


def rows_of(path: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [{"prompt": row["prompt"], "truth": row["reward_model"]["ground_truth"]} for row in rows]


def train(model: str, data: str, out: str, settings: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOTrainer

    torch.set_num_threads(settings["threads"])
    spent = {"generate": 0.0, "reward": 0.0}
    counted = {"tokens": 0, "tokens_with_gradient": 0, "responses": 0}

    def reward(completions: list[Any], truth: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        started = time.perf_counter()
        counted["tokens"] += sum(map(len, completion_ids))
        counted["responses"] += len(completion_ids)
        pairs = zip(completions, truth, strict=True)
        scores = [SCORES[settings["score"]](said[-1]["content"], wanted) for said, wanted in pairs]
        spent["reward"] += time.perf_counter() - started
        group = settings["group"]
        for first in range(0, len(scores), group):
            if len(set(scores[first : first + group])) > 1:
                counted["tokens_with_gradient"] += sum(map(len, completion_ids[first : first + group]))
        return scores

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            found = super()._generate(*args, **kwargs)
            spent["generate"] += time.perf_counter() - started
            return found

    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=reward,
        args=_config(out, settings),
        train_dataset=Dataset.from_list(rows_of(data)),
    )
    started = time.perf_counter()
    trainer.train()
    wall_s = time.perf_counter() - started
    trainer.save_model(out)
    return {"wall_s": wall_s, "spent_s": spent, **counted}


def _config(out: str, settings: dict[str, Any]) -> Any:
    from trl import GRPOConfig

    group, prompts, updates = settings["group"], settings["prompts"], settings["updates"]
    return GRPOConfig(
        output_dir=out,
        per_device_train_batch_size=prompts * group // updates,
        gradient_accumulation_steps=1,
        steps_per_generation=updates,
        num_generations=group,
        max_completion_length=settings["max_tokens"],
        temperature=1.0,
        learning_rate=settings["lr"],
        adam_beta1=0.9,
        adam_beta2=0.95,
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        loss_type="dapo",
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        max_steps=updates * settings["steps"],
        logging_steps=10_000,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=settings["seed"],
        shuffle_dataset=True,
    )


@torch.no_grad()
def evaluate(model: str, data: str, settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(settings["seed"])
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows = rows_of(data)[: settings["num_prompts"]]
    texts = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in rows]
    asked = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    said = policy.generate(**asked, max_new_tokens=settings["max_tokens"], do_sample=True, temperature=1.0, top_k=0)
    answers = tokenizer.batch_decode(said[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    right = sum(SCORES[settings["score"]](answer, row["truth"]) for answer, row in zip(answers, rows, strict=True))
    return {"accuracy": right / len(rows)}


if __name__ == "__main__":
    action, *rest = sys.argv[1:]
    made = train(*rest[:3], json.loads(rest[3])) if action == "train" else evaluate(*rest[:2], json.loads(rest[2]))
    print(json.dumps(made), flush=True)
