"""Reading logs: every format from a small fixture written from its format, restarts and repetitions, and bad input."""
import gzip
import json
import math
import re
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shohin.runlog import Follower, Lines, Rows, applied_mask, classify, number, raw_lines, read_log
from shohin.shards import UserError

LOSS = [4.0, 3.5, 3.25, 3.125, 3.0625, 3.03125]          # every fixture says this, in its own words
GNORM = [2.0, 1.5, 1.25, 1.0, 0.75, 0.5]
LR = 6e-4


def lines(template, steps=range(1, 7), **more):
    return '\n'.join(template.format(s=s, loss=l, g=g, lr=LR, **{k: v[i] for k, v in more.items()})
                     for i, (s, l, g) in enumerate(zip(steps, LOSS, GNORM, strict=True))) + '\n'


# name -> (text, format, first step, step between rows, columns besides step and loss)
FIXTURES = {
    'seed stdout': (lines('step {s} loss {loss:.4f} gnorm {g:.2f} lr {lr} 281,959 tok/s'), 'shohin', 1, 1, {'grad_norm', 'lr', 'throughput'}),
    'nanoGPT': ('tokens per iteration will be: 491,520\nnumber of parameters: 123.69M\nstep 0: train loss 10.9886, val loss 10.9894\n'
                + lines('iter {s}: loss {loss:.4f}, time 99.05ms, mfu 35.10%', range(0, 60, 10)), 'nanoGPT', 0, 10, {'time'}),
    'modded-nanogpt': ('import os\nfor step in range(args.num_iterations + 1):\n    print0(f"step:{step}/{args.num_iterations} train_loss:{loss:.4f}")\n'
                       'step:0/9536 val_loss:10.8258 train_time:0ms step_avg:nanms\n'
                       + lines('step:{s}/9536 train_loss:{loss:.4f} train_time:1561ms step_avg:nanms', range(1, 7)), 'modded-nanogpt', 1, 1, set()),
    'llm.c': (lines('step    {s}/18865 | loss {loss:.6f} (+nanz)| norm {g:.4f} (+0.53z)| lr {lr:.2e} | 3037.32 ms | 52.5% bf16 MFU | 172613 tok/s'),
              'llm.c', 1, 1, {'grad_norm', 'lr', 'throughput'}),
    'llm.c main.log': ('s:0 tel:11.0092\n' + lines('s:{s} trl:{loss:.4f} lr:{lr:.6f} norm:{g:.2f}', range(0, 6)), 'llm.c', 0, 1, {'grad_norm', 'lr'}),
    'nanochat': ('Step 00000 | Validation bpb: 3.2166\n' + lines('step {s:05d}/21400 (0.00%) | loss: {loss:.6f} | grad norm: {g:.4f} | lrm: 1.00 | dt: 980.55ms | tok/sec: 534,709 | mfu: 48.30 | total time: 0.00m'),
                 'nanochat', 1, 1, {'grad_norm', 'throughput', 'time', 'lr'}),
    'Megatron': (lines(' [2025-05-01 10:00:00] iteration {s:8d}/  500000 | consumed samples: {n:12d} | elapsed time per iteration (ms): 1356.2 | learning rate: {lr:.6E} | global batch size:   256 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {g:.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |',
                       range(100, 700, 100), n=[25600 * i for i in range(1, 7)]), 'Megatron', 100, 100, {'grad_norm', 'lr', 'skipped'}),
    'Megatron-DeepSpeed, wrapped': (lines('[default7]: iteration {s:8d}/ 115311 | consumed samples:    71455664 | consumed tokens: {n} | elapsed time per iteration (s): 105.16 | learning\n rate: {lr:.3E} | global batch size: 2048 | lm loss: {loss:.6E} | grad norm: {g:.3f} | num zeros: 0.0 | number of skipped iterations:  0 | number of nan\niterations:  0 | samples per second: 19.474 | TFLOPs: 149.10 |',
                                          range(42780, 42786), n=[4194304 * i for i in range(100, 106)]), 'Megatron', 42780, 1, {'grad_norm', 'lr', 'skipped', 'tokens', 'throughput'}),
    'torchtitan, coloured': (lines('[rank0]:[titan] 2025-02-04 09:16:41,034 - root - INFO - \x1b[31mstep: {s:2}  \x1b[32mloss: {loss:7.4f}  \x1b[38;2;180;60;0mgrad_norm: {g:7.4f}  \x1b[36mmemory:  0.56GiB(1.18%)  \x1b[34mtps: 2,055  \x1b[36mtflops: 0.10  \x1b[35mmfu: 0.03%\x1b[39m'),
                             'torchtitan', 1, 1, {'grad_norm', 'throughput'}),
    'OLMo-core': (lines('2025-01-10 09:00:00.123\thost:0\tolmo_core.train.callbacks.console_logger:68\tINFO\t[step={s}/95000,epoch=1,eta=3 days, 1:02]\n    optim/LR (group 0)={lr}\n    optim/total grad norm={g}\n    optim/step skipped=0.0\n    train/CE loss={loss}\n    train/PPL=54.6\n    throughput/device/TPS=10,241',
                        range(10, 70, 10)), 'OLMo', 10, 10, {'grad_norm', 'lr', 'skipped', 'throughput'}),
    'Levanter': (lines('2025-03-09T02:46:35 - 0 - levanter.utils.jax_utils - INFO - Progress on:train {s}it/10.0kit rate:1.4it/s remaining:2:03:44 elapsed:00:20 postfix:loss={loss}',
                       range(11, 71, 10)), 'Levanter', 11, 10, set()),
    'nanotron': (lines('10/17/2025 16:31:56 [INFO|DP=0|PP=0|TP=0|ip-26-0-160-225]: iteration: {s} / 378950 | consumed_tokens: 85.8G | elapsed_time_per_iteration_ms: 11.5K | tokens_per_sec: 22.8K | tokens_per_sec_per_gpu: 11.4K | global_batch_size: 64 | lm_loss: {loss} | lr: {lr:.3g} | model_tflops_per_gpu: 38.3 | grad_norm: {g}'),
                 'nanotron', 1, 1, {'grad_norm', 'lr', 'throughput', 'tokens'}),
    'Hugging Face stdout': ('\n'.join(f"{s}%|▏   | {s}/600 [00:10<01:30,  5.95it/s]\r{{'loss': '{l}', 'grad_norm': '{g}', 'learning_rate': '{LR}', 'epoch': '0.1'}}"
                                      for s, l, g in zip(range(10, 70, 10), LOSS, GNORM, strict=True)), 'Hugging Face', 10, 10, {'grad_norm', 'lr'}),
    'fairseq': (lines('2022-01-01 10:00:00 | INFO | train_inner | {{"epoch": 1, "update": 0.1, "loss": "{loss}", "ppl": "16.0", "wps": "38000", "num_updates": "{s}", "lr": "{lr}", "gnorm": "{g}", "loss_scale": "64"}}', range(100, 700, 100)),
                'fairseq', 100, 100, {'grad_norm', 'lr', 'throughput'}),
    'Composer': (lines('[batch={s}/4800]:\n\t Train time/batch: {s}\n\t Train loss/train/total: {loss}\n\t Train lr-DecoupledAdamW/group0: {lr}', range(1, 7)), 'Composer', 1, 1, set()),
    'lingua': (lines('0: INFO    24-11-05 10:00:00.123456 - 0:01:02 - step: {s}  acc: 0  loss: {loss}  grad: {g:.2e}  flops: 3.0e+13  wps: 8.1e+04  iter: 0.4  data: 0.01  lr: {lr:.2e}  mem: 50%'),
               'key-value lines', 1, 1, {'grad_norm', 'lr', 'throughput'}),
    'MaxText': (lines('completed step: {s}, seconds: 2.345, TFLOP/s/device: 50.2, Tokens/s/device: 1000.5, total_weights: 65536, loss: {loss:.3f}'), 'key-value lines', 1, 1, {'time'}),
    'llama2.c': (lines('{s} | loss {loss:.4f} | lr {lr:e} | 123.40ms | mfu 12.33%').replace('\n', '\n'), None, None, None, None),
    'jsonl': (''.join(json.dumps({'step': s, 'loss': l, 'gnorm': g, 'lr': LR, 'tok_per_s': 281959, 'elapsed': 1.5 * s}) + '\n' for s, l, g in zip(range(1, 7), LOSS, GNORM, strict=True)),
              'JSON lines', 1, 1, {'grad_norm', 'lr', 'throughput', 'time'}),
    'jsonl, nested': (''.join(json.dumps({'global_step': s, 'train': {'loss': l}, 'optim': {'grad_norm': g, 'lr': [LR]}}) + '\n' for s, l, g in zip(range(1, 7), LOSS, GNORM, strict=True)),
                      'JSON lines', 1, 1, {'grad_norm', 'lr'}),
    'W&B history': (''.join(json.dumps({'_step': s * 7, '_runtime': 3.5, '_timestamp': 1.7e9 + s, 'train/loss': l, 'trainer/global_step': s, 'train/grad_norm': g}) + '\n' for s, l, g in zip(range(1, 7), LOSS, GNORM, strict=True)),
                    'JSON lines', 1, 1, {'grad_norm', 'time'}),
    'trainer_state.json': (json.dumps({'epoch': 1.0, 'global_step': 60, 'max_steps': 600, 'log_history':
                                       [{'epoch': .1, 'step': s, 'loss': l, 'grad_norm': g, 'learning_rate': LR} for s, l, g in zip(range(10, 70, 10), LOSS, GNORM, strict=True)]
                                       + [{'eval_loss': 3.3, 'eval_runtime': 2.2, 'step': 60}, {'step': 60, 'train_loss': 3.5, 'train_runtime': 99.0, 'total_flos': 1e9}]}, indent=2),
                           'JSON', 10, 10, {'grad_norm', 'lr'}),
    'Lightning metrics.csv': ('epoch,lr-AdamW,step,train_loss,val_loss\n' + ''.join(f',{LR},{s},,\n0,,{s},{l},\n' for s, l in zip(range(49, 349, 50), LOSS, strict=True)) + '0,,299,,3.4\n', 'CSV', 49, 50, {'lr'}),
    'W&B CSV': ('"Step","dry-sun-7 - train/loss","dry-sun-7 - train/loss__MIN","dry-sun-7 - train/loss__MAX"\n' + ''.join(f'"{s}","{l}","{l}","{l}"\n' for s, l in zip(range(1, 7), LOSS, strict=True)), 'CSV', 1, 1, set()),
    'TensorBoard CSV': ('Wall time,Step,Value\n' + ''.join(f'1.7e9,{s},{l}\n' for s, l in zip(range(1, 7), LOSS, strict=True)), 'CSV', 1, 1, {'time'}),
    'semicolons and decimal commas': ('step;train_loss;lr\n' + ''.join(f'{s};{l};{LR}\n'.replace('.', ',') for s, l in zip(range(1, 7), LOSS, strict=True)), 'CSV', 1, 1, {'lr'}),
    'markdown table': ('| step | loss | grad_norm |\n|------|:----:|---|\n' + lines('| {s} | {loss} | {g} |'), 'CSV', 1, 1, {'grad_norm'}),
    'two bare columns': (lines('{s} {loss}'), 'CSV', 1, 1, set()),
    'tidy CSV': ('step,metric,value\n' + lines('{s},loss,{loss}\n{s},grad_norm,{g}\n{s},banana,7'), 'CSV', 1, 1, {'grad_norm'}),
    'columns as lists': (json.dumps({'step': list(range(1, 7)), 'loss': LOSS, 'lr': [LR] * 6}), 'JSON', 1, 1, {'lr'}),
}
FIXTURES.pop('llama2.c')                                  # its lines begin with a bare number: see the --map test


@pytest.mark.parametrize('name', FIXTURES)
def test_every_format_gives_the_same_table(name, tmp_path):
    text, format_, first, interval, columns = FIXTURES[name]
    path = tmp_path/'some.log'
    path.write_text(text)
    log = read_log(path)
    np.testing.assert_allclose(log.loss, LOSS, atol=6e-3 if name == 'MaxText' else 6e-5)
    np.testing.assert_array_equal(log.step, range(first, first + 6 * interval, interval))
    assert log.interval == interval
    assert log.format == format_
    assert columns <= set(log.columns), log.columns
    if 'grad_norm' in columns: np.testing.assert_allclose(log.grad_norm, GNORM, atol=6e-3)
    if 'lr' in columns and name != 'nanochat': np.testing.assert_allclose(log.lr, LR, rtol=1e-3)
    assert len(log.segments) == 1 and not log.nonfinite.any()


def test_evaluations_are_kept_apart(tmp_path):
    path = tmp_path/'log'
    for name, at, value in (('nanoGPT', 0, 10.9894), ('modded-nanogpt', 0, 10.8258), ('llm.c main.log', 0, 11.0092), ('nanochat', 0, 3.2166),
                            ('trainer_state.json', 60, 3.3), ('Lightning metrics.csv', 299, 3.4)):
        path.write_text(FIXTURES[name][0])
        (series,) = read_log(path).evals.values()
        assert (series.step.tolist(), series.value.tolist()) == ([at], [value]), name
    path.write_text(FIXTURES['Megatron'][0] + '-----\nvalidation loss at iteration 600 | lm loss value: 3.327091E+00 | lm loss PPL: 2.785E+01 |\n')
    (series,) = read_log(path).evals.values()
    assert (series.step.tolist(), series.value.tolist()) == ([600], [3.327091])
    path.write_text('\n'.join(json.dumps({'split': split, 'step': s, 'loss': 3. + (split == 'val')}) for s in range(5) for split in ('train', 'val')))
    log = read_log(path)
    assert log.loss.tolist() == [3.] * 5
    assert [v.value.tolist() for v in log.evals.values()] == [[4.] * 5]


def test_parquet(tmp_path):
    pa, pq = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    path = tmp_path/'log.parquet'
    pq.write_table(pa.table({'_step': range(6), 'train/loss': [*LOSS[:4], None, math.nan], 'run': ['a'] * 6, 'other': ['x'] * 6}), path)
    log = read_log(path)
    assert log.step.tolist() == [0, 1, 2, 3, 5]
    assert log.nonfinite.tolist() == [False] * 4 + [True]        # NaN is said, a null is not there


def record(payload):
    return struct.pack('<Q', len(payload)) + b'crc1' + payload + b'crc2'


def field_(number_, value):
    if isinstance(value, float): return bytes([number_ << 3 | 1]) + struct.pack('<d', value)
    if isinstance(value, int):
        out = bytes([number_ << 3])
        while value > 127: out += bytes([value & 127 | 128]); value >>= 7
        return out + bytes([value])
    return bytes([number_ << 3 | 2, len(value)]) + value


def test_tensorboard_events_by_hand_and_by_tensorboard(tmp_path):
    data = record(field_(1, 1.7e9) + field_(3, b'brain.Event:2'))
    for s, l, g in zip(range(1, 7), LOSS, GNORM, strict=True):
        for tag, x in ((b'train/loss', l), (b'grad_norm', g)):
            data += record(field_(1, 1.7e9) + field_(2, s * 100) + field_(5, field_(1, field_(1, tag) + b'\x15' + struct.pack('<f', x))))
    path = tmp_path/'events.out.tfevents.1700000000.host'
    path.write_bytes(data + data[:20])                           # a running job: the last record is cut off
    log = read_log(tmp_path)                                     # the folder is enough
    assert log.loss.tolist() == LOSS and log.step.tolist() == [100, 200, 300, 400, 500, 600] and log.grad_norm.tolist() == GNORM
    assert any('cut off' in n for n in log.notes)
    tensorboard = pytest.importorskip('torch.utils.tensorboard')
    with tensorboard.SummaryWriter(tmp_path/'real') as writer:
        for s, l in enumerate(LOSS): writer.add_scalar('loss', l, s); writer.add_scalar('eval/loss', l + 1, s)
    log = read_log(tmp_path/'real')
    assert log.loss.tolist() == LOSS and [v.value.tolist() for v in log.evals.values()] == [[l + 1 for l in LOSS]]


def test_packed_and_odd_encodings(tmp_path):
    text = FIXTURES['nanoGPT'][0]
    import zstandard
    for name, data in (('a.gz', gzip.compress(text.encode())), ('a.zst', zstandard.compress(text.encode())), ('a.log', text.encode('utf-16')),
                       ('b.log', b'\xef\xbb\xbf' + text.encode()), ('c.log', text.replace('\n', '\r\n').encode())):
        (tmp_path/name).write_bytes(data)
        np.testing.assert_allclose(read_log(tmp_path/name).loss, LOSS, atol=1e-4)


def test_prose_is_not_data_and_rows_in_prose_are_found(tmp_path):
    path = tmp_path/'chronicle.md'
    path.write_text('# Chronicle\nOn 2022-01-19 we saw the loss go up to 4.3 at step 17,000; the learning rate was 6e-5.\n\n```\n'
                    + lines('step {s} loss {loss:.4f} gnorm {g:.2f}  <- see section 3') + '```\nAfter that we restarted with 2 nodes fewer.\n')
    log = read_log(path)
    np.testing.assert_allclose(log.loss, LOSS, atol=1e-4)
    with pytest.raises(UserError, match='no training steps'):
        path.write_text('We lowered the loss from 3.2 to 2.9 in 10 hours.\nStep one: buy 3 machines.\n')
        read_log(path)


# ---------------------------------------------------------------------------------------- what is not a cliff
def run_text(steps, loss=lambda s: 3 - s / 1000, suffix=''):
    return ''.join(f'step {s} loss {loss(s):.6f} gnorm 0.10 lr 0.0005{suffix}\n' for s in steps)


def test_source_code_and_settings_in_a_log_are_not_rows(tmp_path):
    code = 'import torch\nval_loss_every : int = 125 # every how many steps to evaluate val loss?\nfor step in range(5100 + 1):\n    loss = 0.0\n    val_loss = 0.0\n    lr=0.02, momentum=0.95\n    print(f"step:{step}/{n} val_loss:{val_loss:.4f}")\n'
    code += '====\nRunning pytorch 2.6.0 compiled for CUDA 12.4\n| N/A   38C    P0            125W /  700W |     529MiB /  81559MiB |      0%      Default |\n'
    log = ''.join(f'step:{s}/5100 val_loss:{10 - s / 1000:.4f} train_time:{s * 99}ms step_avg:nanms\n' if s % 125 == 0 else f'step:{s}/5100 train_time:{s * 99}ms step_avg:98.9ms\n' for s in range(1000))
    (tmp_path/'log').write_text(code + log + code + log.replace('val_loss:', 'train_loss:7.5 val_loss:'))
    (tmp_path/'val only').write_text(code + log)
    log = read_log(tmp_path/'val only')
    assert log.step.tolist() == list(range(0, 1000, 125)) and log.loss[0] == 10 and any('stands in' in n for n in log.notes)
    log = read_log(tmp_path/'log')
    assert set(log.loss) == {7.5} and {float(x) for v in log.evals.values() for x in v.value} == {10 - s / 1000 for s in range(0, 1000, 125)}


def test_timers_between_the_rows_are_passed_over_quickly(tmp_path):
    row = ' iteration {s:8d}/  500000 | consumed samples: {s:12d} | elapsed time per iteration (ms): 1.2 | learning rate: 1E-4 | global batch size: 8 | lm loss: {x:.6E} | loss scale: 1.0 | grad norm: 0.512 | number of skipped iterations: 0 |\n'
    timers = 'time (ms) | forward-compute: {x:.2f} | backward-compute: 73.02 | optimizer-copy-to-main-grad: {s}.04 | batch-generator: 25.27\n'
    (tmp_path/'log').write_text(''.join(row.format(s=s, x=3 - s / 1e5) + timers.format(s=s, x=190 + s / 7) for s in range(1, 20_001)))
    start = time.process_time()
    log = read_log(tmp_path/'log')
    assert len(log) == 20_000 and time.process_time() - start < 2, time.process_time() - start


def test_restart_that_goes_back(tmp_path):
    (tmp_path/'log').write_text(run_text(range(100)) + 'Resuming from checkpoint step 60\n' + run_text(range(60, 120), lambda s: 3 - s / 990))
    log = read_log(tmp_path/'log')
    assert [(s.kind, s.run, s.came_from) for s in log.segments] == [('start', 0, None), ('restart', 0, 99)]
    assert log.step[log.history(1)].tolist() == list(range(120))
    assert log.loss[log.history(1)][70] == pytest.approx(3 - 70 / 990, abs=1e-6)      # the line that was kept, not the one taken back
    assert log.restarts and log.restarts[0][0] == 100


def test_three_restarts_and_history(tmp_path):
    (tmp_path/'log').write_text(run_text(range(0, 100)) + run_text(range(50, 80), lambda s: 5) + run_text(range(70, 90), lambda s: 6) + run_text(range(60, 65), lambda s: 7))
    log = read_log(tmp_path/'log')
    assert log.step[log.history(2)].tolist() == list(range(90))
    assert [len(np.flatnonzero(log.loss[log.history(2)] == x)) for x in (5, 6)] == [20, 20]
    assert log.step[log.history(3)].tolist() == list(range(65))
    assert [len(np.flatnonzero(log.loss[log.history(3)] == x)) for x in (5, 6, 7)] == [10, 0, 5]


def test_several_runs_in_one_file(tmp_path):
    (tmp_path/'log').write_text(run_text(range(100)) + run_text(range(80), lambda s: 4 - s / 500))
    log = read_log(tmp_path/'log')
    assert [(s.kind, s.run) for s in log.segments] == [('start', 0), ('new run', 1)]
    assert log.step[log.history(1)].tolist() == list(range(80))
    rows = [{'run': r, 'step': s, 'loss': 3. + (r == 'b')} for s in range(20) for r in 'ab']     # interleaved, named
    (tmp_path/'log').write_text('\n'.join(map(json.dumps, rows)))
    log = read_log(tmp_path/'log')
    assert log.runs == ['a', 'b'] and [s.kind for s in log.segments] == ['start', 'new run'] and (log.loss[:20] == 3).all()
    (tmp_path/'log').write_text('Step,red - loss,red - loss__MIN,blue - loss\n' + ''.join(f'{s},{3 - s / 100},0,{4 - s / 100}\n' for s in range(1, 20)))
    log = read_log(tmp_path/'log')
    assert log.runs == ['red', 'blue'] and len(log) == 38


def test_repeated_lines_and_ranks(tmp_path):
    one = run_text(range(100), lambda s: 3 - s / 997)
    (tmp_path/'log').write_text(''.join(line + line for line in one.splitlines(True)))           # every line twice
    assert len(read_log(tmp_path/'log')) == 100
    (tmp_path/'log').write_text(one + one)                                                       # the file twice
    log = read_log(tmp_path/'log')
    assert len(log) == 100 and len(log.segments) == 1 and any('stand twice' in n for n in log.notes)
    ranks = ''.join(f'[rank{r}]: step {s} loss {3 + r / 10:.2f}\n' for s in range(50) for r in range(4))
    (tmp_path/'log').write_text(ranks)
    log = read_log(tmp_path/'log')
    assert len(log) == 50 and np.allclose(log.loss, 3.15) and any('averaged' in n for n in log.notes)
    mixed = [f'[rank{r}]: step {s} loss 2.5 gnorm 0.5\n' for s in range(0, 50, 2) for r in (0, 1, 0, 1)]
    mixed = ''.join(line.replace(f'step {2 * (i // 4)} ', f'step {2 * (i // 4) + (i % 4 in (1, 3))} ') for i, line in enumerate(mixed))
    (tmp_path/'log').write_text(mixed)
    log = read_log(tmp_path/'log')
    assert log.step.tolist() == list(range(50)) and len(log.segments) == 1


@pytest.mark.parametrize('word', ['nan', 'NaN', 'NAN', '-nan', 'nan(ind)', '-nan(ind)', '1.#QNAN', '-1.#IND', 'inf', 'Inf', '-inf', 'Infinity', '1.#INF'])
def test_nan_in_every_spelling(word, tmp_path):
    (tmp_path/'log').write_text(run_text(range(20)) + f'step 20 loss {word} gnorm {word} lr 0.0005\n' + run_text(range(21, 30)))
    log = read_log(tmp_path/'log')
    assert len(log) == 30 and log.nonfinite.nonzero()[0].tolist() == [20]
    (tmp_path/'log').write_text('step,loss\n' + ''.join(f'{s},2.5\n' for s in range(9)) + f'9,{word}\n10,\n')
    assert read_log(tmp_path/'log').nonfinite.tolist() == [False] * 9 + [True]
    (tmp_path/'log').write_text(''.join(json.dumps({'step': s, 'loss': 2.5}) + '\n' for s in range(9)) + json.dumps({'step': 9, 'loss': word}))
    assert read_log(tmp_path/'log').nonfinite.nonzero()[0].tolist() == [9]


def test_missing_loss_beside_a_gradient_norm_is_not_finite(tmp_path):
    row = ' iteration {s:8d}/  500000 | consumed samples: {s:12d} | elapsed time per iteration (ms): 1.2 | learning rate: 1E-4 | global batch size: 8 |{loss} loss scale: 1.0 | grad norm: {g} | number of skipped iterations: 0 |\n'
    (tmp_path/'log').write_text(''.join(row.format(s=s, loss=f' lm loss: {3 - s / 100:.6E} |' if s < 50 else '', g=0.5 + s / 1e5 if s < 50 else 'nan') for s in range(1, 53)))
    log = read_log(tmp_path/'log')
    assert log.nonfinite.nonzero()[0].tolist() == [49, 50, 51] and any('no loss' in n for n in log.notes)


def test_stale_gradient_norm_and_overflow(tmp_path):
    out = []
    for s in range(60):
        skipped = s in (30, 31, 32)
        if skipped: out.append('[INFO] [stage_1_and_2.py:1644:step] [deepscale] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1048576.0, reducing to 524288.0')
        g = 464441.887 + (29 if skipped else s)
        out.append(f' iteration {s:8d}/ 159576 | consumed samples: {s:12d} | elapsed time per iteration (ms): 1.0 | learning rate: 5.9E-05 | global batch size: 2048 | lm loss: {2.66 + s / 1e4:.6E} | loss scale: 1048576.0 | grad norm: {g:.3f} | number of skipped iterations:   0 |')
    (tmp_path/'log').write_text('\n'.join(out))
    log = read_log(tmp_path/'log')
    assert log.skipped.nonzero()[0].tolist() == [30, 31, 32]
    assert log.stale.nonzero()[0].tolist() == [30, 31, 32] and np.isnan(log.grad_norm[30:33]).all() and np.isfinite(log.grad_norm[33:]).all()


def test_seed_guard_lines_are_skipped_steps(tmp_path):
    (tmp_path/'log').write_text(run_text(range(6000, 6380)) + '[skip:gnorm] step 6380 loss 1.14 gnorm 0.97 (ema gnorm 0.06) skips=1\n' + run_text(range(6381, 6390)))
    log = read_log(tmp_path/'log')
    assert log.step.tolist() == list(range(6000, 6390)) and log.skipped.nonzero()[0].tolist() == [380] and log.grad_norm[380] == 0.97


def test_our_own_log(tmp_path):
    rows = [{'step': s, 'tokens': s * 3072, 'loss': 2.0, 'grad_norm': .1, 'update_norm': .01, 'lr': 1e-3, 'domains': {'code_python': 8, 'math': 4},
             'domain_loss': {'code_python': 1.5, 'math': 3.0}, 'decision': 'nonfinite' if s == 3 else 'ok'} for s in range(10)]
    rows[5]['probes'] = {'math': {'nats_per_token': 2.5, 'bits_per_byte': 1.1}}
    (tmp_path/'log.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    log = read_log(tmp_path)
    assert log.skipped.tolist() == [s == 3 for s in range(10)] and log.tokens_per_step == 3072
    assert list(log.domains) == ['code_python', 'math'] and log.counts['code_python'].tolist() == [8] * 10
    assert [v.value.tolist() for k, v in log.evals.items() if 'nats' in k] == [[2.5]]
    np.testing.assert_array_equal(applied_mask(['ok', 'release', 'cap', 'loss', 'skip:gnorm']), [1, 1, 1, 0, 0])


def test_tokens_checkpoints_and_totals_from_the_text(tmp_path):
    (tmp_path/'log').write_text('Total batch size 524,288 => gradient accumulation steps: 4\n' + run_text(range(50)) + 'saving checkpoint at iteration 49 to /data\n' + run_text(range(50, 60)))
    log = read_log(tmp_path/'log')
    assert log.tokens_per_step == 524288 and log.checkpoints.tolist() == [49]
    assert any('524,288 tokens a step' in n for n in log.notes)


# ---------------------------------------------------------------------------------------- shapes that were not thought of first
def falling(s): return 2 + 6 * (1 + s / 20) ** -0.7


WILD = {  # name: (text, rows, first step, last step, what a note must say)
    'DeepSpeed counts skips': (''.join(f'[2023-01-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step={s}, skipped=0, lr=[6e-05], mom=[(0.9, 0.95)]\nsteps: {s} loss: {falling(s):.4f} iter time (s): 1.2 samples/sec: 207.1\n' for s in range(1, 90)), 89, 1, 89, ''),
    'docker JSON': (''.join(json.dumps({'log': f'step {s} loss {falling(s):.4f} gnorm 0.1\n', 'stream': 'stdout', 'time': '2025-01-01T00:00:00.0Z'}) + '\n' for s in range(1, 90)), 89, 1, 89, 'inside messages'),
    'messages in a CSV': ('timestamp,message\n' + ''.join(f'170000{s},"step {s} loss {falling(s):.4f} gnorm 0.1"\n' for s in range(1, 90)), 89, 1, 89, 'inside messages'),
    'a bracket that is no JSON': (''.join(f'[{s}k/30k] step={s} loss={falling(s):.4f}\n' for s in range(1, 90)), 89, 1, 89, ''),
    'Keras bars': (''.join(f'{s}/300 [====>.....] - ETA: 1:00 - loss: {falling(s):.4f} - accuracy: 0.5\n' for s in range(1, 90)), 89, 1, 89, ''),
    'batches of an epoch': (''.join(f'| epoch   1 | {s:6d}/   300 batches | lr 0.00030 | ms/batch 12.3 | loss {falling(s):5.2f} | ppl 12.3\n' for s in range(1, 90)), 89, 1, 89, ''),
    'clu': (''.join(f'I0101 10:00:00.123456 140 logging_writer.py:48] [{s}] accumulator=1, learning_rate=0.001, loss={falling(s):.5f}\n' for s in range(1, 90)), 89, 1, 89, ''),
    'ImageNet example': (''.join(f'Epoch: [{e}][{s:4d}/50]\tTime  0.520 ( 0.731)\tData  0.012 ( 0.101)\tLoss {falling(50 * e + s):.4e} ({falling(50 * e + s):.4e})\tAcc@1   0.39 (  0.11)\n' for e in range(3) for s in range(50)), 150, 0, 149, ''),
    'MNIST example': (''.join(f'Train Epoch: 1 [{s}/60000 ({s / 600:.0f}%)]\tLoss: {falling(s):.6f}\n' for s in range(0, 900, 10)), 90, 0, 890, ''),
    'llama2.c': (''.join(f'{s} | loss {falling(s):.4f} | lr 5.0e-04 | 123.40ms | mfu 12.33%\n' for s in range(1, 90)), 89, 1, 89, ''),
    'build-nanogpt': (''.join(f'{s} train {falling(s):.6f}\n' + (f'{s} val {falling(s):.4f}\n{s} hella 0.25\n' if s % 20 == 0 else '') for s in range(1, 90)), 89, 1, 89, ''),
    'a bar behind the loss': (''.join(f'\rloss {falling(s):.4f}: {s:3d}%|#  | {s}/300 [00:10<00:20, 9.5it/s]' for s in range(1, 90)) + '\n', 89, 1, 89, ''),
    'a step in brackets': (''.join(f'[{s:5d}] loss={falling(s):.4f} lr=3e-4\n' for s in range(1, 90)), 89, 1, 89, ''),
    'YAML': (''.join(f'- step: {10 * s}\n  lr: 0.1\n  loss: {falling(10 * s):.4f}\n' for s in range(1, 90)), 89, 10, 890, ''),
    'TensorBoard download': (json.dumps([[1.7e9 + s, s, falling(s)] for s in range(1, 90)]), 89, 1, 89, ''),
    'a curve': (json.dumps({'data': [{'name': 'loss', 'x': list(range(1, 90)), 'y': [falling(s) for s in range(1, 90)]}]}), 89, 1, 89, ''),
    'zeros of a crash': (''.join(f'step {s} loss {falling(s):.4f}\n' for s in range(1, 50)) + '\0' * 5000 + ''.join(f'step {s} loss {falling(s):.4f}\n' for s in range(50, 90)), 89, 1, 89, ''),
    'epochs only': (''.join(f'[Epoch {s}] Train Loss: {falling(s):.4f} | Val Loss: {falling(s):.4f}\n' for s in range(1, 90)), 89, 1, 89, 'numbered by their epoch'),
    'one named part of the loss': (''.join(json.dumps({'global_step': s, 'loss/out': falling(s), 'optim/lr': 3e-4}) + '\n' for s in range(1, 90)), 89, 1, 89, ''),
    'steps of an epoch': (''.join(f'step {s} loss {falling(100 * e + s):.4f}\n' for e in range(5) for s in range(100)), 500, 0, 499, 'numbered through'),
    'a time of day before it': ('I 12:00 ' + ''.join(f'INFO:root:step: {s}, train loss: {falling(s):.3f}, best val loss: 2.1\n' for s in range(1, 90)), 89, 1, 89, ''),
    'journal': (''.join(f'Jan 01 10:00:{s % 60:02d} gpu-17 python[1{s}]: step {s} loss {falling(s):.4f} gnorm 0.1\n' for s in range(1, 90)), 89, 1, 89, ''),
}


@pytest.mark.parametrize('name', WILD)
def test_wild_shapes(name, tmp_path):
    text, n, first, last, note = WILD[name]
    (tmp_path/'log').write_text(text)
    log = read_log(tmp_path/'log')
    assert (len(log), int(log.step[0]), int(log.step[-1])) == (n, first, last) and len(log.segments) == 1
    assert np.abs(log.loss - falling(log.step)).max() < 0.011
    assert log.skipped is None or not log.skipped.any()
    assert not note or any(note in x for x in log.notes), log.notes


def test_many_rows_an_epoch_are_numbered(tmp_path):
    (tmp_path/'log').write_text(''.join(f'Epoch {e}: loss {falling(30 * e + s):.4f}\n' for e in range(3) for s in range(30)))
    log = read_log(tmp_path/'log')
    assert log.step.tolist() == list(range(1, 91)) and any('rows are numbered' in n for n in log.notes)


def test_runs_of_equal_length_are_no_epochs(tmp_path):
    "Five runs, one after the other in a file, begin again with a high loss; so does one that is resumed from the same checkpoint five times."
    (tmp_path/'log').write_text(''.join(f'step {s} loss {falling(s):.4f}\n' for _ in range(5) for s in range(100)))
    assert len(read_log(tmp_path/'log').segments) == 1                    # to the digit the same: one run, said five times
    rng = np.random.default_rng(0)
    (tmp_path/'log').write_text(''.join(f'step {s} loss {falling(s) + 0.01 * rng.standard_normal():.4f}\n' for _ in range(5) for s in range(100)))
    assert [(s.run, s.kind) for s in read_log(tmp_path/'log').segments][1:] == [(k, 'new run') for k in range(1, 5)]


def test_the_accuracy_of_llmc_is_no_loss(tmp_path):
    (tmp_path/'main.log').write_text(''.join(f's:{s} trl:{falling(s):.4f} lr:0.0003 norm:0.5\n' + (f's:{s} tel:{falling(s):.4f}\ns:{s} eval:0.2{s % 10}\n' if s % 20 == 0 else '') for s in range(90)))
    assert list(read_log(tmp_path/'main.log').evals) == ['tel']


# ---------------------------------------------------------------------------------------- mapping, following, provenance
def test_mapping_decides(tmp_path):
    (tmp_path/'log').write_text('tick,cost,loss_b\n' + ''.join(f'{s},{3 - s / 10},{9}\n' for s in range(9)))
    log = read_log(tmp_path/'log', {'loss': 'cost', 'step': 'tick'})
    assert log.loss[1] == 2.9 and log.step.tolist() == list(range(9))
    (tmp_path/'log').write_text(''.join(f'epoch {s} objective_x={3 - s / 10} done\n' for s in range(9)))
    log = read_log(tmp_path/'log', {'loss': 'objective_x', 'step': 'epoch'})
    assert log.loss[1] == 2.9 and log.step.tolist() == list(range(9))
    with pytest.raises(UserError, match=r"no column 'banana'"): read_log(tmp_path/'log', {'loss': 'banana'})
    with pytest.raises(UserError, match='the columns are'): read_log(tmp_path/'log', {'color': 'epoch', 'loss': 'objective_x', 'step': 'epoch'})


def test_following_a_log_equals_reading_it(tmp_path):
    for name in ('nanoGPT', 'jsonl', 'Lightning metrics.csv', 'OLMo-core', 'trainer_state.json'):
        data = FIXTURES[name][0].encode()
        path = tmp_path/re.sub(r'\W', '', name)
        path.write_bytes(b'')
        follower, last = Follower(path), None
        for k in range(0, len(data), 37):
            with open(path, 'ab') as f: f.write(data[k:k + 37])
            last = follower.poll() or last
        with open(path, 'ab') as f: f.write(b'\n')
        last = follower.poll() or last
        whole = read_log(path)
        n = len(last)
        assert n >= 5 and last.step.tolist() == whole.step[:n].tolist() and last.loss.tolist() == whole.loss[:n].tolist(), name
        assert follower.poll() is None
    path.write_text(run_text(range(30)))                                  # replaced by a shorter one
    assert len(Follower(path).poll()) == 30


def test_a_followed_log_may_be_cut_short_replaced_or_written_anew(tmp_path):
    path = tmp_path/'log'
    path.write_text(run_text(range(100)))
    follower = Follower(path)
    assert len(follower.poll()) == 100 and follower.file == 0 and follower.poll() is None
    with open(path, 'a') as f: f.write(run_text(range(100, 120)))
    assert len(follower.poll()) == 120 and follower.file == 0
    path.write_text(run_text(range(50)))                                  # cut short
    assert len(follower.poll()) == 50 and follower.file == 1
    path.write_text(run_text(range(7, 300)))                              # longer, but it begins otherwise
    log = follower.poll()
    assert (len(log), int(log.step[0]), follower.file) == (293, 7, 2)
    (tmp_path/'other').write_text(run_text(range(400)))
    (tmp_path/'other').replace(path)                                      # rotated
    assert len(follower.poll()) == 400 and follower.file == 3
    path.unlink()
    assert follower.poll() is None
    path.write_bytes(bytes(range(256)) * 99)
    with pytest.raises(UserError, match='binary'): follower.poll()
    with pytest.raises(UserError, match='cannot be followed'): Follower('-')


def test_every_row_says_where_it_stands(tmp_path):
    text = '# header\n\n' + run_text(range(10)) + 'words\n' + run_text(range(10, 20))
    (tmp_path/'log').write_text(text)
    log = read_log(tmp_path/'log')
    source = text.split('\n')
    for i in range(20): assert source[log.line[i] - 1].startswith(f'step {log.step[i]} ')
    assert raw_lines(tmp_path/'log', [log.line[3]])[log.line[3]].startswith('step 3 ')


# ---------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize('name, data, message', [
    ('empty', b'', 'empty'), ('blank', b'\n \n', 'empty'), ('zeros', bytes(4096), 'empty'),
    ('random', np.random.default_rng(0).bytes(100_000), 'binary'), ('pickle', b'\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05model\x94' * 50, 'binary'),
    ('png', b'\x89PNG\r\n\x1a\n' + bytes(range(256)) * 9, 'binary'),
    ('gzip, cut off', gzip.compress(FIXTURES['nanoGPT'][0].encode())[:-30], 'cannot be read'), ('zstd, damaged', b'\x28\xb5\x2f\xfd' + b'\xff' * 99, 'zstd'),
    ('parquet, cut off', b'PAR1' + bytes(50), 'parquet'), ('prose', b'It was a dark and stormy night.\n' * 50, 'no training steps'),
    ('deep JSON', b'{"a":' * 50_000 + b'1' + b'}' * 50_000, 'nested too deeply'), ('deep list', b'[' * 100_000, 'no training steps|nested too deeply'),
    ('JSON without losses', b'{"a": [1, 2], "b": {"c": "d"}}', 'no training steps'),
])
def test_bad_input_is_one_clear_line(name, data, message, tmp_path):
    path = tmp_path/'bad.log'
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as error: read_log(path)
    assert '\n' not in str(error.value) and len(str(error.value)) < 500


def test_missing_and_folder(tmp_path):
    with pytest.raises(UserError, match='cannot be read'): read_log(tmp_path/'no such file')
    with pytest.raises(UserError, match='no log in this folder'): read_log(tmp_path)


def test_escapes_and_html_are_never_raw(tmp_path):
    (tmp_path/'log').write_text('tick,\x1b[31m<script>loss\n' + ''.join(f'{s},{s}\n' for s in range(9)))
    with pytest.raises(UserError) as error: read_log(tmp_path/'log', {'loss': 'nope'})
    assert '\x1b' not in str(error.value)
    (tmp_path/'log').write_text(''.join(json.dumps({'step': s, 'loss': 2.5, 'eval_\x1b]0;owned\x07<b>loss': 2.6}) + '\n' for s in range(9)))
    assert '\x1b' not in json.dumps(read_log(tmp_path/'log').to_dict(), ensure_ascii=False)


def test_truncated_document_is_read_as_far_as_it_goes(tmp_path):
    text = FIXTURES['trainer_state.json'][0]
    (tmp_path/'trainer_state.json').write_text(text[:text.index('"step": 50') + 40])
    log = read_log(tmp_path)
    assert log.loss.tolist() == LOSS[:4] and any('cut off' in n for n in log.notes)


def test_one_line_of_a_gigabyte_takes_little_memory(tmp_path):
    """200 MB here (the reader sees a mebibyte at a time, whatever the length): as text, as JSON, as a zstd bomb."""
    import zstandard
    path = tmp_path/'log'
    size = 200 << 20
    script = ("import resource, sys\nfrom shohin.runlog import read_log\nfrom shohin.shards import UserError\n"
              "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
              "try: read_log(sys.argv[1]); print('read')\nexcept UserError as e: print(e)\n"
              "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) >> 10)")
    compressor = zstandard.ZstdCompressor().compressobj()
    with open(path, 'wb') as f:
        for _ in range(200): f.write(compressor.compress(b'loss 2.5 ' * 116_509))
        f.write(compressor.flush())
    out = subprocess.run([sys.executable, '-c', script, str(path)], capture_output=True, text=True, timeout=120)
    message, mebibytes = out.stdout.strip().split('\n')
    assert 'no training steps' in message and int(mebibytes) < 200, out
    with open(path, 'wb') as f: f.write(b'['); f.truncate(size)               # sparse: '[' and then zeros
    out = subprocess.run([sys.executable, '-c', script, str(path)], capture_output=True, text=True, timeout=120)
    assert int(out.stdout.strip().split('\n')[1]) < 400 and 'Traceback' not in out.stderr, out


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=60), st.from_regex(r'(step|iter|loss)[ :=]{1,3}[0-9,.eE+-]{0,12}( loss[:= ]{1,2}(nan|[0-9.]{1,9}))?', fullmatch=True)), max_size=30))
def test_anything_is_read_or_refused(tmp_path_factory, texts):
    path = tmp_path_factory.getbasetemp()/'fuzz.log'
    path.write_bytes('\n'.join(texts).encode('utf-8', 'surrogatepass'))
    try: log = read_log(path)
    except UserError as e: assert '\n' not in str(e)
    else:
        assert len(log.step) == len(log.loss) == len(log.line) and sum(s.stop - s.start for s in log.segments) == len(log)
        json.dumps(log.to_dict())


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(FIXTURES)), st.data())
def test_mutated_logs_are_read_or_refused(tmp_path_factory, name, data):
    raw = bytearray(FIXTURES[name][0].encode())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at:at + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=12))
    path = tmp_path_factory.getbasetemp()/'mutated.log'
    path.write_bytes(raw)
    try: read_log(path)
    except UserError as e: assert '\n' not in str(e)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_numbers_round_trip(x):
    for text in (f'{x:.9g}', f'{x:.8e}', f'{x:,.4f}'): assert number(text) == float(text.replace(',', ''))


def test_lines_split_anywhere_are_the_same_lines():
    data = 'ünï\ncode\r\nlines\rof\n\ntext'.encode()
    for k in range(len(data)):
        source, out = Lines(Rows()), []
        for part, end in ((data[:k], False), (data[k:], True)): out += source.feed(part, end)[0]
        assert [line for line in out if line] == ['ünï', 'code', 'lines', 'of', 'text']


def test_import_is_light():
    out = subprocess.run([sys.executable, '-X', 'importtime', '-c', 'import shohin.runlog, shohin.diagnose'], capture_output=True, text=True).stderr
    loaded = {line.rsplit('|', 1)[1].strip() for line in out.splitlines() if '|' in line}
    assert not loaded & {'torch', 'pandas', 'matplotlib', 'pyarrow', 'rich'}


def test_classify_examples():
    for key, column in {'loss': 'loss', 'lm loss': 'loss', 'train/CrossEntropyLoss': 'loss', 'loss/train/total': 'loss', 'optim/LR (group 0)': 'lr', 'lr-AdamW/pg1': 'lr',
                        'throughput/device/tokens_per_second': 'throughput', 'number of skipped iterations': 'skipped', 'num_input_tokens_seen': 'tokens'}.items():
        assert classify(key)[0] == column, key
    assert classify('val_loss')[0] == classify('eval/paloma/c4 loss')[0] == 'eval'
