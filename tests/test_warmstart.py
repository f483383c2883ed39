"""Warm starts: old tensors untouched, new ones listed, state complete; a run forks from the result, transformers loads it."""
import hashlib
import json
from dataclasses import asdict, replace

import pytest
import torch

from shohin import warmstart as W
from shohin.corpus import build_corpus, stdlib_sources
from shohin.loader import Loader
from shohin.model import GPT, GPTConfig, from_hf_config, from_hf_state_dict, to_hf_config, to_hf_state_dict
from shohin.muon import make_optimizers, split_params
from shohin.order import make_order
from shohin.shards import Manifest, UserError
from shohin.train import RunConfig, Trainer, checkpoints, history
from shohin.warmstart import (
    add_qk_norm,
    build,
    carry_optimizer,
    compare,
    hf_add_qk_norm,
    measure_gains,
    state_names,
    warmstart_checkpoint,
)

SMALL = GPTConfig(vocab_size=61, n_layer=2, d_model=48, n_head=6, n_kv_head=2, head_dim=16, d_ff=80, seq_len=32, qk_norm=False)


def rows(n=8, seed=0): return torch.randint(61, (n, 33), generator=torch.Generator().manual_seed(seed))


def trained(cfg=SMALL, spec=None, steps=4):
    model = GPT(cfg)
    with torch.no_grad():
        for b in model.blocks: b.attn.wq.weight *= 20; b.attn.wk.weight *= 20       # attention that matters
    opts = make_optimizers(model, spec)
    for i in range(steps): opts.zero_grad(); model.loss(rows(seed=i)).total.backward(); opts.step()
    return model, opts, dict(model.named_parameters()), *opts.state_tensors()


@pytest.mark.parametrize("spec", [{}, dict(no_muon=True)])
def test_old_tensors_are_bit_identical_and_new_ones_listed(spec):
    _, _, weights, tensors, scalars = trained(spec=spec)
    copies = {n: t.detach().clone() for n, t in (weights | tensors).items()}
    ws = add_qk_norm(SMALL, weights, tensors, scalars, gains=1.5, **spec)
    everything = {**ws.model, **ws.optim, **ws.scalars}
    assert everything.keys() == weights.keys() | tensors.keys() | scalars.keys() | set(ws.new) and ws.dropped == []
    assert not set(ws.new) & (weights.keys() | tensors.keys() | scalars.keys())
    assert all(torch.equal(everything[n], t) for n, t in copies.items()) and all(ws.scalars[n] == v for n, v in scalars.items())
    gains = [f"blocks.{i}.attn.{x}_norm.weight" for i in range(2) for x in "qk"]
    assert set(ws.new) == {n for g in gains for n in (g, f"adamw.exp_avg.{g}", f"adamw.exp_avg_sq.{g}", f"adamw.step.{g}")}
    for g in gains: assert (ws.model[g] == 1.5).all() and (ws.optim[f"adamw.exp_avg_sq.{g}"] == 0).all() and ws.scalars[f"adamw.step.{g}"] == 0


@pytest.mark.parametrize("spec", [{}, dict(no_muon=True)])
def test_the_result_is_a_complete_state_that_trains(spec):
    _, _, weights, tensors, scalars = trained(spec=spec)
    ws = add_qk_norm(SMALL, weights, tensors, scalars, **spec)
    model = build(ws); opts = make_optimizers(model, spec)
    assert opts.load_state_tensors(ws.optim, ws.scalars) == []                       # strict: nothing missing, nothing extra
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.loss(rows()).total.backward(); opts.step()
    moved = {n: (p - before[n]).norm().item() for n, p in model.named_parameters()}
    assert all(v > 0 for v in moved.values())
    gain = "blocks.0.attn.q_norm.weight"        # Adam's first step of a new parameter: the learning rate in every channel
    torch.testing.assert_close((model.get_parameter(gain) - before[gain]).abs(), torch.full((16,), 3e-3), rtol=0.02, atol=0)


@pytest.mark.parametrize("no_muon", [False, True])
@pytest.mark.parametrize("cfg", [SMALL, replace(SMALL, qk_norm=True, tie_embeddings=False)])
def test_state_names_are_those_of_the_optimizer(cfg, no_muon):
    tensors, scalars = make_optimizers(GPT(cfg), dict(no_muon=no_muon)).state_tensors()
    assert state_names(cfg, no_muon) == ({n: t.shape for n, t in tensors.items()}, list(scalars))


def test_fresh_switched_and_switched_back():
    _, _, _, tensors, scalars = trained()
    zeros, counts, new, dropped = carry_optimizer(SMALL, {}, {})
    assert all((t == 0).all() for t in zeros.values()) and set(counts.values()) == {0.0} and dropped == [] and set(new) == zeros.keys() | counts.keys()
    adam, steps, new, dropped = carry_optimizer(SMALL, tensors, scalars, no_muon=True)
    matrices = split_params(GPT(SMALL))[0]
    assert set(dropped) == {f"muon.momentum.{n}" for n in matrices}
    assert set(new) == {f"adamw.{k}.{n}" for k in ("exp_avg", "exp_avg_sq", "step") for n in matrices}
    adam = {n: torch.full_like(t, 3.0) if n in new else t for n, t in adam.items()}
    back, _, new, _ = carry_optimizer(SMALL, adam, steps, keep_momentum=True)
    assert new == [] and all((back[f"muon.momentum.{n}"] == 3).all() for n in matrices)
    fresh, _, new, _ = carry_optimizer(SMALL, adam, steps)
    assert set(new) == {f"muon.momentum.{n}" for n in matrices} and all((fresh[n] == 0).all() for n in new)


def test_what_does_not_fit_is_refused():
    _, _, weights, tensors, scalars = trained()
    with pytest.raises(UserError, match="has QK-norm already"): add_qk_norm(replace(SMALL, qk_norm=True), weights)
    with pytest.raises(UserError, match="has shape"): add_qk_norm(replace(SMALL, d_ff=96), weights, tensors, scalars)
    for gains in ({}, {"blocks.0.attn.q_norm.weight": torch.ones(16)},
                  {f"blocks.{i}.attn.{x}_norm.weight": torch.ones(15) for i in range(2) for x in "qk"}):
        with pytest.raises(UserError, match="gains must be 4 vectors of 16"): add_qk_norm(SMALL, weights, gains=gains)
    with pytest.raises(UserError, match="choose ones, rms, channel or fit"): measure_gains(GPT(SMALL), rows(), "mean")
    with pytest.raises(UserError, match="nothing to measure"): measure_gains(GPT(replace(SMALL, qk_norm=True)), rows())


def test_measured_gains_are_what_they_say():
    "Against the definitions, from queries computed here; dead channels included."
    model, *_ = trained()
    with torch.no_grad(): model.blocks[1].attn.wq.weight.view(6, 16, 48)[:, 5] = 0       # channel 5 of every head is dead
    rms, channel = measure_gains(model, rows(), "rms"), measure_gains(model, rows(), "channel")
    with torch.no_grad():
        x = model.embed(rows()[:, :-1])
        for i, b in enumerate(model.blocks):
            q = b.attn.wq(b.norm1(x)).view(-1, 16).double()
            n = f"blocks.{i}.attn.q_norm.weight"
            torch.testing.assert_close(rms[n], q.square().mean().sqrt().float().expand(16), rtol=1e-5, atol=0)
            qn = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            alive = q.abs().sum(0) > 0
            best = torch.linalg.lstsq(torch.stack([qn[:, 2], torch.zeros_like(qn[:, 2])], 1)[:, :1], q[:, 2:3]).solution.item()
            assert channel[n][2].item() == pytest.approx(best, rel=1e-5)              # least squares, solved by another
            assert channel[n].isfinite().all() and (channel[n] > 0).all() and alive.sum() == 16 - (i == 1)
            x = b(x, model.cos[:32], model.sin[:32])


def test_better_gains_change_less():
    model, _, weights, *_ = trained(steps=8)
    kl = {how: compare(model, build(add_qk_norm(SMALL, weights, gains=1.0 if how == "ones" else measure_gains(model, rows(16), how))), rows(16, 9))["kl"]
          for how in ("ones", "rms", "fit")}
    assert kl["fit"] < kl["rms"] < kl["ones"]


def test_measuring_leaves_the_model_as_it_was():
    model, _, weights, *_ = trained()
    before, loss = {n: t.detach().clone() for n, t in weights.items()}, model.loss(rows()).total.item()
    measure_gains(model, rows(), "fit")
    assert all(torch.equal(t, before[n]) and t.requires_grad for n, t in model.named_parameters())
    assert model.loss(rows()).total.item() == loss and not any(m._forward_hooks for m in model.modules())


def test_the_kappa_transplant_sets_the_length_of_every_query():
    _, _, weights, *_ = trained()
    model = build(add_qk_norm(SMALL, weights, gains=100**0.5))
    with torch.no_grad():
        q, k = model.blocks[0].attn.queries_keys(model.blocks[0].norm1(model.embed(rows()[:, :-1])), model.cos[:32], model.sin[:32])
    for x in (q, k): torch.testing.assert_close(x.square().mean(-1), torch.full(x.shape[:-1], 100.0), rtol=1e-3, atol=0)


# checkpoints of runs

@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "corpus"
    build_corpus(out, sources=stdlib_sources(30_000), shard_tokens=33 * 6 * 10, probe_bytes=1024)
    return out


@pytest.fixture(scope="module")
def host(corpus, tmp_path_factory):
    "(config, runs folder, parent) of a finished run of 8 steps without QK-norm, its checkpoint at step 5 kept."
    model = dict(n_layer=2, d_model=32, n_head=2, n_kv_head=1, head_dim=16, d_ff=64, qk_norm=False)
    cfg = RunConfig("host", str(corpus), model, dict(kind="interleaved"), steps=8, batch_size=6, seq_len=32, warmup=2, horizon=1000,
                    probe_every=0, checkpoint_every=5, keep=(5,))
    runs = tmp_path_factory.mktemp("runs")
    return cfg, runs, Trainer(cfg, runs).run()["key"]


@pytest.mark.parametrize("how", ["ones", "fit", 3.0])
def test_a_run_forks_from_a_warm_started_checkpoint(host, how, request):
    cfg, runs, key = host
    manifest = Manifest.load(cfg.corpus)
    batch = Loader(make_order(cfg.order, manifest, 6, 32), manifest).batch(0).tokens
    parent = warmstart_checkpoint(runs/key/"checkpoints"/"step_00000005", runs/f"warm-{how}", qk_norm=True, how=how, rows=batch)
    warm = replace(cfg, name="warm", model=cfg.model | dict(qk_norm=True), parent=parent, keep=())
    trainer = Trainer(warm, runs)
    result = trainer.run()
    assert result["start"] == 5 and result["steps"] == 8
    assert {float(trainer.optim.adamw.state[p]["step"]) for n, p in trainer.model.named_parameters() if "q_norm" in n} == {3.0}
    assert {float(trainer.optim.adamw.state[p]["step"]) for n, p in trainer.model.named_parameters() if n == "embed.weight"} == {8.0}
    log = history(runs, result["key"])
    assert [r["step"] for r in log] == list(range(8))                                 # the old run's log, then the new one's
    assert log[:5] == history(runs, key)[:5] and log[5]["domains"] == history(runs, key)[5]["domains"]   # the data position is kept


def test_the_wrong_direction_is_one_clear_line(host):
    cfg, runs, key = host
    at = checkpoints(runs/key)[5]
    plain = dict(run=key, step=5, hash=json.loads((at/"state.json").read_text())["hash"])
    with pytest.raises(UserError, match=r"differ in 'blocks\.0\.attn\.k_norm\.weight'"):    # a model with QK-norm, a checkpoint without
        Trainer(replace(cfg, model=cfg.model | dict(qk_norm=True), parent=plain), runs).run()
    warm = warmstart_checkpoint(at, runs/"warm-direction", qk_norm=True)
    with pytest.raises(UserError, match=r"differ in 'blocks\.0\.attn\.k_norm\.weight'"):    # and the other way
        Trainer(replace(cfg, parent=warm), runs).run()
    with pytest.raises(UserError, match="has QK-norm already"): warmstart_checkpoint(runs/"warm-direction", runs/"twice", qk_norm=True)


@pytest.mark.parametrize("optimizer, no_muon", [("fresh", False), ("adamw", True)])
def test_the_optimizer_alone_can_be_changed(host, optimizer, no_muon):
    cfg, runs, key = host
    parent = warmstart_checkpoint(checkpoints(runs/key)[5], runs/f"opt-{optimizer}", optimizer=optimizer)
    run, _, model, _, state = W.open_checkpoint(runs/f"opt-{optimizer}")
    old = W.open_checkpoint(checkpoints(runs/key)[5])
    assert all(torch.equal(model[n], t) for n, t in old[2].items()) and run["optim"].get("no_muon", False) == no_muon
    assert (set(state["optim"].values()) == {0.0}) == (optimizer == "fresh")
    Trainer(replace(cfg, optim=run["optim"], parent=parent, keep=()), runs).run()


def test_nothing_is_left_behind_when_it_does_not_fit(host, tmp_path):
    _, runs, key = host
    at, before = checkpoints(runs/key)[5], sorted(p.name for p in runs.iterdir())
    for kw, says in ((dict(qk_norm=True, how="rms"), "give rows"), (dict(optimizer="sgd"), "choose keep, fresh, muon or adamw"), ({}, "nothing to change"),
                     (dict(qk_norm=True, how="best", rows=torch.zeros(1, 9, dtype=torch.long)), "choose ones, rms, channel or fit")):
        with pytest.raises(UserError, match=says): warmstart_checkpoint(at, runs/"never", **kw)
    with pytest.raises(UserError, match="exists"): warmstart_checkpoint(at, runs/key, qk_norm=True)
    with pytest.raises(UserError, match="not a checkpoint of a run"): warmstart_checkpoint(tmp_path, runs/"never", qk_norm=True)
    assert sorted(p.name for p in runs.iterdir()) == before


# Hugging Face folders

def llama(folder, dtype=torch.float32, **kw):
    "A Llama as transformers writes it, with what usually lies beside the weights."
    from transformers import LlamaConfig, LlamaForCausalLM
    model = trained(replace(SMALL, tie_embeddings=False))[0]
    hf = LlamaForCausalLM(LlamaConfig(**to_hf_config(model.cfg)))
    hf.load_state_dict(to_hf_state_dict(model))
    hf.to(dtype).save_pretrained(folder, **kw)
    (folder/"tokenizer.json").write_text("{}")
    return model


@pytest.mark.parametrize("dtype, shards", [(torch.float32, {}), (torch.bfloat16, {}), (torch.float32, dict(max_shard_size="40KB"))])
def test_a_llama_becomes_a_qwen3(tmp_path, dtype, shards):
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
    model = llama(tmp_path/"llama", dtype, **shards)
    assert (tmp_path/"llama"/"model.safetensors.index.json").exists() == bool(shards)
    hash_of = lambda folder: {hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.safetensors")}
    gains = measure_gains(model, rows(), "channel")
    new = hf_add_qk_norm(tmp_path/"llama", tmp_path/"qwen", gains)
    assert len(new) == 4 and hash_of(tmp_path/"llama") < hash_of(tmp_path/"qwen")      # the old weights, byte for byte
    assert (tmp_path/"qwen"/"tokenizer.json").exists()
    hf, info = AutoModelForCausalLM.from_pretrained(tmp_path/"qwen", dtype=dtype, output_loading_info=True)
    assert isinstance(hf, Qwen3ForCausalLM) and not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert hf.model.layers[0].self_attn.q_norm.weight.dtype == dtype
    ours = build(add_qk_norm(model.cfg, dict(model.named_parameters()), gains=gains))
    with torch.no_grad(): difference = (hf(rows()[:, :-1]).logits - ours(rows()[:, :-1])).abs().max()
    assert difference < (1e-3 if dtype == torch.float32 else 0.5)
    config = json.loads((tmp_path/"qwen"/"config.json").read_text())
    back = GPT(from_hf_config(config)).to(dtype)                                       # and comes back into this library
    back.load_state_dict(from_hf_state_dict(hf.state_dict()))
    assert back.cfg.qk_norm


def test_a_folder_that_is_no_llama_is_refused(tmp_path):
    llama(tmp_path/"llama"); hf_add_qk_norm(tmp_path/"llama", tmp_path/"qwen")
    (tmp_path/"empty").mkdir(); (tmp_path/"noweights").mkdir()
    (tmp_path/"noweights"/"config.json").write_text((tmp_path/"llama"/"config.json").read_text())
    for src, says in (("qwen", "only a Llama"), ("empty", "cannot be read"), ("missing", "cannot be read"), ("noweights", "no model.safetensors")):
        with pytest.raises(UserError, match=says): hf_add_qk_norm(tmp_path/src, tmp_path/"out")
    with pytest.raises(UserError, match="exists"): hf_add_qk_norm(tmp_path/"llama", tmp_path/"qwen")
    with pytest.raises(UserError, match="must have 16 entries"):
        hf_add_qk_norm(tmp_path/"llama", tmp_path/"out", {f"blocks.{i}.attn.{x}_norm.weight": torch.ones(8) for i in range(2) for x in "qk"})
    assert not (tmp_path/"out").exists() and not list(tmp_path.glob(".*"))
    assert asdict(from_hf_config(json.loads((tmp_path/"qwen"/"config.json").read_text())))["qk_norm"]


@pytest.mark.parametrize("share", [0., .3, 1.])
def test_qk_norm_sets_in_by_its_share(share):
    "Queries are x (gain/rms)^share, gradients finite even for a query of nothing but zeros, names of tensors as without the ramp."
    _, _, weights, *_ = trained()
    model = build(add_qk_norm(SMALL, weights, gains=measure_gains(GPT(SMALL), rows(), "rms")))
    names, attn, x = list(dict(model.named_parameters())), model.blocks[1].attn, torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    x[0, 0] = 0
    W.QKNormRamp(model, share)
    want = x * (attn.q_norm.weight / (x.square().mean(-1, keepdim=True) + SMALL.norm_eps).sqrt()) ** share
    torch.testing.assert_close(attn.q_norm(x), want)
    if share == 0: assert torch.equal(attn.q_norm(x), x)
    model.loss(rows()).total.backward(); y = attn.q_norm(x.requires_grad_()); y.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters()) and torch.isfinite(x.grad).all()
    assert list(dict(model.named_parameters())) == names == list(model.state_dict())
