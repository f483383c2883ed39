"""One optimizer step over the 135M parameter set, ours beside torch.optim.Muon (which always works in bf16), paired.

    pytest -m benchmark tests/bench_muon.py -s          SHOHIN_BENCH_LAYERS=3 for a tenth of it

What wins depends on the processor. With bf16 instructions (AVX512_BF16, AMX) a bf16 product costs a fifth of an fp32
one, so our fp32 default is the slower one there and `ns_dtype="bfloat16"` is as quick as PyTorch's. Without them bf16 is
emulated. To see that on any x86 machine: ONEDNN_MAX_CPU_ISA=AVX512_CORE or AVX2 in the environment."""
import os
import statistics
import time

import pytest
import torch

from shohin.model import GPT, GPTConfig
from shohin.muon import Muon, split_params

LAYERS = int(os.environ.get("SHOHIN_BENCH_LAYERS", 30))


def matrices():
    model = GPT(GPTConfig.shohin_135m(n_layer=LAYERS, vocab_size=64))     # the tables are AdamW's, not in this race
    params = list(split_params(model)[0].values())
    g = torch.Generator().manual_seed(0)
    for p in params: p.grad = torch.randn(p.shape, generator=g)
    return params


@pytest.mark.benchmark
def test_a_step_over_the_135m_parameter_set():
    torch.set_num_threads(1)
    arms = {"torch.optim.Muon (bf16)": torch.optim.Muon(matrices(), lr=0.02, weight_decay=0.0),
            "ours, bf16": Muon(matrices(), ns_dtype=torch.bfloat16), "ours, fp32": Muon(matrices())}
    times = {name: [] for name in arms}
    for opt in arms.values(): opt.step()                                  # allocates the momenta
    for _ in range(3):                                                    # in turn, so that a busy moment hits all
        for name, opt in arms.items():
            start = time.perf_counter(); opt.step(); times[name].append(time.perf_counter() - start)
    best = {name: min(t) for name, t in times.items()}
    theirs = best["torch.optim.Muon (bf16)"]
    print(f"\n{LAYERS} layers, 1 thread, bf16 instructions: {torch.ops.mkldnn._is_mkldnn_bf16_supported()}")
    for name, t in times.items():
        print(f"{name:25} best {best[name]:6.2f} s, median {statistics.median(t):6.2f} s, ratio {best[name]/theirs:.2f}")
    assert best["ours, bf16"] < 1.1 * theirs                              # batching and norms cost nothing at equal dtype
