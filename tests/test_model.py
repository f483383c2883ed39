"""The model against an independent one (Hugging Face's), against mutants of itself, and against its promises."""
import inspect
import json
import math
import textwrap

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shohin import model as M
from shohin.model import (
    GPT,
    GPTConfig,
    Loss,
    apply_rope,
    attention_logits,
    from_hf_config,
    from_hf_state_dict,
    lm_loss,
    max_attention_logit,
    to_hf_config,
    to_hf_state_dict,
)
from shohin.shards import UserError

SMALL = dict(vocab_size=61, n_layer=3, d_model=48, n_head=6, n_kv_head=2, head_dim=16, d_ff=80, seq_len=64)


def loud(cfg, seed=0, gains="random"):
    "A float64 model whose weights have std 0.3 and whose gains are not 1: nothing is small enough to hide."
    model, g = GPT(cfg, seed=seed).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2: p.copy_(0.3 * torch.randn(p.shape, generator=g, dtype=torch.float64))
            elif gains == "random" or "attn" not in name: p.copy_(torch.empty_like(p).uniform_(0.5, 2.0, generator=g))
    return model


@pytest.fixture(scope="module")
def float64():
    """Hugging Face computes RMSNorm and the softmax in float32 whatever the weights are, and weights of std 0.3 amplify
    that beyond 1e-5. So its own lines are compiled again with one word changed."""
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3 import modeling_qwen3
    def widened(f):
        source, scope = textwrap.dedent(inspect.getsource(f)), {}
        assert "torch.float32" in source, "Hugging Face changed: look again"
        exec(source.replace("torch.float32", "torch.float64"), f.__globals__, scope)
        return scope[f.__name__]
    with pytest.MonkeyPatch.context() as patch:
        for module, norm in (modeling_llama, modeling_llama.LlamaRMSNorm), (modeling_qwen3, modeling_qwen3.Qwen3RMSNorm):
            patch.setattr(norm, "forward", widened(norm.forward))
            patch.setattr(module, "eager_attention_forward", widened(module.eager_attention_forward))
        yield


def hugging_face(model):
    "Hugging Face's Qwen3 (QK-norm) or Llama with the same weights, in float64, its attention written out (eager)."
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    Config, CausalLM = (Qwen3Config, Qwen3ForCausalLM) if model.cfg.qk_norm else (LlamaConfig, LlamaForCausalLM)
    hf = CausalLM(Config(**to_hf_config(model.cfg), attn_implementation="eager")).double().eval()
    state = to_hf_state_dict(model)
    if model.cfg.tie_embeddings: state["lm_head.weight"] = state["model.embed_tokens.weight"]
    hf.load_state_dict(state, strict=True)
    return hf


@torch.no_grad()
def largest_difference(model, hf, seed=1):
    tokens = torch.randint(model.cfg.vocab_size, (2, model.cfg.seq_len), generator=torch.Generator().manual_seed(seed))
    return (model(tokens) - hf(tokens).logits).abs().max().item()


@pytest.mark.parametrize("shape", [{}, dict(tie_embeddings=False), dict(n_kv_head=6), dict(n_kv_head=1, rope_theta=10_000.0)])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_same_logits_as_hugging_face(qk_norm, shape, float64):
    model = loud(GPTConfig(**SMALL | shape, qk_norm=qk_norm))
    assert largest_difference(model, hugging_face(model)) < 1e-10


# Mutants: each replaces one line of our attention by the plausible mistake. The comparison above must see every one.
def interleaved_rope(x, cos, sin):
    "Pairs of neighbours (x[2i], x[2i+1]), as in the RoFormer paper."
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a*cos - b*sin, b*cos + a*sin), dim=-1).flatten(-2)


def swapped_repeat(q, k, v, **kw):
    "Query head h reads key head h mod K, instead of h // (H/K)."
    g = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, k.repeat(1, g, 1, 1), v.repeat(1, g, 1, 1), is_causal=True)


def norm_after_rope(self, x, cos, sin):
    q, k = self.heads(self.wq(x)), self.heads(self.wk(x))
    return self.q_norm(apply_rope(q, cos, sin)), self.k_norm(apply_rope(k, cos, sin))


MUTANTS = {"interleaved RoPE": (M, "apply_rope", interleaved_rope),
           "swapped GQA repeat": (M, "causal_attention", swapped_repeat),
           "norm after RoPE": (M.Attention, "queries_keys", norm_after_rope)}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_reference_sees_each_mutant(mutant, monkeypatch, float64):
    model = loud(GPTConfig(**SMALL))
    hf = hugging_face(model)
    monkeypatch.setattr(*MUTANTS[mutant])
    assert largest_difference(model, hf) > 0.1


def test_gains_of_one_would_hide_a_norm_after_rope(monkeypatch, float64):
    "Why the comparison draws random gains: RoPE keeps lengths, so with equal gains the order cannot be seen."
    model = loud(GPTConfig(**SMALL), gains="ones")
    hf = hugging_face(model)
    monkeypatch.setattr(*MUTANTS["norm after RoPE"])
    assert largest_difference(model, hf) < 1e-5


def test_the_seed_model_has_125_million_parameters():
    with torch.device("meta"): model = GPT(GPTConfig.shohin_135m())
    assert round(model.n_params() / 1e6, 1) == 125.1
    assert GPT.__init__ and model.blocks[0].attn.q_norm.weight.shape == (64,)   # one gain vector, shared over heads
    assert model.head is None                                                  # tied


@pytest.mark.parametrize("bad, says", [
    (dict(n_kv_head=4), "n_kv_head=4 does not divide model.n_head=6"),
    (dict(head_dim=15), "head_dim=15 is odd"), (dict(n_layer=0), "n_layer=0"), (dict(d_model="48"), "d_model='48'"),
    (dict(d_ff=True), "d_ff=True"), (dict(seq_len=2.5), "seq_len=2.5"), (dict(rope_theta=0), "rope_theta=0"),
    (dict(norm_eps=float("nan")), "norm_eps=nan"), (dict(z_loss=-1), "z_loss=-1"), (dict(init_std="x"), "init_std='x'"),
    (dict(qk_norm="true"), "qk_norm='true'"), (dict(tie_embeddings=1), "tie_embeddings=1")])
def test_a_config_that_cannot_be_is_one_line(bad, says):
    with pytest.raises(UserError) as e: GPTConfig(**SMALL | bad)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_a_config_from_a_file():
    d = json.loads(json.dumps(SMALL))
    assert GPTConfig.from_dict(d) == GPTConfig(**SMALL)
    with pytest.raises(UserError, match=r"model\.n_heads: no such field"): GPTConfig.from_dict(d | dict(n_heads=6))
    with pytest.raises(UserError, match=r"model\.d_ff is missing"): GPTConfig.from_dict({k: v for k, v in d.items() if k != "d_ff"})


def test_weights_are_a_function_of_the_seed_alone():
    torch.manual_seed(1); a = GPT(GPTConfig(**SMALL), seed=3)
    torch.manual_seed(2); b = GPT(GPTConfig(**SMALL), seed=3)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    bare = GPT(GPTConfig(**SMALL, qk_norm=False), seed=3).state_dict()
    assert all(torch.equal(t, a.state_dict()[n]) for n, t in bare.items())     # QK-norm draws nothing
    assert not torch.equal(GPT(GPTConfig(**SMALL), seed=4).embed.weight, a.embed.weight)
    stds = {n: p.std().item() for n, p in a.named_parameters() if p.ndim == 2}
    assert all(abs(s - 0.02) < 0.003 for s in stds.values()), stds
    assert all((p == 1).all() for p in a.parameters() if p.ndim == 1)


def test_the_loss_per_row():
    torch.manual_seed(0)
    model, rows = GPT(GPTConfig(**SMALL)), torch.randint(61, (5, 33))
    loss = model.loss(rows)
    logits = model(rows[:, :-1])
    assert isinstance(loss, Loss) and loss.ce.shape == (5,) and logits.dtype == torch.float32
    each = torch.stack([F.cross_entropy(lg, t) for lg, t in zip(logits, rows[:, 1:], strict=True)])
    z = logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(loss.ce, each)
    torch.testing.assert_close(loss.z, z)
    torch.testing.assert_close(loss.total, each.mean() + 1e-4*z)


def test_the_gradient_of_the_loss_in_float64():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True), torch.randint(7, (2, 3))
    assert torch.autograd.gradcheck(lambda x: lm_loss(x, targets, 0.1).total, (logits,))


def test_bf16_weights_still_give_an_fp32_loss():
    model = GPT(GPTConfig(**SMALL)).bfloat16()
    rows = torch.randint(61, (2, 17))
    assert model(rows).dtype == model.loss(rows).ce.dtype == torch.float32


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 17), st.integers(0, 99))
def test_the_largest_attention_logit_is_that_of_the_masked_matrix(B, K, g, T, block, seed):
    torch.manual_seed(seed)
    q, k = torch.randn(B, K*g, T, 8), torch.randn(B, K, T, 8)
    S = (q @ k.repeat_interleave(g, 1).mT / math.sqrt(8)).abs()
    expected = S.masked_fill(~torch.ones(T, T, dtype=bool).tril(), 0).amax((0, 2, 3))
    torch.testing.assert_close(max_attention_logit(q, k, block), expected)


def test_a_non_finite_logit_is_reported_not_lost():
    q, k = torch.ones(1, 2, 4, 8), torch.ones(1, 1, 4, 8)
    q[0, 1, 2, 0] = float("nan")
    peak = max_attention_logit(q, k)
    assert peak[0].isfinite() and peak[1].isnan()


def test_watching_changes_nothing_and_ends_with_the_context():
    torch.manual_seed(0)
    model, rows = GPT(GPTConfig(**SMALL)), torch.randint(61, (2, 65))
    plain = model.loss(rows).total
    with attention_logits(model) as peaks:
        watched = model.loss(rows).total
        seen = peaks.clone()
        model.loss(rows[:1])
    assert torch.equal(plain, watched) and peaks.shape == (3, 6) and (seen > 0).all() and torch.equal(seen, peaks)
    model.loss(rows)
    assert torch.equal(seen, peaks) and model.peaks is None
    with pytest.raises(ZeroDivisionError), attention_logits(model): raise ZeroDivisionError
    assert model.peaks is None


def test_the_future_changes_nothing():
    model = loud(GPTConfig(**SMALL))
    a = torch.randint(61, (1, 64)); b = a.clone(); b[:, 40:] = (b[:, 40:] + 1) % 61
    da, db = model(a).detach(), model(b).detach()
    torch.testing.assert_close(da[:, :40], db[:, :40]); assert (da[:, 40:] - db[:, 40:]).abs().max() > 0.1


def test_a_row_longer_than_the_tables_is_refused():
    with pytest.raises(UserError, match=r"rows of 65 tokens, but model\.seq_len=64"): GPT(GPTConfig(**SMALL))(torch.zeros(1, 65, dtype=torch.long))


@pytest.mark.parametrize("qk_norm, tied", [(True, True), (True, False), (False, True), (False, False)])
def test_a_hugging_face_checkpoint_comes_in(qk_norm, tied, tmp_path, float64):
    "Written by transformers as a folder of safetensors and config.json; read here; the same logits."
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    hf = hugging_face(loud(GPTConfig(**SMALL, qk_norm=qk_norm, tie_embeddings=tied), seed=5))
    hf.save_pretrained(tmp_path)
    model = GPT(from_hf_config(json.loads((tmp_path/"config.json").read_text()))).double()
    model.load_state_dict(from_hf_state_dict(load_file(tmp_path/"model.safetensors")))
    assert largest_difference(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")) < 1e-10


@pytest.mark.parametrize("change, says", [
    (dict(model_type="mistral"), "model_type='mistral'"), (dict(attention_bias=True), "attention_bias=True"),
    (dict(hidden_act="gelu"), "hidden_act='gelu'"), (dict(mlp_bias=True), "mlp_bias=True"),
    (dict(use_sliding_window=True), "use_sliding_window=True"),
    (dict(rope_parameters=dict(rope_type="llama3", rope_theta=5e5)), "rope_scaling"),
    (dict(rope_parameters=None, rope_scaling=dict(type="linear", factor=2.0)), "rope_scaling"),
    (dict(hidden_size=None), "hidden_size")])
def test_what_this_model_cannot_express_is_refused(change, says):
    config = to_hf_config(GPTConfig(**SMALL)) | change
    with pytest.raises(UserError, match=says): from_hf_config({k: v for k, v in config.items() if v is not None})


def test_a_tensor_without_a_place_is_refused():
    state = to_hf_state_dict(GPT(GPTConfig(**SMALL))) | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}
    with pytest.raises(UserError, match=r"q_proj\.bias: this model has no such tensor"): from_hf_state_dict(state)
