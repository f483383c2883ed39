"""Is this GPU fit for the runs, and do they do there what they do on a CPU? At most 8 minutes: make gpu-check

  1. the same small run on the CPU and on the GPU in fp32: losses agree;
  2. the seed's 135M model in bf16, compiled: tokens a second, share of the peak, memory against the plan;
  3. ended in the middle and started again: the losses go on.

`--device cpu --tiny` runs the same on a CPU in a minute, to test the check. Exit status 1: something is wrong."""
import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from shohin.corpus import build_corpus, stdlib_sources
from shohin.experiment import load_profile
from shohin.model import GPTConfig
from shohin.plan import DEVICES, activation_bytes, flops_per_token, muon_workspace, si, state_bytes
from shohin.shards import Manifest, UserError
from shohin.train import DistributedConfig, DistributedTrainer

# dense bf16 of the data sheets, FLOP/s
PEAKS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12, "RTX 4090": 165e12}
TINY = dict(n_layer=2, d_model=32, n_head=2, n_kv_head=1, head_dim=16, d_ff=64)


def config(corpus, model, **kw):
    return DistributedConfig(**dict(dict(name="gpu-check", corpus=str(corpus), model=model, order=dict(kind="interleaved"), steps=10**6, batch_size=12, seq_len=256,
                                         warmup=20, probe_every=0, checkpoint_every=10**6, checkpoint_s=1e9), **kw))


def losses(trainer, n): return [float(trainer.step()["loss"]) for _ in range(n)]


def agreement(corpus, device, runs, tiny):
    "Largest difference of the loss between CPU and GPU over 30 steps, fp32."
    model = TINY if tiny else {k: v for k, v in vars(GPTConfig.cpu()).items() if k in TINY}
    torch.backends.cuda.matmul.allow_tf32 = False
    c = config(corpus, model, optim=dict(ns_dtype="float32"))
    a, b = (losses(DistributedTrainer(replace(c, device=d), runs), 30) for d in ("cpu", device))
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def throughput(trainer, seconds):
    "Seconds a step: median of as many as fit in `seconds`, after five, the first of which compiles."
    t0 = time.perf_counter()
    trainer.advance()
    first = time.perf_counter() - t0
    for _ in range(4): trainer.advance()
    times, stop = [], time.perf_counter() + seconds
    while time.perf_counter() < stop or len(times) < 5:      # each step ends with a look at the device: no other wait is needed
        t0 = time.perf_counter()
        trainer.advance()
        times.append(time.perf_counter() - t0)
    return first, statistics.median(times)


def resume(cfg, runs, manifest):
    "Largest difference of the loss between a run and the same run ended at step 6 and started again."
    def logged(c, key_runs):
        rows = []
        DistributedTrainer(c, key_runs, manifest=manifest).run(rows.append)
        return {r["step"]: float(r["loss"]) for r in rows}
    quiet = logged(replace(cfg, steps=12), runs / "quiet")
    logged(replace(cfg, steps=12, keep=(6,)), runs / "again")
    folder = next((runs / "again").glob("*/result.json")).parent
    (folder / "result.json").unlink()
    again = logged(replace(cfg, steps=12), runs / "again")
    assert min(again) == 6 and max(again) == 11, sorted(again)
    return max(abs(again[s] - quiet[s]) for s in again)


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--tiny", action="store_true", help="small sizes, to test this check")
    ap.add_argument("--seconds", type=float, default=60, help="of the throughput measurement")
    ap.add_argument("--json", type=Path, help="also write the numbers there")
    args = ap.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available(): raise UserError("no GPU: this torch sees none; see README for a CUDA build, or try --device cpu --tiny")
    gpu = args.device == "cuda"
    name = torch.cuda.get_device_name() if gpu else "CPU"
    peak = next((v for k, v in PEAKS.items() if k in name), DEVICES["h100"].peak) if gpu else DEVICES["cpu"].peak
    prof, found, doc = load_profile("h100"), [], dict(device=name, torch=torch.__version__, peak=peak)
    work = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        corpus = work / "corpus"
        seq = 64 if args.tiny else prof["seq_len"]
        build_corpus(corpus, sources=stdlib_sources(200_000 if args.tiny else 3_000_000), shard_tokens=(seq + 1) * 20, probe_bytes=8192)
        t0 = time.perf_counter()
        doc["loss_difference_cpu"] = d = agreement(corpus, args.device, work / "agree", args.tiny)
        if d > 1e-3: found.append(f"losses on CPU and {name} differ by {d:.2g} in 30 steps; 0.001 is the limit")
        print(f"agreement with the CPU, fp32, 30 steps: {d:.1e} ({time.perf_counter() - t0:.0f} s)", flush=True)

        model = TINY if args.tiny else prof["model"]
        manifest = replace(Manifest.load(corpus), vocab_size=512 if args.tiny else prof["bpe_vocab"])
        micro = 2 if args.tiny else prof["micro_batch"]
        cfg = config(corpus, model, seq_len=seq, batch_size=2 * micro, micro_batch=micro, autocast="bf16", compile=not args.tiny, device=args.device)
        if gpu: torch.cuda.reset_peak_memory_stats()
        trainer = DistributedTrainer(cfg, work / "speed", manifest=manifest)
        first, s = throughput(trainer, 1 if args.tiny else args.seconds)
        full = dict(model, vocab_size=manifest.vocab_size, seq_len=seq)
        rate = cfg.batch_size * seq / s
        doc |= dict(first_step_s=first, step_s=s, tokens_per_step=cfg.batch_size * seq, tokens_per_s=rate, mfu=rate * flops_per_token(full) / peak)
        print(f"{trainer.model.n_params() / 1e6:.1f}M in bf16{', compiled' if cfg.compile else ''}: {rate:,.0f} tokens/s, {100 * doc['mfu']:.1f} % of {si(peak, 'FLOP/s')}; first step {first:.0f} s", flush=True)
        planned = sum(state_bytes(full, {}).values()) + sum(activation_bytes(full, micro).values()) + muon_workspace(full)
        doc |= dict(planned_bytes=planned)
        if gpu:
            doc["peak_bytes"] = used = torch.cuda.max_memory_allocated()
            print(f"memory: {si(used, 'B')} at most, planned {si(planned, 'B')}")
            if used > 1.15 * planned: found.append(f"the step needs {si(used, 'B')}, the plan says {si(planned, 'B')}")
        del trainer
        doc["loss_difference_resume"] = d = resume(replace(cfg, batch_size=micro, checkpoint_every=10**6), work / "resume", manifest)
        print(f"ended at step 6 and started again: losses differ by {d:.1e}")
        if d > 1e-2: found.append(f"after a resume losses differ by {d:.2g}; 0.01 is the limit")
    finally: shutil.rmtree(work, ignore_errors=True)
    doc["findings"] = found
    if args.json: args.json.write_text(json.dumps(doc, indent=1) + "\n")
    print("\n".join(f"! {f}" for f in found) or f"{name}: fit")
    return int(bool(found))


if __name__ == "__main__":
    try: sys.exit(main())
    except UserError as e: sys.exit(print(f"gpu-check: {e}", file=sys.stderr) or 2)
