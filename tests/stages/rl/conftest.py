import torch

from stages.engines.vllm_start import hide_broken_packages

hide_broken_packages()  # before a test module imports transformers
torch.set_num_threads(1)
