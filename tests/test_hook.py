"""The hook in real loops: plain PyTorch, the Hugging Face Trainer, Lightning; what it writes is read and diagnosed."""
import importlib.util
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from shohin.diagnose import diagnose
from shohin.guards import make_guards, vote
from shohin.hook import RunLogger, _one_process, gradient_norm, hf_callback, lightning_callback, row_losses
from shohin.runlog import read_log
from shohin.shards import UserError


def rows_of(folder): return [json.loads(line) for line in open(folder/'log.jsonl')]


def tiny(vocab=64):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(vocab, 32), torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, vocab))


def test_plain_loop_says_what_happened(tmp_path):
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    truth = []
    with RunLogger(tmp_path, model, optimizer, tokens_per_step=8 * 16, flush=7) as log:
        for t in range(30):
            x = torch.randint(0, 64, (8, 17))
            losses = torch.nn.functional.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction='none').mean(1)
            losses.mean().backward()
            norm = math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in model.parameters()))
            before = [p.detach().clone() for p in model.parameters()]
            assert log.step(losses.mean(), row_loss=losses, domains=['code'] * 3 + ['web'] * 5, spans=[[0, t, t + 17]]) is None
            lr = optimizer.param_groups[0]['lr']
            optimizer.step(); optimizer.zero_grad(); scheduler.step()
            update = math.sqrt(sum(float((p.detach() - b).double().pow(2).sum()) for p, b in zip(model.parameters(), before, strict=True)))
            truth.append((t, losses.mean().item(), norm, update, lr, (t + 1) * 128, losses[:3].mean().item()))
            if t == 20: log.event(val_loss=2.5)
    rows = [r for r in rows_of(tmp_path) if 'loss' in r]
    got = [(r['step'], r['loss'], r['grad_norm'], r['update_norm'], r['lr'], r['tokens'], r['domain_loss']['code']) for r in rows]
    np.testing.assert_allclose(got, truth, rtol=1e-4)
    assert rows[3]['domains'] == {'code': 3, 'web': 5} and rows[3]['spans'] == [[0, 3, 20]]
    log = read_log(tmp_path)
    assert set(log.columns) >= {'step', 'tokens', 'loss', 'grad_norm', 'lr', 'update_norm'} and log.tokens_per_step == 128
    assert list(log.domains) == ['code', 'web'] and [v.value.tolist() for v in log.evals.values()] == [[2.5]]


def test_guard_decisions_and_held_weights(tmp_path):
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = RunLogger(tmp_path, model, optimizer, guards='seed')
    held = None
    for t in range(60):
        loss = 2.0 + 0 * sum(p.sum() for p in model.parameters()) + (5.0 if t >= 40 else 0) + model[0].weight.mean() * 1e-3
        loss.backward()
        decision = log.step(loss)
        assert decision.apply == (t < 40)
        if decision.apply: optimizer.step()
        elif held is None: held = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
    log.close()
    assert all(torch.equal(a, b) for a, b in zip(held, model.parameters(), strict=True))
    rows = rows_of(tmp_path)
    assert [r['decision'] for r in rows] == ['apply'] * 40 + ['skip:loss'] * 20
    assert all((r['update_norm'] == 0) == (r['step'] >= 40) for r in rows)
    assert [(e.kind, e.onset) for e in diagnose(tmp_path).severe] == [('guard freeze', 40)]


def test_not_finite_is_strict_json_and_resume_appends(tmp_path):
    for start, loss in ((0, float('nan')), (1, 2.0)):
        with RunLogger(tmp_path, start=start) as log: log.step(loss, grad_norm=float('inf') if start == 0 else 1.0, lr=1e-3)
    text = (tmp_path/'log.jsonl').read_text()
    rows = [json.loads(line, parse_constant=lambda c: pytest.fail(f'{c} is not JSON')) for line in text.splitlines()]
    assert [r['step'] for r in rows] == [0, 1] and rows[0]['loss'] == 'nan' and rows[0]['grad_norm'] == 'inf'


def test_it_asks_for_what_it_needs(tmp_path):
    (tmp_path/'file').write_text('')
    with pytest.raises(UserError, match='cannot be written'): RunLogger(tmp_path/'file')
    with pytest.raises(UserError, match='unknown guard'): RunLogger(tmp_path, guards='banana')
    log = RunLogger(tmp_path)
    log.step(1.0, domains=['a'], row_loss=[1.0, 2.0])
    with pytest.raises(UserError, match='one domain for each row'): log.close()


def test_import_is_light():
    out = subprocess.run([sys.executable, '-X', 'importtime', '-c', 'import shohin.hook'], capture_output=True, text=True).stderr
    assert not {line.rsplit('|', 1)[-1].strip() for line in out.splitlines()} & {'torch', 'transformers', 'lightning', 'pandas', 'matplotlib'}


def test_row_losses_are_the_models_own():
    logits, labels = torch.randn(3, 9, 64), torch.randint(0, 64, (3, 9))
    labels[1, 5:] = -100
    for i, x in enumerate(row_losses(logits, labels)):
        torch.testing.assert_close(x, torch.nn.functional.cross_entropy(logits[i, :-1], labels[i, 1:]))


class Text(torch.utils.data.Dataset):
    "Two kinds of rows: counting up (easy) and noise (hard); the kind shows in the first token."
    def __len__(self): return 512

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        row = (torch.arange(32) + i) % 50 + 2 if i % 2 else torch.randint(2, 60, (32,), generator=g)
        row = torch.cat([torch.tensor([i % 2]), row[1:]])
        return {'input_ids': row, 'labels': row}


def domains_of(inputs): return ['counting' if t == 1 else 'noise' for t in inputs['input_ids'][:, 0].tolist()]


@pytest.mark.skipif(importlib.util.find_spec('accelerate') is None, reason='the Hugging Face Trainer needs accelerate (pip install accelerate)')
@pytest.mark.parametrize('accumulate', [1, 2])
def test_hugging_face_trainer(tmp_path, accumulate):
    import transformers
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
    model = transformers.LlamaForCausalLM(config)
    args = transformers.TrainingArguments(output_dir=str(tmp_path/'out'), max_steps=20, per_device_train_batch_size=8, gradient_accumulation_steps=accumulate, logging_steps=1, eval_strategy='steps',
                                          eval_steps=10, save_strategy='no', report_to=[], use_cpu=True, learning_rate=1e-2, max_grad_norm=0.5, disable_tqdm=True)
    trainer = transformers.Trainer(model, args, train_dataset=Text(), eval_dataset=torch.utils.data.Subset(Text(), range(16)), callbacks=[hf_callback(tmp_path/'log', domains_of)])
    trainer.train()
    rows = [r for r in rows_of(tmp_path/'log') if 'loss' in r]
    assert [r['step'] for r in rows] == list(range(1, 21))
    own = {h['step']: h for h in trainer.state.log_history if 'loss' in h}
    np.testing.assert_allclose([r['loss'] for r in rows], [own[r['step']]['loss'] for r in rows], atol=2e-3)       # the Trainer prints four digits
    np.testing.assert_allclose([r['grad_norm'] for r in rows], [own[r['step']]['grad_norm'] for r in rows], rtol=1e-4)
    assert max(r['grad_norm'] for r in rows) > 0.5                                                                # before clipping
    assert all(r['update_norm'] > 0 and sum(r['domains'].values()) == 8 * accumulate for r in rows)
    assert rows[-1]['domain_loss']['counting'] < rows[-1]['domain_loss']['noise']
    log = read_log(tmp_path/'log')
    assert len(log) == 20 and [len(v.step) for v in log.evals.values()] == [2]
    assert not diagnose(log).severe


EASY = [{'guard': 'loss-ratio', 'ratio': 0.97}]                       # refuses what is not a good deal better than the average


def check_held(rows, weights):
    "Decisions are those that the rule makes on the logged losses, and a refused update changed nothing."
    said = [r['decision'] for r in rows]
    assert 0 < sum(d.startswith('skip') for d in said) < len(said)
    guards, again = make_guards(EASY), []
    for r in rows:
        d = vote(guards, r['loss'], r['grad_norm'])
        again.append(d.apply)
    assert again == [d.startswith('apply') for d in said]
    for r, d, before, after in zip(rows, said, weights, weights[1:], strict=False):
        held = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert held == d.startswith('skip') == (r['update_norm'] == 0), r['step']


@pytest.mark.skipif(importlib.util.find_spec('accelerate') is None, reason='the Hugging Face Trainer needs accelerate (pip install accelerate)')
def test_guards_hold_updates_in_the_hugging_face_trainer(tmp_path):
    import transformers
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)
    model, weights = transformers.LlamaForCausalLM(config), []
    class Witness(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **_): weights.append([p.detach().clone() for p in model.parameters()])
    args = transformers.TrainingArguments(output_dir=str(tmp_path/'out'), max_steps=25, per_device_train_batch_size=8, save_strategy='no', report_to=[], use_cpu=True, learning_rate=3e-3, weight_decay=0.1, disable_tqdm=True)
    callback = hf_callback(tmp_path/'log', spans_of=lambda n: [[0, 8 * n, 8 * n + 8]], guards=EASY)
    transformers.Trainer(model, args, train_dataset=Text(), callbacks=[callback, Witness()]).train()
    rows = rows_of(tmp_path/'log')
    assert rows[3]['spans'] == [[0, 24, 32]] and len(rows) == 25
    check_held(rows, weights)


def test_guards_of_several_processes_are_refused():
    with pytest.raises(UserError, match='here are 8'): _one_process({'guards': 'seed'}, 8)
    _one_process({}, 8)


def lightning():
    "Lightning by either of its names."
    if importlib.util.find_spec('lightning'): return importlib.import_module('lightning')
    return importlib.import_module('pytorch_lightning')


NO_LIGHTNING = not (importlib.util.find_spec('lightning') or importlib.util.find_spec('pytorch_lightning'))


@pytest.mark.skipif(NO_LIGHTNING, reason='Lightning is not installed (pip install pytorch-lightning)')
def test_lightning(tmp_path):
    L = lightning()

    class Module(L.LightningModule):
        def __init__(self): super().__init__(); self.model = tiny()
        def losses(self, batch):
            x = batch['input_ids']
            return torch.nn.functional.cross_entropy(self.model(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction='none').mean(1)
        def training_step(self, batch, i):
            losses = self.losses(batch)
            return {'loss': losses.mean(), 'row_loss': losses.detach()}
        def validation_step(self, batch, i): self.log('val_loss', self.losses(batch).mean())
        def configure_optimizers(self): return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module, norms = Module(), []
    class Witness(L.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer): norms.append(float(gradient_norm(module)))
    loader = torch.utils.data.DataLoader(Text(), batch_size=8)
    trainer = L.Trainer(max_steps=20, accelerator='cpu', logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.1, val_check_interval=10,
                        limit_val_batches=2, accumulate_grad_batches=2, callbacks=[lightning_callback(tmp_path/'log', domains_of), Witness()])
    trainer.fit(module, loader, loader)
    rows = [r for r in rows_of(tmp_path/'log') if 'loss' in r]
    assert [r['step'] for r in rows] == list(range(20)) and all(r['update_norm'] > 0 and r['domains'] == {'noise': 8, 'counting': 8} for r in rows)
    np.testing.assert_allclose([r['grad_norm'] for r in rows], norms, rtol=1e-4)
    assert rows[0]['loss'] > rows[-1]['loss'] and 3 < rows[0]['loss'] < 5
    assert rows[-1]['domain_loss']['counting'] < rows[-1]['domain_loss']['noise']
    np.testing.assert_allclose([np.mean(list(r['domain_loss'].values())) for r in rows], [r['loss'] for r in rows], rtol=1e-4)
    assert [k for k in read_log(tmp_path/'log').evals] == ['val_loss']


@pytest.mark.skipif(NO_LIGHTNING, reason='Lightning is not installed (pip install pytorch-lightning)')
def test_guards_hold_updates_in_lightning(tmp_path):
    L, weights = lightning(), []

    class Module(L.LightningModule):
        def __init__(self): super().__init__(); self.model = tiny()
        def training_step(self, batch, i):
            x = batch['input_ids']
            return torch.nn.functional.cross_entropy(self.model(x[:, :-1]).transpose(1, 2), x[:, 1:])
        def configure_optimizers(self): return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1)

    class Witness(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, i): weights.append([p.detach().clone() for p in module.parameters()])
    trainer = L.Trainer(max_steps=25, accelerator='cpu', logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.1,
                        callbacks=[lightning_callback(tmp_path/'log', spans_of=lambda n: [[0, 8 * n, 8 * n + 8]], guards=EASY), Witness()])
    trainer.fit(Module(), torch.utils.data.DataLoader(Text(), batch_size=8))
    rows = rows_of(tmp_path/'log')
    assert rows[3]['spans'] == [[0, 24, 32]] and len(rows) == 25
    check_held(rows, weights)


def test_without_lightning_it_says_so(tmp_path, monkeypatch):
    for name in ('lightning', 'lightning.pytorch', 'lightning.pytorch.callbacks', 'pytorch_lightning', 'pytorch_lightning.callbacks'): monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match='pip install lightning'): lightning_callback(tmp_path)
