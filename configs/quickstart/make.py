"""Make the quickstart's models and data: `python configs/quickstart/make.py [--out DIR]` (a few minutes on one core).

Writes `policy/` and `genrm/` (two Qwen3 of 114k parameters with their tokenizer), `train.jsonl` and `val.jsonl`. The
GenRM learns to recompute an answer before it judges it; the policy learns from a demonstrator who is wrong half of the
time, so that sampled answers leave room for RL. Both are trained by SFT, with Muon on the hidden matrices and AdamW on
the rest.

Everything is seeded and runs on one thread: the same seeds on the same machine give the same bytes. The script ends
with the figures that matter for RL, measured on held-out problems, as one JSON line, and fails if one is off target.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import task
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from torch.optim.lr_scheduler import LambdaLR

# vLLM's CPU package may bring builds of these that do not match torch, and transformers then fails to import.
for package in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # None: "not installed"
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

HERE = Path(__file__).resolve().parent

# ------------------------------------------------------------------------------------------------ tokenizer and model
PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
WORDS = [" Answer: ", " Check: ", " Verdict: ", "right", "wrong"]  # one token each: a verdict costs two decode steps
# The template writes bos itself: tokenize its output without adding special tokens.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character plus a few words; `decode(encode(text)) == text`."""
    vocabulary = {token: number for number, token in enumerate(SPECIAL_TOKENS + CHARACTERS)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<|unk|>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        unk_token="<|unk|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def build_model(vocab_size: int, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 113,856 parameters. Head size 32 is the smallest that vLLM's CPU kernels take."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.04,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # sequences have some 100 tokens at most
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    return model


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model folder that transformers and vLLM load; tokenizer.json without indentation."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), separators=(",", ":")) + "\n")


# ------------------------------------------------------------------------------------------------ training examples
Example = tuple[str, str]  # (user message, assistant message)
JUDGE_TEMPLATE = ImmutableSandboxedEnvironment().from_string((HERE / "judge.jinja").read_text())


def judge_prompt(problem: str, response: str) -> str:
    """The judge's user message, from the template which the pipeline renders too."""
    return JUDGE_TEMPLATE.render(prompt=problem, response=response)


def genrm_examples(rng: random.Random) -> Iterator[Example]:
    """Answers (45 % right) with their critiques, endless."""
    while True:
        problem = task.draw_problem(rng, held_out=False)
        answer = task.solve(problem) if rng.random() < 0.45 else task.wrong_answer(problem, rng)
        yield judge_prompt(problem, answer), task.critique(problem, answer)


def policy_examples(rng: random.Random) -> Iterator[Example]:
    """Problems with a sloppy demonstrator's responses, endless."""
    while True:
        problem = task.draw_problem(rng, held_out=False)
        yield problem, task.demonstrate(problem, rng, error_rate=0.5)


# ------------------------------------------------------------------------------------------------ supervised training
BATCH_SIZE = 32
WARMUP_STEPS = 30


def lr_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, flat to the half, then linear decay to 3 %."""
    progress = step / num_steps
    decay = 1.0 if progress < 0.5 else max(0.03, 2.0 * (1.0 - progress))
    return min(1.0, (step + 1) / WARMUP_STEPS) * decay


def build_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the (tied) embedding and the norms."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def encode_chat(tokenizer: PreTrainedTokenizerFast, user: str) -> list[int]:
    """Token ids of a one-message chat, up to where the assistant begins."""
    chat = [{"role": "user", "content": user}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def encode_batch(
    tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded input ids, attention mask and labels (-100 on prompt and padding), each [num_examples, length]."""
    prompts = [encode_chat(tokenizer, user) for user, _ in examples]
    answers = [[*tokenizer.encode(answer, add_special_tokens=False), EOS] for _, answer in examples]
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(examples), length), PAD)
    attended = torch.zeros(len(examples), length, dtype=torch.long)
    labels = torch.full((len(examples), length), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        attended[row, :end] = 1
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, attended, labels


def train(
    name: str,
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: Iterator[Example],
    num_steps: int,
) -> None:
    """SFT on `num_steps` fresh batches; the loss is the mean over answer tokens."""
    optimizers = build_optimizers(model)
    schedules = [LambdaLR(optimizer, lambda step: lr_factor(step, num_steps)) for optimizer in optimizers]
    model.train()
    started, losses = time.monotonic(), []
    for step in range(1, num_steps + 1):
        ids, attended, labels = encode_batch(tokenizer, [next(examples) for _ in range(BATCH_SIZE)])
        loss = model(input_ids=ids, attention_mask=attended, labels=labels, use_cache=False).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in (*optimizers, *schedules):
            stepper.step()
        losses.append(loss.item())
        if step % 50 == 0:
            loss_of_50, seconds = sum(losses[-50:]) / 50, time.monotonic() - started
            print(f"{name} step {step}/{num_steps} loss {loss_of_50:.4f} {seconds:.0f} s", flush=True)
    model.eval()


# ------------------------------------------------------------------------------------------------ figures
@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One generated text; `is_finished` means that it ended with eos."""

    text: str
    num_tokens: int
    is_finished: bool


@torch.no_grad()
def generate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, users: Sequence[str], *, max_tokens: int, greedy: bool
) -> list[Response]:
    """One response per user message, at temperature 1 over the whole vocabulary or greedy."""
    batch = tokenizer.pad({"input_ids": [encode_chat(tokenizer, user) for user in users]}, return_tensors="pt")
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output = model.generate(**batch, max_new_tokens=max_tokens, **sampling)
    responses = []
    for ids in output[:, batch["input_ids"].shape[1] :].tolist():
        is_finished = EOS in ids
        num_tokens = ids.index(EOS) if is_finished else len(ids)
        text = tokenizer.decode(ids[:num_tokens])
        responses.append(Response(text=text, num_tokens=num_tokens, is_finished=is_finished))
    return responses


def measure_verdicts(
    genrm: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[str], responses: Sequence[str]
) -> dict[str, float]:
    """Accuracy of the GenRM's greedy verdicts, and its rates of false positives, false negatives, unparsable texts."""
    prompts = [judge_prompt(p, r) for p, r in zip(problems, responses, strict=True)]
    critiques = generate(genrm, tokenizer, prompts, max_tokens=40, greedy=True)
    verdicts = [task.parse_verdict(c.text) for c in critiques]
    is_right = [task.final_answer(r) == task.solve(p) for p, r in zip(problems, responses, strict=True)]
    on_wrong = [v == 1.0 for v, right in zip(verdicts, is_right, strict=True) if not right]
    on_right = [v != 1.0 for v, right in zip(verdicts, is_right, strict=True) if right]
    return {
        "accuracy": 1.0 - (sum(on_wrong) + sum(on_right)) / len(verdicts),
        "false_positive": mean(on_wrong),
        "false_negative": mean(on_right),
        "unparsable": mean([v is None for v in verdicts]),
    }


def measure_genrm(genrm: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, num_problems: int) -> dict[str, float]:
    """Verdicts on fresh held-out problems with synthetic answers, half of them right."""
    rng = random.Random("genrm figures")
    problems = [task.draw_problem(rng, held_out=True) for _ in range(num_problems)]
    answers = [task.solve(p) if rng.random() < 0.5 else task.wrong_answer(p, rng) for p in problems]
    return measure_verdicts(genrm, tokenizer, problems, answers)


def measure_policy(
    policy: Qwen3ForCausalLM, genrm: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """The policy's accuracy and lengths on held-out problems, and the GenRM's verdicts on its finished responses."""
    torch.manual_seed(0)
    responses = generate(policy, tokenizer, problems, max_tokens=84, greedy=False)
    greedy = generate(policy, tokenizer, problems, max_tokens=84, greedy=True)
    finished = [(p, r.text) for p, r in zip(problems, responses, strict=True) if r.is_finished]
    lengths = sorted(r.num_tokens for r in responses)
    figures = {
        "sampled_accuracy": accuracy(problems, responses),
        "greedy_accuracy": accuracy(problems, greedy),
        "finished": len(finished) / len(problems),
        "tokens_p50": lengths[len(lengths) // 2],
        "tokens_p90": lengths[len(lengths) * 9 // 10],
        "tokens_max": lengths[-1],
    }
    return figures, measure_verdicts(genrm, tokenizer, *zip(*finished, strict=True))


def accuracy(problems: Sequence[str], responses: Sequence[Response]) -> float:
    """Share of responses that ended and whose final answer is right."""
    return mean(
        [r.is_finished and task.final_answer(r.text) == task.solve(p) for p, r in zip(problems, responses, strict=True)]
    )


def mean(flags: Sequence[bool]) -> float:
    """Share of true flags; 0.0 of none."""
    return sum(flags) / len(flags) if flags else 0.0


def missed_targets(figures: dict[str, dict[str, float]]) -> list[str]:
    """What makes these models unfit for the quickstart, in words."""
    checks = {
        "the policy's sampled accuracy is outside .25 to .35": 0.25 <= figures["policy"]["sampled_accuracy"] <= 0.35,
        "the GenRM's accuracy is below .97": figures["genrm"]["accuracy"] >= 0.97,
        "the GenRM passes more than .07 of the policy's wrong answers": figures["judged"]["false_positive"] <= 0.07,
    }
    return [sentence for sentence, is_met in checks.items() if not is_met]


# ------------------------------------------------------------------------------------------------ data
def draw_distinct(rng: random.Random, num_problems: int, *, held_out: bool) -> list[str]:
    """Distinct problems in the order drawn; short ones run out first, so lengths lean a little to the long."""
    problems: dict[str, None] = {}
    while len(problems) < num_problems:
        problems[task.draw_problem(rng, held_out=held_out)] = None
    return list(problems)


def write_rows(file: Path, problems: Sequence[str]) -> None:
    """One row of verl's schema per problem."""
    rows = [
        {
            "data_source": "digit_sort",
            "prompt": [{"role": "user", "content": problem}],
            "reward_model": {"style": "rule", "ground_truth": task.solve(problem)},
        }
        for problem in problems
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ------------------------------------------------------------------------------------------------ command line
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    out: Path
    genrm_seed: int
    policy_seed: int
    data_seed: int
    genrm_steps: int
    policy_steps: int


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Options from the command line; the defaults made the committed files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to (default: beside this script)")
    parser.add_argument("--genrm-seed", type=int, default=0)
    parser.add_argument("--policy-seed", type=int, default=100)
    parser.add_argument("--data-seed", type=int, default=0)
    parser.add_argument("--genrm-steps", type=int, default=1800)
    parser.add_argument("--policy-steps", type=int, default=400)
    return Options(**vars(parser.parse_args(argv)))


def main() -> int:
    """Write everything, print the figures; the exit code is 1 if a target is missed."""
    options = parse_options()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    data_rng = random.Random(options.data_seed)
    validation = draw_distinct(data_rng, 512, held_out=True)
    write_rows(options.out / "train.jsonl", draw_distinct(data_rng, 4000, held_out=False))
    write_rows(options.out / "val.jsonl", validation)

    tokenizer = build_tokenizer()
    genrm = build_model(len(tokenizer), options.genrm_seed)
    train("genrm", genrm, tokenizer, genrm_examples(random.Random(options.genrm_seed)), options.genrm_steps)
    save(genrm, tokenizer, options.out / "genrm")
    policy = build_model(len(tokenizer), options.policy_seed)
    train("policy", policy, tokenizer, policy_examples(random.Random(options.policy_seed)), options.policy_steps)
    save(policy, tokenizer, options.out / "policy")

    on_policy, judged = measure_policy(policy, genrm, tokenizer, validation * 4)
    figures = {"genrm": measure_genrm(genrm, tokenizer, 2048), "policy": on_policy, "judged": judged}
    print(json.dumps({"options": asdict(options) | {"out": str(options.out)}, **figures}))
    missed = missed_targets(figures)
    for sentence in missed:
        print(f"target missed: {sentence}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
