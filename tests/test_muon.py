"""Muon against PyTorch's and against float64; the split, the clamp, the norms, and state that comes back bit for bit."""
import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from shohin import muon
from shohin.model import GPT, GPTConfig
from shohin.muon import KJ, Muon, Optimizers, make_optimizers, newton_schulz, split_params
from shohin.shards import UserError

SHAPES = [(64, 64), (24, 96), (96, 24), (24, 96), (40, 40), (96, 25)]
SMALL = dict(vocab_size=61, n_layer=2, d_model=48, n_head=6, n_kv_head=2, head_dim=16, d_ff=80, seq_len=64)


def parameters(dtype=torch.float32, shapes=SHAPES):
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter((0.02 * torch.randn(s, generator=g, dtype=torch.float64)).to(dtype)) for s in shapes]


def train(opt, params, steps=4, seed=1):
    "The same gradients for any optimizer; returns what it changed, in float64."
    g, before = torch.Generator().manual_seed(seed), [p.detach().clone() for p in params]
    for _ in range(steps):
        for p in params: p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)
        opt.step()
    return [(p.detach().double() - b.double()) for p, b in zip(params, before, strict=True)]


def relative(a, b): return max(((x - y).norm() / y.norm()).item() for x, y in zip(a, b, strict=True))


class Reference:
    "Muon as Keller Jordan's file states it, one matrix at a time, in float64, nothing shared with ours."
    def __init__(self, params, lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.0):
        self.params, self.hyper, self.bufs = params, (lr, momentum, nesterov, weight_decay), [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self):
        lr, mu, nesterov, wd = self.hyper
        for p, m in zip(self.params, self.bufs, strict=True):
            m.copy_(mu*m + (1 - mu)*p.grad)
            u = mu*m + (1 - mu)*p.grad if nesterov else m
            U, s, Vt = torch.linalg.svd(u, full_matrices=False)
            s = s / s.square().sum().sqrt()
            for _ in range(5): s = KJ[0]*s + KJ[1]*s**3 + KJ[2]*s**5     # the iteration is this polynomial on singular values
            p.copy_(p*(1 - lr*wd) - lr*math.sqrt(max(1, p.shape[0]/p.shape[1])) * (U*s) @ Vt)


@pytest.mark.parametrize("hyper", [{}, dict(nesterov=False), dict(weight_decay=0.1), dict(lr=0.3, momentum=0.5)])
def test_fp32_agrees_with_float64(hyper):
    exact, ours = parameters(torch.float64), parameters()
    assert relative(train(Muon(ours, **hyper), ours), train(Reference(exact, **hyper), exact)) < 1e-5


def test_float64_is_exact():
    exact, ours = parameters(torch.float64), parameters(torch.float64)
    assert relative(train(Muon(ours), ours), train(Reference(exact), exact)) < 1e-12


@pytest.mark.parametrize("hyper", [{}, dict(nesterov=False), dict(weight_decay=0.1), dict(lr=0.1, momentum=0.8)])
def test_bf16_agrees_with_pytorch(hyper):
    theirs, ours = parameters(), parameters()
    expected = train(torch.optim.Muon(theirs, **dict(lr=0.02, weight_decay=0.0) | hyper), theirs)
    assert relative(train(Muon(ours, ns_dtype=torch.bfloat16, **hyper), ours), expected) < 2e-2


def test_bf16_and_fp32_are_told_apart():
    "The two tests above would each fail on the other's path."
    exact, a, b = parameters(torch.float64), parameters(), parameters()
    expected = train(Reference(exact), exact)
    assert relative(train(Muon(a, ns_dtype=torch.bfloat16), a), expected) > 3e-3 > 1e-5 > relative(train(Muon(b), b), expected)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8), st.sampled_from([1, 50, 2**22]))
def test_batched_is_one_by_one(shapes, stack):
    together, alone = parameters(shapes=shapes), parameters(shapes=shapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "CPU_STACK", stack)
        a = train(Muon(together), together, steps=2)
    singles = [Muon([p]) for p in alone]
    class Each:
        def step(self): [o.step() for o in singles]
    for x, y in zip(a, train(Each(), alone, steps=2), strict=True): torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)


def test_the_singular_values_of_five_steps():
    "Measured once for a 64x256 normal matrix: .682-1.134 (the quintic does not settle at 1)."
    torch.manual_seed(0)
    s = torch.linalg.svdvals(newton_schulz(torch.randn(8, 64, 256)))
    assert 0.65 < s.min() < 0.75 and 1.10 < s.max() < 1.16


def test_the_gradient_is_left_alone():
    params = parameters()
    for p in params: p.grad = torch.randn_like(p)
    kept = [p.grad.clone() for p in params]
    Muon(params, trust_clamp=0.1, weight_decay=0.1).step()
    assert all(torch.equal(p.grad, k) for p, k in zip(params, kept, strict=True))


@pytest.mark.parametrize("shape", [(3, 4, 5), (7,), ()])
def test_only_matrices(shape):
    with pytest.raises(ValueError, match="parameter odd has shape"): Muon([("odd", nn.Parameter(torch.zeros(shape)))])


def test_a_parameter_without_a_gradient_is_not_touched():
    params = parameters()
    params[0].grad = torch.ones_like(params[0])
    opt, kept = Muon(params, weight_decay=0.1), [p.detach().clone() for p in params]
    opt.step()
    assert not torch.equal(params[0], kept[0])
    assert all(torch.equal(p, k) for p, k in zip(params[1:], kept[1:], strict=True)) and set(opt.state) == {params[0]}


def test_a_non_finite_gradient_goes_through():
    "Documented: Muon does not look. The guards keep `step` from being called; this is what they keep out."
    params = parameters(shapes=[(8, 8), (8, 8)])
    opt = Muon(params)
    for p in params: p.grad = torch.randn_like(p)
    params[0].grad[0, 0] = math.nan
    opt.step()
    assert params[0].isnan().any() and opt.state[params[0]]["momentum_buffer"].isnan().any()
    assert params[1].isfinite().all()                       # and it stays in its own matrix, though batched with another


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_clamp_binds_exactly_where_it_should(dtype):
    torch.manual_seed(0)
    large, small, zero = nn.Parameter(100*torch.randn(16, 16)), nn.Parameter(1e-3*torch.randn(16, 16)), nn.Parameter(torch.zeros(16, 16))
    params = dict(large=large, small=small, zero=zero)
    opt, free = Muon(params.items(), trust_clamp=0.01, ns_dtype=dtype), Muon(copy.deepcopy(list(params.values())), ns_dtype=dtype)
    opt.record_norms = True
    for i, p in enumerate(params.values()):
        p.grad = torch.randn_like(p); free.param_groups[0]["params"][i].grad = p.grad.clone()
    before = {n: p.detach().clone() for n, p in params.items()}
    opt.step(); free.step()
    assert int(opt.clamped) == 1
    moved = {n: (p.detach() - before[n]) for n, p in params.items()}
    torch.testing.assert_close(moved["small"].norm(), 0.01*before["small"].norm(), rtol=1e-6, atol=0)
    for name, i in ("large", 0), ("zero", 2): assert torch.equal(params[name], free.param_groups[0]["params"][i])
    unclamped = free.param_groups[0]["params"][1].detach() - before["small"]       # the same direction, only shorter
    assert torch.cosine_similarity(moved["small"].flatten(), unclamped.flatten(), dim=0) > 1 - 1e-6
    for n in params:                                        # of a weight near 100, fp32 keeps few digits of a small update
        torch.testing.assert_close(opt.update_norms[n], moved[n].norm(), rtol=1e-3 if n == "large" else 2e-5, atol=0)


def test_state_dict_continues_bit_for_bit():
    a = parameters(); opt_a = Muon(a, trust_clamp=0.05); train(opt_a, a)
    b = copy.deepcopy(a); opt_b = Muon(b, lr=9.0); opt_b.load_state_dict(copy.deepcopy(opt_a.state_dict()))
    assert opt_b.param_groups[0]["lr"] == 0.02
    train(opt_a, a, seed=2); train(opt_b, b, seed=2)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# who gets what

def test_split_is_complete_and_by_role():
    model = GPT(GPTConfig(**SMALL, tie_embeddings=False))
    matrices, others = split_params(model)
    assert matrices.keys() | others.keys() == dict(model.named_parameters()).keys() and not matrices.keys() & others.keys()
    assert len(matrices) == 2*7 and all(n.startswith("blocks.") and p.ndim == 2 for n, p in matrices.items())
    assert {"embed.weight", "head.weight", "norm.weight"} < others.keys()
    assert all(p.ndim == 1 for n, p in others.items() if n.startswith("blocks."))


@pytest.mark.parametrize("arch", ["Llama", "Qwen3", "GPT2"])
def test_split_of_other_peoples_models(arch):
    import transformers
    small = dict(vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12)
    if arch == "GPT2": small = dict(vocab_size=61, n_embd=48, n_layer=2, n_head=4, n_positions=32)
    model = getattr(transformers, f"{arch}LMHeadModel" if arch == "GPT2" else f"{arch}ForCausalLM")(getattr(transformers, f"{arch}Config")(**small))
    matrices, others = split_params(model)
    assert len(matrices) == 2*(4 if arch == "GPT2" else 7)
    assert not [n for n in matrices if "emb" in n or "head" in n or "wte" in n] and sum("emb" in n or "wte" in n for n in others) >= 1


def test_split_of_a_model_without_layers_is_refused():
    with pytest.raises(UserError, match=r"no matrices inside an nn\.ModuleList"): split_params(nn.Linear(3, 3))


# both as one

def one_step(model, opts, seed, skip=()):
    rows = torch.randint(61, (3, 33), generator=torch.Generator().manual_seed(seed))
    opts.zero_grad(); loss = model.loss(rows).total; loss.backward(); opts.step()
    return loss.item()


SPECS = {"muon": {}, "adamw": dict(no_muon=True), "decay": dict(weight_decay=0.1), "clamp": dict(trust_clamp=0.01),
         "adamw decay": dict(no_muon=True, weight_decay=0.1, betas=(0.9, 0.999))}


@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("spec", SPECS)
def test_the_update_norm_is_what_the_weights_moved(spec, dtype, tol):
    model = GPT(GPTConfig(**SMALL)).to(dtype)
    opts = make_optimizers(model, SPECS[spec])
    for i in range(4):
        before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
        opts.set_lr(1 / (1 + i))
        one_step(model, opts, i)
        moved = {n: (p.detach().double() - before[n]).norm() for n, p in model.named_parameters()}
        total = torch.stack(list(moved.values())).norm().item()
        assert opts.update_norm == pytest.approx(total, rel=tol)
        assert opts.update_norms.keys() == moved.keys()
        for n in moved: assert opts.update_norms[n].item() == pytest.approx(moved[n].item(), rel=1e-3 if dtype == torch.float32 else tol), n
    assert (0 < opts.clamped_share <= 1) == (spec == "clamp")


def test_the_schedule_multiplies_both_rates():
    opts = make_optimizers(GPT(GPTConfig(**SMALL)))
    opts.set_lr(0.5)
    assert opts.muon.param_groups[0]["lr"] == 0.01 and opts.adamw.param_groups[0]["lr"] == 1.5e-3
    opts.set_lr(1.0)
    assert opts.muon.param_groups[0]["lr"] == 0.02 and opts.adamw.param_groups[0]["lr"] == 3e-3


def test_adamw_is_pytorchs():
    "With `no_muon` every weight moves as torch.optim.AdamW (not fused) moves it."
    a, b = GPT(GPTConfig(**SMALL)), GPT(GPTConfig(**SMALL))
    ours, plain = make_optimizers(a, dict(no_muon=True)), torch.optim.AdamW(b.parameters(), 3e-3, (0.9, 0.95), weight_decay=0.0, foreach=False)
    class Plain:
        zero_grad, step = plain.zero_grad, plain.step
    for i in range(5): one_step(a, ours, i); one_step(b, Plain, i)
    for x, y in zip(a.parameters(), b.parameters(), strict=True): torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", ["muon", "adamw"])
@pytest.mark.parametrize("after", [0, 3])
def test_saved_state_continues_bit_for_bit(spec, after, tmp_path):
    model = GPT(GPTConfig(**SMALL)); opts = make_optimizers(model, SPECS[spec])
    for i in range(after): one_step(model, opts, i)
    tensors, scalars = opts.state_tensors()
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path/"opt.safetensors")
    twin = copy.deepcopy(model); again = make_optimizers(twin, SPECS[spec])
    if after: one_step(copy.deepcopy(model), make_optimizers(copy.deepcopy(model), SPECS[spec]), 7)     # others may train meanwhile
    assert again.load_state_tensors(load_file(tmp_path/"opt.safetensors"), dict(scalars)) == []
    for i in range(3): assert one_step(model, opts, 10+i) == one_step(twin, again, 10+i)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), twin.parameters(), strict=True))
    (ta, sa), (tb, sb) = opts.state_tensors(), again.state_tensors()
    assert sa == sb and ta.keys() == tb.keys() and all(torch.equal(ta[n], tb[n]) for n in ta)
    assert set(sa.values()) == {after + 3.0}


def test_state_is_named_by_parameter():
    tensors, scalars = make_optimizers(GPT(GPTConfig(**SMALL))).state_tensors()
    assert {"muon.momentum.blocks.0.attn.wq.weight", "adamw.exp_avg.embed.weight", "adamw.exp_avg_sq.norm.weight"} < tensors.keys()
    assert {"adamw.step.embed.weight", "adamw.step.blocks.1.attn.q_norm.weight"} < scalars.keys()


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    model = GPT(GPTConfig(**SMALL)); opts = make_optimizers(model); one_step(model, opts, 0)
    tensors, scalars = opts.state_tensors()
    fresh = lambda **kw: make_optimizers(GPT(GPTConfig(**SMALL | kw)))
    for other, says in ((fresh(n_layer=3), "lacks .*blocks.2"), (fresh(n_layer=1), "has .*blocks.1"), (fresh(qk_norm=False), "has .*_norm"),
                        (fresh(d_ff=96), "has shape")):
        with pytest.raises(UserError, match=says): other.load_state_tensors(tensors, scalars)
        assert all((t == 0).all() for t in other.state_tensors()[0].values()), says


def test_an_optimizer_switched_mid_run_keeps_what_it_can():
    "--no-muon as the seed did it: moments of the rest go on, those of the matrices start fresh."
    model = GPT(GPTConfig(**SMALL)); opts = make_optimizers(model)
    for i in range(3): one_step(model, opts, i)
    switched = make_optimizers(model, dict(no_muon=True))
    fresh = switched.load_state_tensors(*opts.state_tensors(), strict=False)
    matrices, others = split_params(model)
    assert {n.removeprefix("adamw.exp_avg.") for n in fresh if n.startswith("adamw.exp_avg.")} == matrices.keys()
    for p in others.values(): assert torch.equal(switched.adamw.state[p]["exp_avg"], opts.adamw.state[p]["exp_avg"]) and switched.adamw.state[p]["step"] == 3
    for p in matrices.values(): assert switched.adamw.state[p]["step"] == 0
    one_step(model, switched, 9)


def test_an_unknown_setting_is_one_line():
    with pytest.raises(UserError, match=r"optim\.lr: no such setting"): Optimizers(GPT(GPTConfig(**SMALL)), lr=1)


def test_training_lowers_the_loss():
    for spec in ("muon", "adamw"):
        model = GPT(GPTConfig(**SMALL)); opts = make_optimizers(model, SPECS[spec])
        losses = [one_step(model, opts, 0) for _ in range(15)]
        assert losses[0] > 4.0 and losses[-1] < 0.8*losses[0]
