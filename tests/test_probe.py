"""The probe: right numbers, the same to the bit every time, and a training run that cannot tell it was probed."""
import hashlib
import math

import numpy as np
import pytest
import torch

from shohin.model import GPT, GPTConfig
from shohin.probe import Probe, decompose, undisturbed
from shohin.shards import Manifest, UserError, write_shard

V = 64


@pytest.fixture
def manifest(tmp_path):
    """Three domains a tiny model can tell apart: repeated patterns of period 2, 3 and 5 with noise."""
    rng, probes = np.random.default_rng(0), {}
    for domain, (period, n, width) in {"code": (2, 4000, 1.0), "math": (3, 3000, 1.6), "web": (5, 2500, 4.0)}.items():
        tokens = np.where(rng.random(n) < .1, rng.integers(0, V, n), np.arange(n) % period + 10 * period).astype(np.uint16)
        shard = write_shard(tmp_path / "probes" / f"{domain}.u16.zst", tokens)
        probes[domain] = {"path": f"probes/{domain}.u16.zst", "tokens": n, "bytes": int(n * width), "sha256": shard.sha256}
    return Manifest(tmp_path, (), "bytes", V, None, {"probes": probes})


def tiny(seed=0):
    return GPT(GPTConfig(vocab_size=V, d_model=32, n_layer=2, n_head=2, n_kv_head=1, head_dim=16, d_ff=64, seq_len=64), seed)


class Noisy(torch.nn.Module):
    """A model with dropout, one part of it frozen in eval, that also draws random numbers when it should not."""
    def __init__(self):
        super().__init__()
        self.gpt, self.drop, self.frozen = tiny(), torch.nn.Dropout(.2), torch.nn.Dropout(.5).eval()

    def forward(self, tokens):
        torch.rand(1)
        self.seen = (self.training, torch.is_grad_enabled())
        return self.frozen(self.drop(self.gpt(tokens)))


def train(model, steps, probe=None, lr=1e-2, period=2):
    torch.manual_seed(7)
    opt, scores = torch.optim.Adam(model.parameters(), lr), []
    for _ in range(steps):
        rows = (torch.arange(33) + torch.randint(period, (4, 1))) % period + 10 * period
        torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        if probe: scores.append(probe.evaluate(model))
        opt.step(); opt.zero_grad()
    return scores


def test_a_probed_run_is_the_unprobed_run_to_the_bit(manifest):
    plain, probed = Noisy().train(), Noisy().train()
    probed.frozen.eval(), plain.frozen.eval()
    train(plain, 5)
    scores = train(probed, 5, Probe(manifest, rows=3, seq_len=32))
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), probed.state_dict().values(), strict=True))
    Probe(manifest, rows=2, seq_len=32).evaluate(probed)
    assert probed.seen == (False, False)
    assert probed.training and probed.drop.training and not probed.frozen.training
    assert scores[0]["code"]["nats_per_token"] - scores[-1]["code"]["nats_per_token"] > .1, "it never learned anything"


def test_gradients_flags_and_grad_mode_survive_a_model_that_raises(manifest):
    model, probe = Noisy().train(), Probe(manifest, rows=2, seq_len=32)
    model.frozen.eval()
    model.gpt.embed.weight.grad = torch.ones_like(model.gpt.embed.weight)
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), undisturbed(model):
        torch.rand(5)
        raise ZeroDivisionError
    probe.evaluate(model)
    assert torch.equal(torch.get_rng_state(), state) and torch.is_grad_enabled() and model.training
    assert not model.frozen.training and bool((model.gpt.embed.weight.grad == 1).all())


def test_the_same_to_the_bit_in_a_new_probe(manifest):
    model = tiny()
    first = Probe(manifest, rows=5, seq_len=48).evaluate(model)
    for _ in range(3): assert Probe(manifest, rows=5, seq_len=48).evaluate(model) == first


def test_numbers_agree_with_float64_arithmetic_done_by_hand(manifest):
    model, probe = tiny(3), Probe(manifest, rows=6, seq_len=40)
    out = probe.evaluate(model)
    for domain, entry in manifest.meta["probes"].items():
        rows = probe.rows[domain]
        logits = model(rows[:, :-1]).detach().double().numpy()
        total = 0.
        for b, t in np.ndindex(6, 40):
            x = logits[b, t]
            total += math.log(np.exp(x - x.max()).sum()) + x.max() - x[int(rows[b, t + 1])]
        nats = total / 240
        assert out[domain]["nats_per_token"] == pytest.approx(nats, abs=1e-6)
        assert out[domain]["bits_per_byte"] == pytest.approx(nats / math.log(2) * entry["tokens"] / entry["bytes"], abs=1e-6)
        assert probe.per_token_losses(model, domain).shape == (6, 40)


def test_rows_are_the_files_own_spread_over_it_and_disjoint(manifest):
    from shohin.shards import open_shard
    tokens = open_shard(manifest.root / "probes/code.u16.zst").read(0, 4000)
    rows = Probe(manifest, rows=7, seq_len=64).rows["code"].numpy()        # 61 rows to choose from
    starts = [i * 61 // 7 * 65 for i in range(7)]
    assert all((rows[i] == tokens[s:s + 65]).all() for i, s in enumerate(starts))
    every = Probe(manifest, rows=None, seq_len=64).rows["code"].numpy()
    assert (every.ravel() == tokens[:61 * 65]).all()
    assert len(Probe(manifest, rows=1000, seq_len=64).rows["code"]) == 61


def test_cutting_rows_into_forward_passes_changes_no_loss(manifest):
    class Recording(torch.nn.Module):
        def __init__(self): super().__init__(); self.gpt, self.sizes = GPT(tiny().cfg), []
        def forward(self, x): self.sizes.append(len(x)); return self.gpt(x)
    model, probe = Recording(), Probe(manifest, rows=None, seq_len=8)
    losses = probe.per_token_losses(model, "code")
    assert losses.shape == (444, 8) and model.sizes == [444]
    probe.rows["code"] = probe.rows["code"].repeat(3, 1)
    assert torch.allclose(probe.per_token_losses(model, "code"), losses.repeat(3, 1), atol=1e-6)
    assert model.sizes == [444, 910, 422]


def test_only_the_domains_asked_for(manifest):
    probe = Probe(manifest, rows=2, seq_len=32)
    assert probe.domains == ("code", "math", "web")
    assert list(probe.evaluate(tiny(), ["web", "code"])) == ["web", "code"]


def test_the_terms_of_a_real_cliff_sum_to_its_height(manifest):
    probe, models = Probe(manifest, rows=8, seq_len=32), {}
    for name in ("base", "block", "interleaved"):
        models[name] = tiny()
        train(models[name], 10, period=5)
    train(models["block"], 30, period=2)
    for period in (2, 3, 5): train(models["interleaved"], 10, period=period)
    scores = {k: probe.evaluate(m) for k, m in models.items()}
    for unit, terms in decompose(**scores, old="code", new="math").items():
        measured = scores["block"]["math"][unit] - scores["block"]["code"][unit]
        assert terms["height"] == pytest.approx(measured, abs=1e-12)
        assert sum(v for k, v in terms.items() if k != "height") == pytest.approx(measured, abs=1e-9)
        assert list(terms) == ["height", "intrinsic_gap", "forgetting", "forgone_learning", "specialisation"]
    assert terms["height"] > 0 and terms["specialisation"] > 0 and terms["forgetting"] > 0


def broken(manifest, domain="math", **change):
    probes = {d: dict(e) for d, e in manifest.meta["probes"].items()}
    probes[domain] |= change
    return Manifest(manifest.root, (), "bytes", change.pop("vocab", V), None, {"probes": probes})


def test_bad_probes_are_one_clear_line(manifest):
    other = hashlib.sha256(b"").hexdigest()
    cases = [(broken(manifest, sha256=other), {}, "probe math: probes/math.u16.zst is not the file"),
             (broken(manifest, path="probes/none.u16.zst"), {}, "none.u16.zst"),
             (broken(manifest, path="../../etc/passwd"), {}, "below the manifest's folder"),
             (manifest, {"seq_len": 3000}, "use a shorter seq_len"),
             (Manifest(manifest.root, (), "bytes", V, None, {}), {}, "lists no probes"),
             (Manifest(manifest.root, (), "bytes", 20, None, manifest.meta), {}, "outside the vocabulary of 20")]
    for m, kwargs, message in cases:
        with pytest.raises(UserError) as error: Probe(m, **kwargs)
        assert message in str(error.value) and "\n" not in str(error.value), str(error.value)
