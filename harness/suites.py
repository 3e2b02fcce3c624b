"""Problems beyond the paper's sweep: what models ask of attention, by family.

A shape is its model's published configuration (heads, key heads, head_dim); batches and lengths are what it
is trained or served with. `source` says where the configuration is published: a paper by its arXiv number, or
the model whose `config.json` it is. A causal mask is aligned at the bottom right.
"""

from dataclasses import dataclass

from harness.sweep import LENGTHS, sweep_problem
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device.limits import HEAD_DIMS


@dataclass(frozen=True)
class ModelProblem:
    """A problem that a model has, and where its shape is from."""

    family: str
    name: str
    source: str
    problem: Problem


def _family(family: str, source: str, *shapes: tuple) -> list[ModelProblem]:
    """`shapes`: a name, then batch, heads, key heads, queries, keys, head_dim, causal."""
    return [ModelProblem(family, name, source, Problem(*shape)) for name, *shape in shapes]


MODELS = [
    *_family(
        "Llama 3",
        "arXiv 2407.21783, table 3",
        ("8B, 2k", 4, 32, 8, 2048, 2048, 128, True),
        ("8B, 8k", 1, 32, 8, 8192, 8192, 128, True),
        ("8B, 64k", 1, 32, 8, 65536, 65536, 128, True),
        ("8B, 128k", 1, 32, 8, 131072, 131072, 128, True),
        ("70B, 4k", 1, 64, 8, 4096, 4096, 128, True),
        ("70B, 8k", 1, 64, 8, 8192, 8192, 128, True),
    ),
    *_family(
        "Llama 3, one of 8 GPUs",
        "arXiv 2407.21783, heads divided by 8",
        ("70B, 2k", 1, 8, 1, 2048, 2048, 128, True),
        ("70B, 8k", 1, 8, 1, 8192, 8192, 128, True),
        ("8B, 8k", 1, 4, 1, 8192, 8192, 128, True),
        ("405B, 8k", 1, 16, 1, 8192, 8192, 128, True),
    ),
    *_family(
        "Qwen 2.5",
        "arXiv 2412.15115, table 1",
        ("0.5B, 4k", 2, 14, 2, 4096, 4096, 64, True),
        ("0.5B, 1k", 8, 14, 2, 1024, 1024, 64, True),
        ("7B, 4k", 2, 28, 4, 4096, 4096, 128, True),
        ("7B, 32k", 1, 28, 4, 32768, 32768, 128, True),
    ),
    *_family(
        "Mistral and MQA",
        "arXiv 2310.06825, table 1; multi-query as in arXiv 2305.06161",
        ("Mistral 7B, 1k", 8, 32, 8, 1024, 1024, 128, True),
        ("Mistral 7B, 16k", 1, 32, 8, 16384, 16384, 128, True),
        ("16 heads on one, 4k", 1, 16, 1, 4096, 4096, 128, True),
        ("StarCoder 15B, 2k", 1, 48, 1, 2048, 2048, 128, True),
    ),
    *_family(
        "Gemma",
        "arXiv 2403.08295, 2408.00118 and 2503.19786, table 1",
        ("2B, 8k", 1, 8, 1, 8192, 8192, 256, True),
        ("2 9B, 4k", 1, 16, 8, 4096, 4096, 256, True),
        ("3 4B, 8k", 1, 8, 4, 8192, 8192, 256, True),
        ("3 12B, 2k", 2, 16, 8, 2048, 2048, 256, True),
    ),
    *_family(
        "GPT-2 and GPT-3",
        "config.json of openai-community/gpt2 and gpt2-xl; arXiv 2005.14165, table 2.1",
        ("small, 1k", 8, 12, 12, 1024, 1024, 64, True),
        ("XL, 1k", 4, 25, 25, 1024, 1024, 64, True),
        ("8 heads of 128, 1k", 1, 8, 8, 1024, 1024, 128, True),
        ("GPT-3 13B, 2k", 2, 40, 40, 2048, 2048, 128, True),
    ),
    *_family(
        "BERT",
        "arXiv 1810.04805",
        ("base, 128", 256, 12, 12, 128, 128, 64, False),
        ("base, 512", 32, 12, 12, 512, 512, 64, False),
        ("large, 384", 24, 16, 16, 384, 384, 64, False),
    ),
    *_family(
        "ViT and DINOv2",
        "arXiv 2010.11929, table 1; 2304.07193, table 17",
        ("B/16, 197 tokens", 64, 12, 12, 197, 197, 64, False),
        ("L/16, 577 tokens", 16, 16, 16, 577, 577, 64, False),
        ("g/14, 257 tokens", 32, 24, 24, 257, 257, 64, False),
        ("L/14, 1025 tokens", 8, 16, 16, 1025, 1025, 64, False),
    ),
    *_family(
        "windows",
        "arXiv 2103.14030 (7×7, here with head_dim 64) and 2304.02643 (14×14)",
        ("7×7", 2048, 4, 4, 49, 49, 64, False),
        ("14×14, SAM B", 200, 12, 12, 196, 196, 64, False),
    ),
    *_family(
        "Stable Diffusion XL",
        "arXiv 2307.01952; unet/config.json of stabilityai/stable-diffusion-xl-base-1.0",
        ("4096 tokens", 8, 10, 10, 4096, 4096, 64, False),
        ("1024 tokens", 8, 20, 20, 1024, 1024, 64, False),
        ("text, 4096 × 77", 8, 10, 10, 4096, 77, 64, False),
        ("text, 1024 × 77", 8, 20, 20, 1024, 77, 64, False),
    ),
    *_family(
        "Flux and video",
        "config.json of black-forest-labs/FLUX.1-dev, tencent/HunyuanVideo, Wan-AI/Wan2.1-T2V-1.3B",
        ("Flux, 4608 tokens", 1, 24, 24, 4608, 4608, 128, False),
        ("Flux, 1536 tokens", 1, 24, 24, 1536, 1536, 128, False),
        ("Wan 1.3B, 32760 tokens", 1, 12, 12, 32760, 32760, 128, False),
        ("Hunyuan, 32760 tokens", 1, 24, 24, 32760, 32760, 128, False),
    ),
    *_family(
        "Whisper",
        "arXiv 2212.04356, table 1",
        ("large, 1500 tokens", 4, 20, 20, 1500, 1500, 64, False),
        ("small, 1500 tokens", 1, 12, 12, 1500, 1500, 64, False),
        ("large, 448 × 1500", 4, 20, 20, 448, 1500, 64, False),
        ("small, 448 × 1500", 1, 12, 12, 448, 1500, 64, False),
    ),
    *_family(
        "chunked prefill",
        "arXiv 2308.16369, of Llama 3 8B",
        ("512 × 8k", 1, 32, 8, 512, 8192, 128, True),
        ("2k × 8k", 1, 32, 8, 2048, 8192, 128, True),
        ("512 × 32k", 1, 32, 8, 512, 32768, 128, True),
        ("2k × 32k", 1, 32, 8, 2048, 32768, 128, True),
    ),
    *_family(
        "batch 1, few heads",
        "shares of the above: 4 and 8 heads a GPU",
        ("8 heads, 512", 1, 8, 8, 512, 512, 128, True),
        ("8 heads, 2k", 1, 8, 8, 2048, 2048, 128, True),
        ("4 heads, 4k", 1, 4, 4, 4096, 4096, 128, False),
        ("8 heads of 64, 1k", 1, 8, 8, 1024, 1024, 64, True),
        ("8:1, 512 × 8k", 1, 8, 1, 512, 8192, 128, True),
    ),
]

LONGEST = 2048  # from there on every height of a tile has tiles enough, and k6's own is the best
SWEEP = [  # to hold the library's choices against; `bench.py` without a suite has the published rows
    ModelProblem("the sweep", f"N = {n}, head_dim {d}, {mask}", "arXiv 2307.08691, section 4.1", problem)
    for d in HEAD_DIMS
    for mask in ("full", "causal")
    for n in LENGTHS
    if (problem := sweep_problem(n, d, mask == "causal")).seqlen_q <= LONGEST
]

FEW = [  # queries beside many keys, without a cache of their own: as SDPA is called while a model generates
    *_family(
        "one query",
        "Llama 3 8B, and one of 8 GPUs of 70B; Llama 2 7B; Gemma 3 4B; GPT-2",
        ("8B, 2k", 1, 32, 8, 1, 2048, 128, False),
        ("8B, 8k", 1, 32, 8, 1, 8192, 128, False),
        ("8B, 32k", 1, 32, 8, 1, 32768, 128, False),
        ("8B, 8 × 4k", 8, 32, 8, 1, 4096, 128, False),
        ("8B, 64 × 2k", 64, 32, 8, 1, 2048, 128, False),
        ("70B, 32k", 1, 8, 1, 1, 32768, 128, False),
        ("7B, 4 × 4k", 4, 32, 32, 1, 4096, 128, False),
        ("4B, 4 × 8k", 4, 8, 4, 1, 8192, 256, False),
        ("small, 16 × 1k", 16, 12, 12, 1, 1024, 64, False),
    ),
    *_family(
        "some tokens ahead",
        "arXiv 2211.17192, of Llama 3 8B and GPT-2",
        ("4 × 8k", 1, 32, 8, 4, 8192, 128, True),
        ("4 × 8k, 8 of them", 8, 32, 8, 4, 8192, 128, True),
        ("8 × 32k", 1, 32, 8, 8, 32768, 128, True),
        ("8 × 32k, one of 8 GPUs", 1, 8, 1, 8, 32768, 128, True),
        ("5 × 1k of GPT-2, 16 of them", 16, 12, 12, 5, 1024, 64, True),
    ),
    *_family(
        "short chunks",
        "arXiv 2308.16369, of Llama 3 8B, and one of 8 GPUs of 70B",
        ("16 × 8k", 1, 32, 8, 16, 8192, 128, True),
        ("32 × 32k, 8 of them", 8, 32, 8, 32, 32768, 128, True),
        ("64 × 8k", 1, 32, 8, 64, 8192, 128, True),
        ("64 × 32k", 1, 32, 8, 64, 32768, 128, True),
        ("128 × 4k", 1, 32, 8, 128, 4096, 128, True),
        ("64 × 32k, one of 8 GPUs", 1, 8, 1, 64, 32768, 128, True),
    ),
]

SUITES = {"models": MODELS, "sweep": SWEEP, "few": FEW}
