"What is done to an unstable run: each field does what it says, and nothing else; killed and resumed, nothing differs."
import json
from dataclasses import asdict, replace

import pytest
import torch

from shohin.attribute import Replay
from shohin.corpus import build_corpus, stdlib_sources
from shohin.experiment import Arm, Sweep, load_profile
from shohin.shards import UserError
from shohin.stability import StabilityConfig, StabilityTrainer, key_of, load_config, trainer_for
from shohin.train import DistributedConfig, DistributedTrainer, Trainer, checkpoints, load_checkpoint, read_log

MODEL = dict(n_layer=2, d_model=32, n_head=2, n_kv_head=1, head_dim=16, d_ff=64, qk_norm=False)
NORMED = dict(MODEL, qk_norm=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "corpus"
    build_corpus(out, sources=stdlib_sources(60_000), shard_tokens=33 * 8 * 10, probe_bytes=2048)
    return out


@pytest.fixture
def cfg(corpus):
    return StabilityConfig("s", str(corpus), MODEL, dict(kind="interleaved"), steps=30, batch_size=4, seq_len=32, warmup=4, horizon=1000, probe_every=0,
                           guard="none", optim=dict(muon_lr=.02, adamw_lr=3e-3))


def train(cfg, where):
    t = trainer_for(cfg)(cfg, where)
    return t, t.run(), read_log(t.folder / "log.jsonl")


def fork(cfg, where, at=10):
    t, result, _ = train(replace(cfg, steps=at + 6, keep=(at,)), where)
    return dict(run=t.key, step=at, hash=result["kept"][str(at)])


def test_without_its_fields_it_is_the_distributed_trainer(cfg, tmp_path):
    plain = DistributedConfig(**{k: v for k, v in asdict(cfg).items() if k in DistributedConfig.__dataclass_fields__})
    a, b = train(cfg, tmp_path), train(plain, tmp_path)
    assert a[1]["weights"] == b[1]["weights"] and a[2] == b[2] and a[0].key != b[0].key
    kinds = (dict(), Trainer), (dict(autocast="bf16"), DistributedTrainer), (dict(watch=True), StabilityTrainer)
    base = {k: v for k, v in asdict(cfg).items() if k not in StabilityConfig.__annotations__ and k not in DistributedConfig.__annotations__}
    for more, kind in kinds: assert trainer_for(load_config(base | more)) is kind


@pytest.mark.parametrize("more", [dict(update_clip=dict(window=8, sigma=.5)), dict(stable_adamw=True, watch=True), dict(rewarm=8, update_clip=dict(window=6, sigma=1), rewarm_only="adamw")], ids=str)
def test_ended_and_started_again_nothing_differs(cfg, tmp_path, more):
    c = replace(cfg, steps=26, checkpoint_every=7, **more)
    if "rewarm" in more: c = replace(c, parent=fork(cfg, tmp_path))
    t, quiet, rows = train(c, tmp_path)
    again = StabilityTrainer(c, tmp_path / "again")
    if c.parent: (tmp_path / "again").mkdir(); (tmp_path / "again" / c.parent["run"]).symlink_to(tmp_path / c.parent["run"])
    class Stopped(Exception): pass
    def stop(row):
        if row["step"] == 18: raise Stopped
    with pytest.raises(Stopped): again.run(stop)
    assert max(checkpoints(again.folder)) < 19
    result = StabilityTrainer(c, tmp_path / "again").run()
    assert result["weights"] == quiet["weights"] and read_log(again.folder / "log.jsonl") == rows
    if c.update_clip: assert any(r["update_scale"] < 1 for r in rows)


@pytest.mark.parametrize("more", [dict(), dict(stable_adamw=True), dict(update_clip=dict(window=6, sigma=.2)), dict(optim=dict(no_muon=True, adamw_lr=.02), stable_adamw=True)], ids=str)
def test_the_logged_norm_is_what_was_subtracted(cfg, tmp_path, more):
    t = StabilityTrainer(replace(cfg, watch=True, **more), tmp_path)
    for _ in range(12):
        before = {n: p.detach().clone() for n, p in t.model.named_parameters()}
        row = t.step()
        moved = {n: (p - before[n]).norm() for n, p in t.model.named_parameters()}
        assert row["update_norm"] == pytest.approx(torch.stack(list(moved.values())).norm().item(), rel=2e-4)
        layers = [torch.stack([v for n, v in moved.items() if n.startswith(f"blocks.{i}.")]).norm().item() for i in range(2)]
        assert row["layer_update_norm"][:2] == pytest.approx(layers, rel=2e-4) and row["rms_max"] >= row["rms_mean"] > 0


def test_a_planned_skip_and_a_broken_rate(cfg, tmp_path):
    _, _, rows = train(replace(cfg, skip_steps=(5, 6), break_lr=dict(step=8, steps=2, factor=3.)), tmp_path)
    assert [r["step"] for r in rows if r["decision"] == "skip:planned"] == [5, 6] and rows[5]["update_norm"] == 0 < rows[7]["update_norm"]
    assert [round(r["lr"] / .02, 3) for r in rows[6:12]] == [1, 1, 3, 3, 1, 1]


@pytest.mark.parametrize("kind", ["noise", "repeat", "shuffle"])
def test_a_broken_batch_is_in_its_step_alone(cfg, tmp_path, kind):
    c = replace(cfg, steps=24)
    _, _, quiet = train(c, tmp_path)
    _, _, rows = train(replace(c, break_batch=dict(step=15, kind=kind)), tmp_path)
    assert [r["loss"] for r in rows[:15]] == [r["loss"] for r in quiet[:15]]
    assert abs(rows[15]["loss"] - quiet[15]["loss"]) > (.02 if kind == "shuffle" else .2) and rows[15]["domains"] == quiet[15]["domains"]


def test_warming_up_again(cfg, tmp_path):
    "Both rates, or one of them; state kept, so that the first update is that of the run it came from, only smaller."
    parent = fork(cfg, tmp_path)
    _, _, own = train(replace(cfg, steps=16, parent=parent), tmp_path)
    _, _, both = train(replace(cfg, steps=16, parent=parent, rewarm=4), tmp_path)
    assert [r["lr"] / .02 for r in both] == pytest.approx([.325, .55, .775, 1, 1, 1])
    assert both[0]["loss"] == own[0]["loss"] and both[0]["update_norm"] == pytest.approx(.325 * own[0]["update_norm"], rel=1e-3)
    t, _, rows = train(replace(cfg, steps=11, parent=parent, rewarm=4, rewarm_only="adamw", watch=True), tmp_path)
    assert rows[0]["lr"] == own[0]["lr"] and t.optim.adamw.param_groups[0]["lr"] == pytest.approx(.325 * 3e-3) and .325 * own[0]["update_norm"] < rows[0]["update_norm"] < own[0]["update_norm"]


@pytest.mark.parametrize("how", ["ones", "channel", "fit", 2.0])
def test_insertion_keeps_everything_else(cfg, tmp_path, how):
    parent = fork(cfg, tmp_path)
    _, _, own = train(replace(cfg, steps=13, parent=parent), tmp_path)
    t, _, rows = train(replace(cfg, steps=13, parent=parent, model=NORMED, insert_qk_norm=how), tmp_path)
    assert rows[0]["domains"] == own[0]["domains"] and rows[0]["lr"] == own[0]["lr"]
    again = StabilityTrainer(t.cfg, tmp_path / "x")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / parent["run"]).symlink_to(tmp_path / parent["run"])
    again.folder.mkdir(parents=True)
    again.optim.gather()
    again._fork()
    model, optim, _ = load_checkpoint(checkpoints(tmp_path / parent["run"])[10])
    now, state = dict(again.model.named_parameters()), again.optim.state_tensors()[0]
    assert all(torch.equal(now[k], v) for k, v in model.items()) and all(torch.equal(state[k], v) for k, v in optim.items())
    assert set(now) - set(model) == {f"blocks.{i}.attn.{x}_norm.weight" for i in (0, 1) for x in "qk"}
    if how == "ones": assert all((now[k] == 1).all() for k in set(now) - set(model))
    if how == 2.0: assert all((now[k] == 2).all() for k in set(now) - set(model))


@pytest.mark.parametrize("change, says", [(dict(rewarm=3), "give the run a parent"), (dict(insert_qk_norm="ones"), "give the run a parent"), (dict(rewarm_only="sgd"), "rewarm_only 'sgd'"),
                                          (dict(stable_adamw=True, optim=dict(weight_decay=.1)), "set weight_decay to 0"), (dict(break_batch=dict(step=1)), "break_batch needs kind, step"),
                                          (dict(parent=dict(run="a", step=1, hash="b"), insert_qk_norm="ones"), "must have qk_norm=true")])
def test_what_cannot_be_done(cfg, tmp_path, change, says):
    with pytest.raises(UserError, match=says): StabilityTrainer(replace(cfg, **change), tmp_path)


def test_a_sweep_trains_them_in_children(corpus, tmp_path):
    prof = dict(load_profile("smoke"), launcher="child", jobs=2)
    base = dict(model=NORMED | dict(qk_norm=False), optim={}, batch_size=4, seq_len=32, warmup=4, horizon=1000, probe_every=0, threads=1, order=dict(kind="interleaved"), guard="none")
    arms = [Arm("host", steps=8, keep=[4]), Arm("rescue", "host", 4, steps=8, model=NORMED, insert_qk_norm="ones", rewarm=2, watch=True, attn_every=2)]
    runs = Sweep("x", prof, arms, [1], base, data=tmp_path).run()
    rescue = runs["rescue", 1]
    rows = [json.loads(x) for x in (tmp_path / "runs" / rescue.key / "log.jsonl").read_text().splitlines()]
    assert rescue.start == 4 and len(rows) == 4 and "layer_update_norm" in rows[0]
    assert rescue.attention_step.tolist() == [4, 6] and rescue.attention.tolist() == [[float(f"{x:.4g}") for x in rows[i]["max_attention_logit"]] for i in (0, 2)]
    assert runs["host", 1].attention.size == 0
    again = Sweep("x", prof, arms, [1], base, data=tmp_path)
    assert again.run()["rescue", 1].key == rescue.key == key_of(again.config(arms[1], 1), again.manifest(again.config(arms[1], 1).corpus))


def test_attribute_takes_watched_runs_and_refuses_treated_ones(cfg, tmp_path):
    t, _, _ = train(replace(cfg, watch=True, keep=(10,)), tmp_path)
    r = Replay(tmp_path, t.key, 14)
    assert r.began == 10 and r.step == 14 and r.checked == 4 and all(abs(a - b) < 1e-4 for _, what, a, b in r.differences if what == "loss")
    parent = fork(cfg, tmp_path)
    t, _, _ = train(replace(cfg, steps=16, parent=parent, rewarm=4), tmp_path)
    with pytest.raises(UserError, match=r"treated on its way \(rewarm\)"): Replay(tmp_path, t.key, 14)
