"""What the trainer adds to a bare step. Run alone on an idle machine: make bench."""
import json
import statistics
import time
from dataclasses import replace

import pytest
import torch

from shohin.experiment import CliffArms, base_config, corpus_for, load_profile, repo_root
from shohin.train import Trainer, load_config

pytestmark = pytest.mark.benchmark


def test_trainer_costs_under_ten_percent(tmp_path):
    """Loader, guards, a log line each step and a checkpoint every 100, against forward, backward and update alone on the
    same batches; the cpu profile's model, probes off. Blocks of the two alternate, the medians are compared."""
    prof = load_profile("cpu")
    arm = CliffArms(prof, 1).arms()["no-guard"]
    d = dict(base_config(prof), order=dict(kind="interleaved"), guard="default", steps=10**6, name="bench", corpus=str(corpus_for(prof, 1)),
             probe_every=0, checkpoint_every=100)
    cfg = replace(load_config(d), probe_windows=())
    assert arm.name == "no-guard" and repo_root()
    full, bare = Trainer(cfg, tmp_path / "a"), Trainer(cfg, tmp_path / "b")
    batch = bare.loader.batch(0).tokens
    full.folder.mkdir(parents=True)
    log = open(full.folder / "log.jsonl", "a")
    def bare_step():
        bare.optim.zero_grad()
        bare.model.loss(batch).total.backward()
        torch.nn.utils.clip_grad_norm_(bare.model.parameters(), cfg.clip)
        bare.optim.step()
    def full_step():
        row = full.step()
        log.write(json.dumps(row) + "\n")
        log.flush()
        if full.now % 100 == 0: full._save(log)
    times = {bare_step: [], full_step: []}
    for f in times: f()
    for _ in range(5):
        for f, t in times.items():
            t0 = time.perf_counter()
            for _ in range(20): f()
            t.append((time.perf_counter() - t0) / 20)
    a, b = (statistics.median(t) for t in times.values())
    save = time.perf_counter()
    full._save(log)
    save = time.perf_counter() - save
    total = b + save / 100
    print(f"\nbare {1e3 * a:.1f} ms, trainer {1e3 * b:.1f} ms, checkpoint {1e3 * save:.0f} ms every 100 steps: {100 * (total / a - 1):+.1f} %")
    assert total < 1.10 * a


def test_attention_logits_cost_under_five_percent(tmp_path):
    """A step that captures the largest attention logit of each layer against one that does not, at the cadence of the experiments (every
    20 steps) and at every step; the cpu profile's model and the small one of the unstable runs. Off, the model runs the same operations as one that has no capture."""
    prof = load_profile("cpu")
    for name, model, rows, seq in (("model", prof["model"], prof["batch_size"], prof["seq_len"]), ("proxy_small", prof["proxy_small"], prof["proxy_batch"], prof["proxy_seq"])):
        d = dict(base_config(prof), model=model, batch_size=rows, seq_len=seq, order=dict(kind="interleaved"), guard="none", steps=10**6, name="bench", corpus=str(corpus_for(prof, 1)), probe_every=0)
        on, off = (Trainer(replace(load_config(dict(d, attn_every=k)), probe_windows=()), tmp_path / f"{name}{k}") for k in (1, 0))
        times = {on: [], off: []}
        for t in times: t.step()
        for _ in range(6):
            for t, seen in times.items():
                t0 = time.perf_counter()
                for _ in range(10): t.step()
                seen.append((time.perf_counter() - t0) / 10)
        a, b = (statistics.median(times[t]) for t in (on, off))
        print(f"\n{name}: step {1e3 * b:.1f} ms, with capture {1e3 * a:.1f} ms ({100 * (a / b - 1):+.1f} %); every 20 steps {100 * (a / b - 1) / 20:+.2f} %")
        assert (a / b - 1) / 20 < 0.05
