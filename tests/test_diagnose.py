"""Verdicts on logs whose truth is known: shapes of published runs, what must not be mistaken for a cliff, the labelled set."""
import json
import math
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import traces

from shohin.diagnose import (
    Rules,
    cliff_step,
    diagnose,
    diff,
    jump_step,
    jumps,
    pinned,
    replay_log,
    segment_events,
    spike_score,
    watch,
)
from shohin.runlog import from_columns, read_log
from shohin.shards import UserError

rng = np.random.default_rng(3)


def seed_trace(after=300, skipped=True):
    "The published run of seed 777: healthy to step 6381, 2.59 and then about 3.1 for ever, every update refused."
    step = np.arange(6001, 6383 + after)
    loss = np.where(step < 6382, 1.02 + .06 * rng.standard_normal(len(step)), 3.1 + .08 * rng.standard_normal(len(step)))
    gnorm = .085 + .012 * rng.standard_normal(len(step))
    for s, (x, g) in {6296: (2.3, 1.77), 6349: (2.2, 1.51), 6380: (1.14, 1.01), 6381: (1.15, .06), 6382: (2.59, .3)}.items(): loss[step == s], gnorm[step == s] = x, g
    out = ''
    for s, x, g in zip(step, loss, gnorm, strict=True):
        if skipped and (s >= 6382 or x > 2): out += f'[skip:loss] step {s} loss {x:.2f} gnorm {g:.2f} (ema loss 1.03) skips=1\n'
        else: out += f'step {s} loss {x:.4f} gnorm {g:.2f} lr 0.0005 281,959 tok/s\n'
    return out


def log_of(tmp_path, text):
    (tmp_path/'log').write_text(text)
    return tmp_path/'log'


# ---------------------------------------------------------------------------------------- published shapes
def test_the_seeds_cliff_is_a_guard_freeze_at_a_shard_boundary(tmp_path):
    d = diagnose(log_of(tmp_path, seed_trace()), shard_tokens=200e6, tokens_per_step=524_288)
    [freeze] = d.severe
    assert (freeze.kind, freeze.onset, freeze.ends) == ('guard freeze', 6382, None)
    assert freeze.before == pytest.approx(1.02, abs=.03) and freeze.after == pytest.approx(3.1, abs=.05) and freeze.confidence > .9
    assert freeze.explanations[0].name.startswith('a guard') and freeze.explanations[0].standing == 'supported'
    data = next(x for x in freeze.explanations if x.name.startswith('the data'))
    assert any('falls inside it' in t and 'by chance' in t for t in data.evidence_for)
    assert not any('unstable' in x.name and x.standing == 'supported' for x in freeze.explanations)
    assert 'guard' in d.verdict and '6,382' in d.verdict and 'no longer learns' in d.verdict
    assert any('level-shift' in m for m in freeze.mend) and d.exit_status == 1


def test_without_the_skips_the_cause_is_not_claimed(tmp_path):
    d = diagnose(log_of(tmp_path, seed_trace(skipped=False)))
    [cliff] = d.severe
    assert (cliff.kind, cliff.onset) == ('level shift', 6382) and 'A cliff at step 6,382' in d.verdict
    assert 'does not show why' in d.verdict or 'Not ruled out' in d.verdict
    assert all(x.standing != 'supported' or x.evidence_for for x in cliff.explanations)
    assert any('shard-tokens' in x.missing for x in cliff.explanations) and any('skipped' in x.missing for x in cliff.explanations)


def test_the_definitions_of_jump_and_cliff_agree_with_it(tmp_path):
    log = read_log(log_of(tmp_path, seed_trace()))
    decision = np.where(log.skipped > 0, 'skip:loss', 'apply')
    assert jump_step(log.loss, decision, log.step) == 6296                   # the spikes before it jump too
    assert cliff_step(log.loss, decision, log.step) == 6382 == cliff_step(log.loss, None, log.step)
    assert pinned(log.loss, int(np.searchsorted(log.step, 6382))) is True
    assert len(jumps(np.full(50, math.nan))) == 0 and jump_step([]) is None


def megatron(rows, overflow=()):
    out = ''
    for s, loss, g in rows:
        if s in overflow: out += '[2022-01-19 13:09:13,305] [INFO] [stage_1_and_2.py:1644:step] [deepscale] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1048576.0, reducing to 524288.0\n'
        out += f' iteration {s:8d}/  159576 | consumed samples: {s * 2048:12d} | consumed tokens: {s * 4194304:14d} | elapsed time per iteration (ms): 5e5 | learning rate: 5.948E-05 | global batch size:  2048 | lm loss: {loss:.6E} | loss scale: 1048576.0 | grad norm: {g:.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |\n'
    return out


def test_a_chronicle_with_a_spike_that_recovered(tmp_path):
    rows = [(5000, 2.2, .24), (5001, 2.22, .95), (5002, 2.58, 2.4), (5003, 2.24, 15.), (5004, 2.35, 140.), (5005, 5.1, 950.), (5006, 3.5, 350.), (5007, 3.2, 380.), (5008, 2.8, 650.),
            (5030, 2.22, .26), (5031, 2.23, .21), (9000, 2.12, .14), (9001, 2.11, .15)]
    d = diagnose(log_of(tmp_path, 'We saw a spike but it came back:\n```\n' + megatron(rows) + '```\n'))
    [spike] = [e for e in d.events if e.signal == 'loss']
    assert spike.kind == 'recovered spike' and 5002 <= spike.onset <= 5005 and spike.peak == pytest.approx(5.1) and not d.severe
    unstable = next(x for x in spike.explanations if 'unstable' in x.name)
    assert unstable.standing == 'supported' and 'before' in unstable.evidence_for[0]
    assert any('gap' in n for n in d.log.notes) and spike.explanations[0] is unstable and '5.100' in d.render(color=False)      # the peak is in the picture


def test_a_cliff_among_overflows(tmp_path):
    rows = [(100, 3.9, 3000.123), (2000, 2.9, 81000.456), (16800, 2.682, 180376.315), (16801, 2.658, 226760.401), (17060, 2.665, 453082.517), (17061, 2.667, 464441.887)]
    rows += [(s, x, 464441.887) for s, x in ((17062, 4.374), (17063, 4.366), (17064, 4.391), (17065, 4.405))] + [(17066, 4.398, 879946.622)]
    d = diagnose(log_of(tmp_path, megatron(rows, overflow={17062, 17063, 17064, 17065})))
    [cliff] = d.severe
    assert (cliff.kind, cliff.onset) == ('level shift', 17062) and cliff.before == pytest.approx(2.666, abs=.01) and cliff.confidence < .8     # few rows
    assert any('overflow' in t for x in cliff.explanations for t in x.evidence_for)
    assert not any('gradient norm stayed' in t for x in cliff.explanations for t in x.evidence_for + x.evidence_against)                     # stale ones prove nothing
    assert 'does not show why' in d.verdict or 'Not ruled out' in d.verdict or 'numbers out of range' in d.verdict


def test_marins_bad_spike_and_data_shift():
    step = np.arange(8000)
    loss = 1.96 + .008 * rng.standard_normal(8000)
    spike = loss + np.where(step >= 4000, .06 * np.exp(-(step - 4000) / 30) + .015, 0)
    [e] = [e for e in diagnose(from_columns({'step': step, 'loss': spike})).severe]
    assert e.kind == 'bad spike' and abs(e.onset - 4000) < 10 and e.after - e.before == pytest.approx(.015, abs=.006)
    shift = loss + np.where(step >= 4000, .03, 0)
    evals = np.where(step % 250 == 0, 1.98 + .001 * rng.standard_normal(8000), np.nan)
    d = diagnose(from_columns({'step': step, 'loss': shift, 'eval/loss': evals}))
    [e] = d.severe
    assert e.kind == 'data shift' and abs(e.onset - 4000) < 60 and 'evaluation' in d.verdict
    d = diagnose(from_columns({'step': step, 'loss': shift, 'eval/loss': evals + np.where(step >= 4000, .03, 0)}))       # the evaluations moved too
    assert [e.kind for e in d.severe] == ['level shift']


def test_a_healthy_run_with_outliers_in_gradient_and_loss():
    step = np.arange(19_560)
    loss = np.round(3.25 + 7.7 * np.exp(-step / 400) + 1.2 * (1 + step / 300) ** -.6 + .045 * rng.standard_normal(len(step)), 4)
    grad = np.round(np.exp(np.log(.27) + .1 * rng.standard_normal(len(step))) + 15 * np.exp(-step / 5), 2)
    grad[7435], grad[9025] = 1.44, 2.02
    loss[12_000] += .6
    d = diagnose(from_columns({'step': step, 'loss': loss, 'grad_norm': grad}))
    assert not d.severe and d.exit_status == 0 and d.verdict.startswith('Healthy')
    assert {e.onset for e in d.events if e.signal == 'grad_norm'} == {7435, 9025} and 'moved nothing' in d.verdict
    assert [e.onset for e in d.events if e.kind == 'outlier' and e.signal == 'loss'] == [12_000]


# ---------------------------------------------------------------------------------------- what is not a cliff
def curve(steps, floor=2.0): return floor + 6 * (1 + np.asarray(steps) / 30.) ** -.5 + .02 * rng.standard_normal(len(steps))


def rows(steps, loss, more=''): return ''.join(f'step {s} loss {x:.4f} gnorm 0.10{more}\n' for s, x in zip(steps, loss, strict=True))


def test_restarts_and_several_runs_are_no_cliffs(tmp_path):
    a, b = np.arange(1000), np.arange(500, 1500)
    d = diagnose(log_of(tmp_path, rows(a, curve(a)) + 'Resuming from step 500\n' + rows(b, curve(b))))
    assert not d.severe and [s.kind for s in d.log.segments] == ['start', 'restart']
    d = diagnose(log_of(tmp_path, rows(a, curve(a)) + rows(a, curve(a)) + rows(a, curve(a, 1.5))))
    assert not d.severe and '3 runs' in d.verdict
    d = diagnose(log_of(tmp_path, rows(a, curve(a)) + rows(a, curve(a))[:20_000] + rows(a, curve(a))))
    assert not d.severe


def test_a_cliff_after_a_restart_names_the_restart_and_its_twin(tmp_path):
    a, b = np.arange(700), np.arange(300, 700)
    cliff = lambda s: np.where(np.asarray(s) >= 600, 2.2 + curve(s), curve(s))
    d = diagnose(log_of(tmp_path, rows(a, cliff(a)) + 'loading checkpoint from step 300\n' + rows(b, cliff(b))), shard_tokens=300 * 1000, tokens_per_step=1000)
    assert [(e.kind, e.onset) for e in d.severe] == [('level shift', 600)] * 2
    data = next(x for x in d.severe[1].explanations if x.name.startswith('the data'))
    assert any('happens again' in t for t in data.evidence_for) and any('by chance' in t for t in data.evidence_for) and 'It happens 2 times' in d.verdict
    b = np.arange(300, 600)
    broken = log_of(tmp_path, rows(a, curve(a)) + 'loading checkpoint from step 300\n' + rows(b, curve(b) + np.where(b >= 302, 2.5, 0)))
    [e] = diagnose(broken).severe
    assert abs(e.onset - 302) <= 2 and next(x for x in e.explanations if 'restart' in x.name).standing == 'supported'


def test_logging_every_k_steps_and_gaps(tmp_path):
    s = np.r_[np.arange(0, 20_000, 50), np.arange(30_000, 50_000, 50)]
    d = diagnose(log_of(tmp_path, rows(s, curve(s / 50))))
    assert not d.severe and d.log.interval == 50 and any('one row every 50' in n for n in d.log.notes)
    loss = curve(s / 50); loss[600:] += 1.5
    [e] = diagnose(log_of(tmp_path, rows(s, loss))).severe
    assert e.kind == 'level shift' and e.onset == s[600]


def test_learning_rate_jump_is_named():
    step = np.arange(2000)
    loss = curve(step); loss[1200:] += .8
    lr = np.where(step < 1200, 1e-3, 5e-3)
    [e] = diagnose(from_columns({'step': step, 'loss': loss, 'lr': lr})).severe
    rate = next(x for x in e.explanations if 'learning rate' in x.name and 'change' in x.name)
    assert rate.standing == 'supported' and '+400%' in rate.evidence_for[0]


def test_evidence_against_the_data_when_the_batches_stay_the_same():
    step = np.arange(1500)
    loss = curve(step); loss[900:] += 1.0
    same = {'domains': {'code': np.full(1500, 8), 'web': np.full(1500, 4)}}
    [e] = diagnose(from_columns({'step': step, 'loss': loss} | same)).severe
    assert e.kind == 'level shift' and next(x for x in e.explanations if x.name.startswith('the data')).standing == 'unlikely'
    other = {'domains': {'code': np.where(step < 900, 8, 0), 'web': np.where(step < 900, 4, 12)}}
    [e] = diagnose(from_columns({'step': step, 'loss': loss} | other)).severe
    assert e.kind == 'data shift' and e.explanations[0].name.startswith('the data') and any('InterleavedOrder' in m for m in e.mend)


def test_mend_names_checkpoint_and_skip_ranges(tmp_path):
    s = np.arange(2000)
    loss = curve(s); loss[1500:] += .5 + 2 * np.exp(-np.arange(500) / 10)
    grad = np.full(2000, .1) * np.exp(.1 * rng.standard_normal(2000)); grad[1497:1510] = 30
    text = ''.join(f'step {t} loss {x:.4f} gnorm {g:.3f}\n' + (f'saved checkpoint for step {t}\n' if t % 400 == 0 and t else '') for t, x, g in zip(s, loss, grad, strict=True))
    [e] = diagnose(log_of(tmp_path, text)).severe
    assert e.kind == 'bad spike' and 'go back to the checkpoint of step 1,200' in e.mend and e.skip[0] == 1497
    assert e.skip_ranges['OLMo-core'].startswith('steps_to_skip=[StepSkipRange(start=1497, stop=') and e.skip_ranges['Megatron-LM'].startswith('--iterations-to-skip 1497 1498')


def test_the_next_test_is_a_command_that_can_be_typed(tmp_path):
    step = np.arange(1500)
    loss = curve(step); loss[900:] += 1.0
    rows = [{'step': int(s), 'loss': float(x), 'domains': {'code': 8} if s < 900 else {'web': 8}} for s, x in zip(step, loss, strict=True)]
    folder = tmp_path/'run of mine'
    folder.mkdir()
    (folder/'log.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
    commands = lambda: [c for _, c in diagnose(folder).severe[0].tests]
    assert commands()[:2] == ['shohin peek CORPUS --step 900 --around 2', 'shohin audit CORPUS']
    (folder/'config.json').write_text('{}')                                    # a run folder of ours knows its data
    assert commands()[:2] == [f"shohin peek --run '{folder}' --step 900 --around 2", f"shohin audit --run '{folder}'"]
    said = {t.name: diagnose(from_columns(t.columns)) for t in traces.all_traces() if t.kind in ('level shift', 'bad spike', 'guard freeze', 'nan', 'data shift') and t.number < 4}
    assert all(e.tests and e.mend for d in said.values() for e in d.severe)


def test_a_resume_that_repeats_no_step_is_where_reading_began():
    step = np.arange(2000)
    loss = curve(step); loss[1400:] += 1.0
    log = from_columns({'step': step, 'loss': loss})
    fits = lambda: next(x for x in diagnose(log, shard_tokens=381e3, tokens_per_step=1e3).severe[0].explanations if x.name.startswith('the data'))
    assert fits().standing == 'unlikely'
    log.restarts = [(1019, 1020)]                                              # 'resumed from checkpoint' above this row
    assert any('read from step 1,019 on falls inside it' in t for t in fits().evidence_for)


def test_many_restarts_do_not_take_long():
    step = np.concatenate([np.arange(k * 480, k * 480 + 500) for k in range(40)])
    log = from_columns({'step': step, 'loss': curve(step)})
    start = time.process_time()
    assert not diagnose(log).severe and len(log.segments) == 40
    assert time.process_time() - start < 5


# ---------------------------------------------------------------------------------------- the labelled set
@pytest.fixture(scope='module')
def said():
    "[(trace, events of its loss)] for the whole set."
    return [(t, [e for e in diagnose(from_columns(t.columns)).events if e.signal == 'loss']) for t in traces.all_traces()]


@pytest.mark.parametrize('half', ['tuned on', 'held out'])
def test_labelled_set(half, said):
    chosen = [(t, events) for t, events in said if t.held_out == (half == 'held out')]
    assert sum(t.kind != 'healthy' for t, _ in chosen) >= 40 and sum(t.kind == 'healthy' for t, _ in chosen) >= 40
    answers = iter([events for _, events in chosen])
    result, wrong = traces.evaluate([t for t, _ in chosen], lambda columns: next(answers))
    for kind, row in result['kinds'].items():
        # a lone row of a heavy tail that nobody planted counts as a false outlier
        assert row['recall'] >= 0.8 and row['precision'] >= (0.7 if kind == 'outlier' else 0.8), (kind, row, wrong)
    assert result['healthy']['without a false event'] >= 0.97 * result['healthy']['traces'], wrong


def test_healthy_runs_give_no_cliff_and_no_bad_spike(said):
    for t, events in said:
        if t.kind == 'healthy': assert not [e for e in events if e.kind in ('level shift', 'bad spike', 'guard freeze')], t.name


def test_segment_events_uses_its_rules():
    y = np.r_[np.full(300, 2.0), [2.2], np.full(300, 2.0)] + .01 * rng.standard_normal(601)
    log = from_columns({'step': np.arange(601), 'loss': y})
    assert [e.kind for e in segment_events(log, 0, Rules())] == ['outlier'] and segment_events(log, 0, Rules(z=40)) == []


# ---------------------------------------------------------------------------------------- numbers of the literature
def test_spike_scores_against_a_plain_loop():
    x = np.r_[rng.standard_normal(400), 12, rng.standard_normal(300), -15, rng.standard_normal(200)]
    for window, sigmas, two, ddof in ((128, 6., False, 0), (200, 7., True, 1)):
        hits = 0
        for i in range(window, len(x)):
            w = x[i - window:i]
            d = x[i] - w.mean()
            hits += (abs(d) if two else d) > sigmas * w.std(ddof=ddof)
        assert spike_score(x, window, sigmas, two, ddof)[0] == pytest.approx(hits / (len(x) - window))
    assert math.isnan(spike_score(x[:50])[0])


# ---------------------------------------------------------------------------------------- replay and diff
def test_replay_shows_who_freezes(tmp_path):
    t = replay_log(log_of(tmp_path, seed_trace()))
    rules = {r.rule: r for r in t.rules}
    assert rules['seed: loss 2 x EMA'].freezes == 6382 and rules['shohin default'].freezes is None and rules['OLMo-core 6 sigma'].freezes is None
    assert rules['Megatron spiky loss'].refused == 0 and len(rules['Megatron spiky loss'].missed) == len(t.events)
    assert all(len(r.caught) + len(r.missed) == len(t.events) for r in t.rules)
    assert any('another model' in c or 'differently' in c for c in t.caveats) and any('itself skipped' in c for c in t.caveats)
    text = t.render(color=False)
    assert 'freezes at' in text and '####' in text and all(r.rule[:20] in text for r in t.rules)
    page = t.to_html()
    assert page.count('<tr>') == len(t.rules) + 1 and 'What a replay cannot show' in page and 'http' not in page.replace('http-equiv', '')
    json.dumps(t.to_dict(), allow_nan=False)
    healthy = replay_log(from_columns({'step': np.arange(3000), 'loss': curve(np.arange(3000)), 'grad_norm': .1 + 0 * np.arange(3000)}))
    assert all(r.freezes is None for r in healthy.rules)


def test_diff_finds_where_and_why(tmp_path):
    s = np.arange(1000)
    loss = np.round(curve(s), 4)
    base = {'step': s, 'loss': loss, 'lr': np.full(1000, 1e-3), 'domains': {'code': np.full(1000, 4), 'web': np.full(1000, 8)}, 'skipped': np.zeros(1000)}
    a = from_columns(base)
    assert diff(a, a).part is None and 'The same on all 1,000' in diff(a, a).verdict
    other = np.round(loss + np.where(s >= 400, .3, 0), 4)
    d = diff(a, from_columns(base | {'loss': other, 'lr': np.where(s < 399, 1e-3, 2e-3)}))
    assert (d.part, d.apart, d.columns['lr'][0]) == (400, 400, 399) and 'the learning rate differed (from step 399' in d.verdict
    d = diff(a, from_columns(base | {'loss': other, 'domains': {'code': np.where(s < 400, 4, 12), 'web': np.where(s < 400, 8, 0)}}))
    assert 'the data (domains/code) differed (from step 400' in d.verdict
    d = diff(a, from_columns(base | {'loss': other}))
    assert 'weights, seed, code or arithmetic differ' in d.verdict and 'equal up to there' in d.verdict
    d = diff(a, from_columns(base | {'loss': np.round(loss + np.where(s >= 400, .0003, 0), 4)}))
    assert d.part == 400 and d.apart is None and 'never differ by more than noise' in d.verdict
    with pytest.raises(UserError, match='no step in common'): diff(a, from_columns(base | {'step': s + 5000}))
    for name, spans in (('a', 5), ('b', 9)):
        (tmp_path/name).write_text(''.join(json.dumps({'step': int(t), 'loss': float(x if t < 400 or name == 'a' else x + .2), 'spans': [[0, int(t), spans if t >= 390 else 5]]}) + '\n' for t, x in zip(s, loss, strict=True)))
    d = diff(tmp_path/'a', tmp_path/'b')
    assert d.columns['spans'][0] == 390 and 'the data (spans) differed (from step 390)' in d.verdict and d.lines['A'].startswith('{"step": 400')
    json.dumps(d.to_dict()); assert 'differs from step' in d.render()


# ---------------------------------------------------------------------------------------- output
def test_output_is_complete_safe_and_strict(tmp_path):
    evil = 'eval_\x1b]0;owned\x07<script>alert(1)</script>_loss'
    path = tmp_path/'lo\x1b[31mg<b>.jsonl'
    step = np.arange(900)
    loss = curve(step); loss[600:] += 2
    path.write_text(''.join(json.dumps({'step': int(s), 'loss': float(x), 'domain_loss': {'<img src=x>': float(x), '\x1b[2J': 2.0}, **({evil: 2.5} if s % 50 == 0 else {})}) + '\n' for s, x in zip(step, loss, strict=True)))
    d = diagnose(path)
    text, page, data = d.render(color=False), d.to_html(), json.dumps(d.to_dict(), allow_nan=False, ensure_ascii=False)
    assert '\x1b' not in text and '\x1b' not in page and '\x1b' not in data
    assert '<script' not in page and '<img' not in page and '<b>' not in page
    assert set(re.findall(r'\x1b\[[0-9;]*m', d.render(color=True))) and not re.search(r'\x1b\](?!8)', d.render(color=True))
    assert 'prefers-color-scheme: dark' in page and '<svg' in page and 'aria-label="Loss over steps' in page and '<html lang="en">' in page
    assert not re.search(r'(?:src|href)="(?!#)', page)                          # nothing is loaded from anywhere
    assert all(max(len(line) for line in d.render(width=w, color=False).splitlines()) <= w for w in (60, 100))
    back = json.loads(data)
    assert back['healthy'] is False and back['events'][0]['kind'] and back['log']['rows'] == 900


@pytest.mark.parametrize('text', ['step 1 loss 2.5\n', 'step 1 loss 2.5\nstep 2 loss 2.4\n', 'step 1 loss nan\nstep 2 loss nan\n', ''.join(f'step {s} loss 0.0\n' for s in range(300)),
                                  ''.join(f'step {s} loss 2.5\n' for s in range(3000)), ''.join(f'step {s} loss {-s}.5\n' for s in range(600)), ''.join(f'step {s} loss {1e30 if s % 7 else 1e-30}\n' for s in range(600))])
def test_degenerate_logs_get_a_verdict(text, tmp_path):
    d = diagnose(log_of(tmp_path, text))
    assert d.verdict and d.render() and d.to_html() and json.dumps(d.to_dict(), allow_nan=False)
    replay_log(d.log, diagnosis=d)


def test_watching_a_log_that_grows_tells_each_event_once(tmp_path):
    lines, path, told = seed_trace().splitlines(True), tmp_path/'log', []
    path.write_text(''.join(lines[:200]))
    feed = iter(range(200, len(lines), 60))
    def until():                                                 # between two looks at the file, sixty lines are written
        k = next(feed, None)
        if k is not None:
            with open(path, 'a') as f: f.writelines(lines[k:k + 60])
        return k is None
    looks = list(watch(path, every=0, until=until))
    for _, new in looks: told += [(e.kind, e.onset) for e in new if e.severe]
    assert told in ([('guard freeze', 6382)], [('level shift', 6382), ('guard freeze', 6382)]) and len(looks[-1][0].log) == len(lines)


def test_bad_arguments(tmp_path):
    path = log_of(tmp_path, 'step 1 loss 2.5\n')
    with pytest.raises(UserError, match='shard_tokens must be more than 0'): diagnose(path, shard_tokens=-1)
    with pytest.raises(UserError, match='cannot be read'): diagnose(tmp_path/'nothing')


def test_twenty_thousand_steps_start_to_end_in_a_second(tmp_path):
    "Loose here (a busy machine); bench_diagnose.py measures it properly."
    s = np.arange(20_000)
    path = log_of(tmp_path, rows(s, curve(s)))
    best = min(_seconds(path) for _ in range(3))
    assert best < 2.5, best


def _seconds(path):
    start = time.process_time()
    before = time.perf_counter()
    out = subprocess.run([sys.executable, '-c', f'from shohin.diagnose import diagnose; print(diagnose({str(path)!r}).verdict)'], capture_output=True, text=True, check=True).stdout
    assert 'Healthy' in out or 'No lasting' in out
    return time.perf_counter() - before + 0 * start
