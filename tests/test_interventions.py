"""The interventions against their formulas done by hand, and in a real loop that is stopped and resumed."""
import copy
import math

import numpy as np
import pytest
import torch

from shohin.interventions import AdaGC, StableAdamW, UpdateNormClip, adam_rms, spike_clip_
from shohin.model import GPT, GPTConfig
from shohin.muon import Optimizers
from shohin.shards import UserError


def gradients(n, steps, seed=0, spikes=()):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=n) * .1 * (20 if t in spikes else 1) for t in range(steps)]


def feed(opt, p, grads):
    "Step through gradients; the parameter after each step, (steps, n)."
    out = []
    for g in grads:
        p.grad = torch.tensor(g, dtype=p.dtype)
        opt.step()
        out.append(p.detach().clone())
    return torch.stack(out)


def param(n=50, seed=0, dtype=torch.float64):
    return torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype))


# --- StableAdamW ---------------------------------------------------------------------------------------------------

def test_stable_adamw_is_algorithm_2():
    p = param()
    x, m, v = p.detach().numpy().copy(), np.zeros(50), np.zeros(50)
    lr, b1, b2, eps, wd = .01, .9, .95, 1e-8, .1
    opt = StableAdamW([p], lr, (b1, b2), eps, wd)
    clipped = 0
    for t, g in enumerate(gradients(50, 60, spikes=(20, 40)), 1):
        # the paper's form: debiased betas instead of bias correction
        b1t, b2t = (b * (1 - b ** (t - 1)) / (1 - b ** t) for b in (b1, b2))
        m, v = b1t * m + (1 - b1t) * g, b2t * v + (1 - b2t) * g * g
        rms = math.sqrt(np.mean(g * g / np.maximum(v, eps ** 2)))
        x = x * (1 - lr * wd) - lr / max(1, rms) * m / (np.sqrt(v) + eps)
        clipped += rms > 1.5
        assert np.allclose(feed(opt, p, [g])[-1].numpy(), x, atol=1e-12), t
        assert opt.rms[p].item() == pytest.approx(rms) == adam_rms(opt)[p].item()
    assert clipped == 2


def test_without_an_rms_above_one_it_is_torchs_adamw():
    grads = [g * .8 ** t for t, g in enumerate(gradients(50, 30))]     # v always lags above
    p, q = param(), param()
    stable, adamw = StableAdamW([p], .01, weight_decay=.1), torch.optim.AdamW([q], .01, (.9, .95), weight_decay=.1)
    a, b = feed(stable, p, grads), feed(adamw, q, grads)
    assert all(r <= 1.0000001 for r in [stable.rms[p].item()])
    assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_adam_rms_reads_any_torch_adam(fused):
    p = param(dtype=torch.float32)
    opt = torch.optim.AdamW([p], .01, (.9, .95), fused=fused)
    grads = gradients(50, 10, spikes=(9,))
    feed(opt, p, grads)
    v = sum(.05 * .95 ** (9 - t) * g * g for t, g in enumerate(grads)) / (1 - .95 ** 10)
    assert adam_rms(opt)[p].item() == pytest.approx(math.sqrt(np.mean(grads[-1] ** 2 / v)), rel=1e-5)
    p.grad = None
    assert adam_rms(opt) == {}


def test_a_run_changes_from_adamw_to_stable_and_back_with_its_moments():
    grads = gradients(50, 40)
    p = param()
    adamw = torch.optim.AdamW([p], .01, (.9, .95), weight_decay=0.)
    feed(adamw, p, grads[:20])
    stable = StableAdamW([p], .5)
    stable.load_state_dict(copy.deepcopy(adamw.state_dict()))
    assert stable.param_groups[0]["lr"] == .01 and torch.equal(stable.state[p]["exp_avg_sq"], adamw.state[p]["exp_avg_sq"])
    feed(stable, p, grads[20:30])
    assert float(stable.state[p]["step"]) == 30
    back = torch.optim.AdamW([p], .5)
    back.load_state_dict(copy.deepcopy(stable.state_dict()))
    feed(back, p, grads[30:])
    assert float(back.state[p]["step"]) == 40 and bool(p.isfinite().all())


def test_stable_adamw_leaves_parameters_without_gradient_alone():
    p, q = param(), param()
    opt = StableAdamW([p, q], .1, weight_decay=.5)
    before = q.detach().clone()
    feed(opt, p, gradients(50, 3))
    assert torch.equal(q, before) and q not in opt.rms
    assert opt.step(lambda: 4.5) == 4.5


# --- the history of update norms -----------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_update_norm_clip_is_its_formula_around_any_optimizer(kind):
    make = {"adamw": lambda p: torch.optim.AdamW([p], .01, (.9, .95), weight_decay=.1),
            "adam": lambda p: torch.optim.Adam([p], .01, (.9, .95), weight_decay=.1),   # coupled: part of the update
            "sgd": lambda p: torch.optim.SGD([p], .01)}[kind]
    decay = .1 if kind == "adamw" else 0
    p, free = param(), param()
    opt, unclipped = make(p), make(free)
    clip, history, cut = UpdateNormClip(opt, sigma=2.0), [], 0
    for t, g in enumerate(gradients(50, 300, spikes=(100, 101, 250))):
        with torch.no_grad(): free.copy_(p)         # the same step without the clip, from the same point
        if t: unclipped.load_state_dict(copy.deepcopy(opt.state_dict()))
        x = p.detach().clone()
        feed(unclipped, free, [g])
        u = (x * (1 - .01 * decay) - free.detach()) / .01
        limit = np.mean(history) + 2 * max(np.std(history), 1e-6) if len(history) >= 64 else np.inf
        assert clip.limit == pytest.approx(limit)
        p.grad = torch.tensor(g)
        with clip: opt.step()
        scale = min(1., limit / u.norm().item())
        assert torch.allclose(p, x * (1 - .01 * decay) - .01 * scale * u, atol=1e-10)
        assert clip.scale == pytest.approx(scale) and clip.norm == pytest.approx(u.norm().item())
        history = [*history, u.norm().item()][-128:]
        cut += scale < 1
    assert clip.norms == pytest.approx(history) and cut >= 2


def test_the_norm_is_taken_over_all_optimizers_together():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, d_model=16, n_layer=1, n_head=2, n_kv_head=1, head_dim=8, d_ff=32, seq_len=16))
    opts = Optimizers(model, muon_lr=.02, adamw_lr=1e-3)
    clip = UpdateNormClip(*opts.parts)
    model.loss(torch.randint(32, (4, 17))).total.backward()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with clip: opts.step()
    lrs = {p: g["lr"] for o in opts.parts for g in o.param_groups for p in g["params"]}
    squares = [((before[n] - p) / lrs[p]).square().sum().item() for n, p in model.named_parameters()]
    assert clip.norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-4) and set(lrs.values()) == {.02, 1e-3}


def test_what_the_history_never_takes_in():
    p = param(4)
    opt = torch.optim.SGD([p], .1)
    clip = UpdateNormClip(opt)
    for g in gradients(4, 70):
        p.grad = torch.tensor(g)
        with clip: opt.step()
    norms = list(clip.norms)
    with pytest.raises(ZeroDivisionError), clip: raise ZeroDivisionError
    assert clip.norms == norms
    p.grad = torch.full((4,), math.nan, dtype=p.dtype)
    with clip: opt.step()
    assert clip.norms == norms and clip.scale == 1
    opt.param_groups[0]["lr"] = 0.
    with clip: opt.step()
    assert clip.norms == norms


# --- AdaGC ---------------------------------------------------------------------------------------------------------

def adagc_by_hand(grads, rel=1.05, beta=.98, absolute=1., warmup=100):
    "The published loop over one list of gradients a step; the clipped gradients."
    gamma, out = {}, []
    for t, step in enumerate(grads, 1):
        total, clipped = math.sqrt(sum(float((g ** 2).sum()) for g in step)), []
        for i, g in enumerate(step):
            n = float(np.linalg.norm(g))
            h = min(absolute / total, 1) if t < warmup else min(rel * gamma[i] / n, 1)
            if t < warmup: gamma[i] = min(gamma.get(i, math.inf), h * n)
            else: gamma[i] = beta * gamma[i] + (1 - beta) * h * n
            clipped.append(h * g)
        out.append(clipped)
    return out, gamma


def test_adagc_is_the_published_loop():
    rng = np.random.default_rng(0)
    grads = [[rng.normal(size=s) * scale * (30 if (t, s) in {(50, 7), (150, 7), (200, 3)} else 1)
              for s, scale in ((7, .05), (3, .4))] for t in range(260)]
    params = {"a": param(7), "b": param(3)}
    adagc = AdaGC(params.items())
    want, gamma = adagc_by_hand(grads)
    for step, clipped in zip(grads, want, strict=True):
        for p, g in zip(params.values(), step, strict=True): p.grad = torch.tensor(g)
        total = adagc.clip_()
        assert total.item() == pytest.approx(math.sqrt(sum((g ** 2).sum() for g in step)), rel=1e-5)
        for p, g in zip(params.values(), clipped, strict=True): assert np.allclose(p.grad.numpy(), g, rtol=1e-4)
    assert adagc.state_dict() == {"step": 260, "gamma": pytest.approx({"a": gamma[0], "b": gamma[1]}, rel=1e-4)}


def test_a_zero_gradient_in_the_warm_up_does_not_freeze_a_tensor():
    p, q = param(4), param(4)
    adagc = AdaGC([("p", p), ("q", q)], warmup=5)
    for t in range(25):
        p.grad, q.grad = torch.full_like(p, 0. if t < 7 or 15 < t < 20 else .1), torch.full_like(q, .1)
        adagc.clip_()
    assert p.grad.norm().item() == pytest.approx(.2) and adagc.gamma.tolist() == pytest.approx([.2, .2], rel=.01)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("warmup", [5, 100])
def test_a_non_finite_gradient_leaves_no_trace_in_adagc(bad, warmup):
    p, q = param(4), param(4)
    adagc = AdaGC([("p", p), ("q", q)], warmup=warmup)
    for _ in range(10):
        p.grad, q.grad = torch.full_like(p, .1), torch.full_like(q, .2)
        adagc.clip_()
    gamma = adagc.gamma.clone()
    p.grad, q.grad = torch.full_like(p, bad), torch.full_like(q, .2)
    assert not adagc.clip_().isfinite()
    assert torch.equal(adagc.gamma, gamma) and torch.equal(q.grad, torch.full_like(q, .2))


def test_adagc_skips_what_has_no_gradient_and_refuses_another_models_state():
    p, q = param(4), param(4)
    adagc = AdaGC([("p", p), ("q", q)])
    p.grad = torch.full_like(p, .1)
    adagc.clip_()
    assert adagc.gamma.tolist() == pytest.approx([.2, 0.])
    with pytest.raises(UserError, match="differ in parameter r"):
        AdaGC([("p", p), ("r", q)]).load_state_dict(adagc.state_dict() | {"gamma": {"p": 1.}})


# --- SPAM ----------------------------------------------------------------------------------------------------------

def test_spike_clip_caps_exactly_the_outlying_coordinates():
    p = param()
    opt = torch.optim.AdamW([p], .01, (.9, .95))
    p.grad = torch.ones_like(p)
    assert spike_clip_(opt).item() == 0 and bool((p.grad == 1).all()), "no moments yet"
    feed(opt, p, gradients(50, 30))
    v = opt.state[p]["exp_avg_sq"].clone()
    g = torch.randn_like(p) * .1
    g[:4] = torch.tensor([1., -1., 1., -1.]) * (5000 * v[:4]).sqrt() * torch.tensor([1.01, 1.01, .99, .99])
    p.grad = g.clone()
    v[5] = opt.state[p]["exp_avg_sq"][5] = 0.     # never had a gradient: nothing to compare with
    assert spike_clip_(opt).item() == pytest.approx(2 / 50)
    want = g.clone()
    want[:2] = torch.tensor([1., -1.]) * (5000 * v[:2]).sqrt()
    assert torch.allclose(p.grad, want)


# --- in a real loop ------------------------------------------------------------------------------------------------

class Run:
    """A tiny model trained with all pieces at once, as somebody's own loop would have them."""
    def __init__(self):
        self.model = GPT(GPTConfig(vocab_size=32, d_model=16, n_layer=1, n_head=2, n_kv_head=1, head_dim=8, d_ff=32, seq_len=16))
        self.opt = StableAdamW(self.model.parameters(), 3e-3)
        self.adagc, self.clip = AdaGC(self.model.named_parameters(), warmup=10), UpdateNormClip(self.opt, sigma=-1, window=32)
        self.losses, self.scales = [], []

    def step(self, t):
        rows = (torch.arange(17) * (1 + t % 3) + t) % 32
        loss = self.model.loss(rows[None].repeat(4, 1)).total
        self.opt.zero_grad(); loss.backward()
        self.adagc.clip_(); spike_clip_(self.opt)
        with self.clip: self.opt.step()
        self.losses.append(loss.item()); self.scales.append(self.clip.scale)

    def state(self):
        return copy.deepcopy([x.state_dict() for x in (self.model, self.opt, self.adagc, self.clip)])

    def load(self, state):
        for x, s in zip((self.model, self.opt, self.adagc, self.clip), state, strict=True): x.load_state_dict(s)


def test_a_resumed_run_is_the_run_that_never_stopped():
    whole, first, second = Run(), Run(), Run()
    for t in range(40): whole.step(t)
    for t in range(23): first.step(t)
    second.load(first.state())
    for t in range(23, 40): second.step(t)
    assert first.losses + second.losses == whole.losses
    assert first.scales + second.scales == whole.scales and min(second.scales) < 1
    assert whole.losses[-1] < .85 * whole.losses[0] and whole.clip.norms == second.clip.norms
    assert torch.equal(whole.adagc.gamma, second.adagc.gamma)
