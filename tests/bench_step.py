"""Where the time and the memory of a training step go. Alone on an idle machine:

    pytest -m benchmark tests/bench_step.py -s             makes reports/benchmarks/step.json, then: make pages"""
import json
import os
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from dataclasses import replace
from functools import wraps
from pathlib import Path

import numpy
import pytest
import torch
from test_ranks import Waits

from shohin import muon, ranks
from shohin import train as T
from shohin.experiment import base_config, corpus_for, load_profile
from shohin.plan import activation_bytes, flops_per_token, muon_flops, shapes, state_bytes
from shohin.shards import Manifest

pytestmark = pytest.mark.benchmark
RESULT = Path(__file__).parents[1] / "reports/benchmarks/step.json"
PARTS = {"read": "reading the batch", "forward": "forward pass", "backward": "backward pass", "clip": "gradient norm and clipping", "look": "the look at the device",
         "vote": "guards", "newton_schulz": "Muon: Newton-Schulz", "muon": "Muon: the rest", "adamw": "AdamW", "norms": "norms of AdamW's updates", "rest": "row of the log, and the rest"}


class Clock:
    "Wraps callables so that the time in each is added up by name; what runs inside another is taken off that one."
    def __init__(self): self.spent, self.stack = defaultdict(float), []

    def wrap(self, name, f):
        @wraps(f)
        def timed(*args, **kw):
            self.stack.append(0.)
            t0 = time.perf_counter()
            try: return f(*args, **kw)
            finally:
                d = time.perf_counter() - t0
                self.spent[name] += d - self.stack.pop()
                if self.stack: self.stack[-1] += d
        return timed


def timed_steps(trainer, n, monkeypatch):
    "Median milliseconds of each part over `n` steps after two that do not count."
    clock, t = Clock(), trainer
    for step in range(1000, 1200): t.loader.batch(step)      # a shard is checked when it is first opened
    t.advance()
    t.gradients.model.forward = clock.wrap("forward", t.gradients.model.forward)
    with monkeypatch.context() as m:
        m.setattr(t.loader, "batch", clock.wrap("read", t.loader.batch))
        m.setattr(torch.Tensor, "backward", clock.wrap("backward", torch.Tensor.backward))
        m.setattr(torch.nn.utils, "clip_grad_norm_", clock.wrap("clip", torch.nn.utils.clip_grad_norm_))
        m.setattr(T, "to_host", clock.wrap("look", T.to_host))
        m.setattr(T, "vote", clock.wrap("vote", T.vote))
        m.setattr(ranks, "newton_schulz", clock.wrap("newton_schulz", ranks.newton_schulz))
        m.setattr(t.optim.muon, "step", clock.wrap("muon", t.optim.muon.step))
        m.setattr(t.optim.adamw, "step", clock.wrap("adamw", t.optim.adamw.step))
        m.setattr(muon, "adamw_update_norms", clock.wrap("norms", muon.adamw_update_norms))
        t.advance()
        steps = []
        for _ in range(n):
            clock.spent.clear()
            t0 = time.perf_counter()
            t.advance()
            total = time.perf_counter() - t0
            steps.append(dict(clock.spent, rest=total - sum(clock.spent.values()), total=total))
    return {k: 1e3 * statistics.median(s.get(k, 0.) for s in steps) for k in (*PARTS, "total")}


def saved_bytes(model, rows, autocast):
    "Bytes kept for the backward pass of `rows`, parameters not counted; what the loss adds to them."
    seen = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    def pack(x):
        s = x.untyped_storage()
        if s.data_ptr() not in own: seen[s.data_ptr()] = s.nbytes()
        return x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", torch.bfloat16, enabled=autocast): out = model.loss(rows)
    assert out.total.requires_grad
    return sum(seen.values())


@pytest.fixture
def trainers(tmp_path):
    "The cpu profile's model, and the seed's 135M on one row of 2,048 tokens, both on one thread."
    cpu, big = load_profile("cpu"), load_profile("h100")
    corpus = corpus_for(cpu, 1)
    config = dict(base_config(dict(cpu, ranks=1)), order=dict(kind="interleaved"), guard="default", steps=10**6, name="bench", corpus=str(corpus), probe_every=0)
    small = T.DistributedTrainer(T.load_config(config), tmp_path)
    m = Manifest.load(corpus, verify="none")
    large = T.load_config(dict(config, model=big["model"], seq_len=2048, batch_size=1, autocast="bf16"))
    return small, T.DistributedTrainer(large, tmp_path, manifest=replace(m, vocab_size=big["bpe_vocab"])), big


def test_where_a_step_goes(trainers, monkeypatch):
    small, large, big = trainers
    plain = T.Trainer(replace(T.load_config({k: v for k, v in T.asdict(small.cfg).items() if k not in ("device", "micro_batch", "autocast", "compile")})), small.runs)
    a, b = timed_steps(small, 40, monkeypatch), timed_steps(large, 4, monkeypatch)
    waits = {}
    for name, step in (("Trainer", plain.step), ("DistributedTrainer", small.advance)):
        step()
        with Waits() as w: step()
        waits[name] = sum(x[0] == "_local_scalar_dense" for x in w.seen) + (name == "DistributedTrainer")      # to_host
    model = dict(big["model"], vocab_size=big["bpe_vocab"], seq_len=2048)
    named = dict(large.model.named_parameters())
    count = lambda ts: sum(t.numel() * t.element_size() for t in ts)
    moments = count(s[k] for s in large.optim.adamw.state.values() for k in ("exp_avg", "exp_avg_sq"))
    momentum = count(s["momentum_buffer"] for s in large.optim.muon.state.values() if "momentum_buffer" in s)
    large.optim.zero_grad()
    rows = large.loader.batch(0).tokens
    kept = saved_bytes(large.model, rows, True)
    state, act = state_bytes(model, big["optim"]), activation_bytes(model, 1)
    per_token, ns = flops_per_token(model), muon_flops(model)
    tokens = big["batch_size"] * big["seq_len"]
    assert small.ranks.world == 1 and len(shapes(model)[1]) == 30 * 7
    share = lambda t, k: round(100 * t[k] / t["total"], 1)
    nb = b["newton_schulz"] / 1e3
    doc = dict(
        benchmark="step", title="Where a step goes", summary="Time of a training step part by part, how often the host waits for the device, and what fills the memory: measured on one core, written for GPUs.",
        command="python -m pytest tests/bench_step.py -m benchmark", machine=f"{os.cpu_count()} cores, {platform.machine()}, one thread",
        commit=subprocess.run(["git", "rev-parse", "HEAD"], cwd=RESULT.parent, capture_output=True, text=True).stdout.strip(),
        versions=dict(python=platform.python_version(), torch=torch.__version__, numpy=numpy.__version__),
        answers=[f"Of a step of the cpu profile ({a['total']:.0f} ms) the passes take {share(a, 'forward') + share(a, 'backward'):.0f} %, Muon {share(a, 'newton_schulz') + share(a, 'muon'):.0f} %, everything that is about data, guards and the log {share(a, 'read') + share(a, 'vote') + share(a, 'look') + share(a, 'rest'):.1f} %.",
                 f"Waits for the device in a step: DistributedTrainer {waits['DistributedTrainer']}, Trainer, made for a CPU, {waits['Trainer']}.",
                 f"At 135M the weights, gradients and optimizer state take {(state['weights'] + state['gradients'] + state['optimizer']) / 1e9:.2f} GB; a row of 2,048 tokens keeps {kept / 1e9:.2f} GB for the backward pass in bf16."],
        tables=[
            dict(title="Time", caption="Milliseconds of each part of a step, medians; DistributedTrainer, one rank, one thread",
                 text=["The cpu profile (12 rows of 256 bytes, fp32) over 40 steps, and the seed's model on one row of 2,048 tokens in bf16 over 4. One row is a 256th of the seed's batch: the passes grow with the rows, the update does not."],
                 columns=dict(part="part", small_ms="cpu profile, ms", small_share="%", large_ms="135M, one row, ms", large_share="%"),
                 rows=[dict(id=k, part=PARTS.get(k, "whole step"), small_ms=round(a[k], 2), small_share=share(a, k), large_ms=round(b[k], 1), large_share=share(b, k)) for k in (*PARTS, "total")]),
            dict(title="Waits", caption="How often a step makes the host wait for the device", text=["Counted from the operations that a step dispatches; a test holds DistributedTrainer to one."],
                 columns=dict(trainer="trainer", waits="waits a step"), rows=[dict(id=k, trainer=k, waits=v) for k, v in waits.items()]),
            dict(title="Memory", caption="Bytes at 135M by component, measured on allocated tensors and as a dry run of shohin reproduce plans them",
                 text=["Weights, gradients and state do not depend on the batch. What the passes keep grows with the rows of a micro-batch; the plan's figure is an estimate made for fused kernels."],
                 columns=dict(part="component", measured="measured, MB", planned="planned, MB"),
                 rows=[dict(id="weights", part="weights, fp32", measured=round(count(named.values()) / 1e6, 1), planned=round(state["weights"] / 1e6, 1)),
                       dict(id="gradients", part="gradients, fp32 (twice that with DDP's buckets)", measured=round(count(named.values()) / 1e6, 1), planned=round(state["gradients"] / 1e6, 1)),
                       dict(id="optimizer", part="Muon's momentum and AdamW's moments, fp32", measured=round((moments + momentum) / 1e6, 1), planned=round(state["optimizer"] / 1e6, 1)),
                       dict(id="kept", part="kept for the backward pass, one row, bf16, with the logits", measured=round(kept / 1e6, 1), planned=round(sum(act.values()) / 1e6, 1))])],
        notes=[f"A token of the 135M model costs {per_token / 1e9:.2f} GFLOP, an update of 524,288 tokens {per_token * tokens / 1e15:.2f} PFLOP; Newton-Schulz on its 210 matrices {ns / 1e12:.2f} TFLOP, {100 * ns / (per_token * tokens):.1f} % of it, whatever the number of ranks. Shared out over 8 ranks it is an eighth of that a rank, and each gathers 7/8 of {4 * sum(p.numel() for n, p in named.items() if n.startswith('blocks.') and p.ndim == 2) / 1e6:.0f} MB of fp32 matrices.",
               f"Here Newton-Schulz ran at {ns / nb / 1e9:.0f} GFLOP/s, the passes at {per_token * 2048 / (b['forward'] + b['backward']) / 1e6:.0f}: the smaller of the two shows where a GPU needs a profile first.",
               "Each look at the device costs a GPU what it would have done while the host asked, waited and sent the next work, some tens of microseconds, and keeps the host from running ahead. The guard needs the loss before the update: one look is the least.",
               "The gather of the losses is also what keeps ranks together; with nccl it runs on the device, and its result is what the host waits for.",
               "Probes and checkpoints are not in the table. A probe is a forward pass over the held-out rows, on the first rank, in fp32. A checkpoint of the seed's model is 1.1 GB, written by the first rank while the others wait.",
               "torch.compile fuses norms, RoPE, SwiGLU and the loss; the table is without it."])
    print(json.dumps(doc["answers"], indent=1))
    for t in doc["tables"]: print(*t["rows"], sep="\n")
    assert waits["DistributedTrainer"] == 1 and count(named.values()) == state["weights"] and moments + momentum == state["optimizer"]
    RESULT.write_text(json.dumps(doc, indent=1) + "\n")
