"""A labelled set of training traces: every event kind and healthy runs, each with its truth, from a seed.

A trace is what a log would hold: steps, losses, gradient norms and whatever else the trainer of that run printed. The
synthetic ones are made of parts that real logs have (a power law or two, correlated and heavy-tailed batch noise,
domains that alternate, warm-up and decay, printing with few digits, rows every k steps, restarts) and of the shapes that
are published: Marin's bad spike of 1.96 -> 2.02 -> 1.975, a level shift with flat evals, the step to 3.0 under a guard that
skips for ever, a 176B spike whose gradient norm leads by four steps. `recorded.npz` holds traces of real runs of this
project's own model: some into which a cause was put on purpose (`python tests/traces.py` makes those anew), and the logs of
some runs of its experiments, whose batches are read from shards one after the other, so that their losses wander.

The set has two halves, told apart by the number of the trace: thresholds were chosen on the even half only.
"""
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
PER_KIND = 12
KINDS = ('outlier', 'recovered spike', 'bad spike', 'level shift', 'slow divergence', 'warm-up blow-up', 'plateau', 'guard freeze', 'data shift', 'nan')


@dataclass
class Trace:
    "`events` are (kind, onset step); healthy traces have none but perhaps outliers."
    name: str
    kind: str                       # the kind it is an example of, or 'healthy'
    columns: dict
    events: list = field(default_factory=list)
    number: int = 0

    @property
    def held_out(self): return self.number % 2 == 1


class Run:
    "A healthy run to start from: every part drawn from `rng`."
    def __init__(self, rng, n=None, every=None, noise=None):
        self.rng = rng
        self.n = n = int(n or rng.choice([900, 1500, 2500, 4000, 8000]))
        self.every = every = int(every or rng.choice([1, 1, 1, 5, 10]))
        self.step = np.arange(1, n + 1) * every - (every - 1)
        self.floor, self.start = rng.uniform(0.9, 3.2), rng.uniform(8, 11)
        power, scale = rng.uniform(0.25, 0.6), rng.uniform(10, 60)
        t = self.step / (self.step[-1] / n)
        self.curve = self.floor + (self.start - self.floor) * (1 + t / scale) ** -power
        self.noise = noise or rng.choice([0.004, 0.01, 0.02, 0.04]) * self.floor
        self.warm = int(n * rng.uniform(0.01, 0.06)) + 20
        peak, kind = 10 ** rng.uniform(-4, -2.3), rng.choice(['cosine', 'wsd', 'constant'])
        u = np.arange(n) / n
        decay = {'cosine': 0.1 + 0.45 * (1 + np.cos(np.pi * u)), 'wsd': np.minimum(1, np.maximum(0.1, (1 - u) / 0.2)), 'constant': np.ones(n)}[kind]
        self.lr = peak * np.minimum(1, (np.arange(n) + 1) / self.warm) * decay
        self.extra = {}
        self.digits = int(rng.choice([2, 3, 4, 6]) if self.noise > 0.02 else rng.choice([4, 5, 6]))
        self.loss = self.curve + self.batch_noise(n)
        self.g0 = 10 ** rng.uniform(-1.2, 0.3)
        self.grad = self.g0 * (1 + 3 * np.exp(-np.arange(n) / (2 * self.warm))) * np.exp(rng.choice([0.08, 0.15, 0.25]) * rng.standard_normal(n))

    def batch_noise(self, n):
        rng, kind = self.rng, self.rng.choice(['normal', 'normal', 'correlated', 'tails', 'domains'])
        e = rng.standard_normal(n)
        if kind == 'correlated':
            f = np.empty(n); f[0] = 0
            for i in range(1, n): f[i] = 0.7 * f[i - 1] + 0.3 * e[i]
            e = 0.6 * e + f
        if kind == 'tails': e = rng.standard_t(6, n) / 1.2
        out = self.noise * e
        if kind == 'domains': out = out + self.noise * rng.uniform(3, 8) * (rng.random(n) < rng.uniform(0.2, 0.6))
        return out

    def at(self, low=0.35, high=0.75): return int(self.n * self.rng.uniform(low, high))

    def evals(self, effect=None, name='val_loss'):
        "An evaluation every twentieth of the run: the curve, plus what the event does to it."
        gap = max(2, self.n // 24)
        rows = np.arange(gap - 1, self.n, gap)
        v = np.full(self.n, np.nan)
        v[rows] = self.curve[rows] * 1.01 + 0.15 * self.noise * self.rng.standard_normal(len(rows)) + (0 if effect is None else effect[rows])
        self.extra[name] = v

    def columns(self, grad=None, lr=None):
        rng, out = self.rng, {'step': self.step, 'loss': np.where(np.isfinite(self.loss), np.round(self.loss, self.digits), self.loss)}
        if grad if grad is not None else rng.random() < 0.75: out['grad_norm'] = np.where(np.isfinite(self.grad), np.round(self.grad, 4), self.grad)
        if lr if lr is not None else rng.random() < 0.6: out['lr'] = self.lr
        return out | self.extra


def spike(n, t, height, decay, ramp=0):
    "0 before t, `height` at t, then an exponential decay; `ramp` rows of rise before the peak."
    i = np.arange(n) - t
    return np.where(i >= 0, height * np.exp(-np.maximum(i, 0) / decay), np.where((i >= -ramp) & (ramp > 0), height * np.exp(2.0 * np.minimum(i, 0) / max(ramp, 1)), 0))


def outliers(run, count):
    "Isolated rows that stand out from whatever noise the run has, at least 60 rows apart. Returns their steps."
    blocks = np.unique(np.arange(run.warm + 60, run.n - 90) // 60)
    at = np.sort(run.rng.choice(blocks, size=min(count, len(blocks)), replace=False)) * 60 + run.rng.integers(0, 20, min(count, len(blocks)))
    at = at[(at > run.warm + 40) & (at < run.n - 30)]
    reach = np.quantile(run.loss - run.curve, 0.995)                # as far as one row in 200 goes by itself
    run.loss[at] = run.curve[at] + reach * run.rng.uniform(2.5, 8, len(at)) + 0.05 * run.curve[at]
    run.grad[at] *= run.rng.uniform(3, 12, len(at))
    return [int(run.step[t]) for t in at]


def healthy(rng, number):
    run, what = Run(rng), number % 16
    events, grad = [], None
    if what in (1, 5): events = [('outlier', s) for s in outliers(run, int(rng.integers(1, 6)))]
    if what == 2:                                                   # the learning rate goes up again, as planned
        a, b = run.at(.4, .5), run.at(.55, .6)
        run.lr[a:b] *= np.linspace(0.2, 1, b - a)
    if what == 3: run.evals()
    if what == 4: run.extra['domain_loss'] = {d: run.curve * f + 2 * run.noise * rng.standard_normal(run.n) for d, f in (('code', .8), ('web', 1.1))}
    if what == 6:                                                   # a few isolated skipped updates
        skipped = rng.random(run.n) < 0.01
        run.extra['skipped'] = skipped.astype(float); grad = True
        run.grad[skipped] *= 8
    if what >= 8: return awkward(rng, what), events
    columns = run.columns(grad)
    if what == 7:                                                   # the run went back twice, and repeated nothing exactly
        back = np.r_[np.arange(run.n // 2), np.arange(run.n // 3, int(run.n * .8)), np.arange(int(run.n * .7), run.n)]
        again = run.curve[back] + run.batch_noise(len(back))
        columns = {k: np.asarray(v)[back] for k, v in columns.items()} | {'loss': np.round(again, run.digits)}
    return columns, events


def awkward(rng, what):
    "Healthy runs that do not look like the textbook."
    if what == 8:                                                   # fine-tuning: noisy, three epochs, each a little lower
        n = int(rng.integers(150, 900))
        i = np.arange(n)
        level = rng.uniform(0.8, 2.0) * (1 + 0.3 * np.exp(-i / (n / 40))) - 0.12 * (i // (n // 3 + 1))
        return {'step': 10 * i + 10, 'loss': np.round(level * np.exp(rng.choice([0.1, 0.2]) * rng.standard_normal(n)), 4), 'grad_norm': np.exp(0.4 * rng.standard_normal(n)), 'lr': 2e-5 * (1 - i / n)}
    if what == 9:                                                   # the learning rate is restarted: up by a few per cent, and down again
        run = Run(rng, n=rng.choice([2500, 4000]), every=1)
        i, third = np.arange(run.n), run.n // 3
        phase = (i % third) / third
        run.lr = 1e-3 * (0.55 + 0.45 * np.cos(np.pi * phase))
        run.loss += 0.05 * run.curve * (1 + np.cos(np.pi * phase)) / 2 * np.minimum(1, (i % third) / 80)
        return run.columns(lr=True)
    if what == 10:                                                  # the batch grows: the noise shrinks
        run = Run(rng)
        run.loss = run.curve + (run.loss - run.curve) / np.sqrt(1 + 15 * np.arange(run.n) / run.n)
        return run.columns()
    if what == 11:                                                  # a bump in the warm-up, as high learning rates make it
        run = Run(rng, every=1)
        i = np.arange(run.n)
        run.loss += rng.uniform(0.05, 0.15) * run.curve * np.exp(-((i - 1.2 * run.warm) / (0.5 * run.warm)) ** 2)
        return run.columns()
    if what == 12:                                                  # only an evaluation now and then
        run = Run(rng, n=int(rng.integers(14, 90)), every=125, noise=0.004)
        return {'step': run.step, 'val_loss': np.round(run.curve + 0.003 * rng.standard_normal(run.n), 4)}
    if what == 13:                                                  # a short log
        run = Run(rng, n=int(rng.integers(20, 120)))
        return run.columns()
    if what == 14:                                                  # a long one whose mixture drifts
        run = Run(rng, n=20_000, every=1)
        drift = np.interp(np.arange(run.n), np.linspace(0, run.n, 60), np.cumsum(rng.standard_normal(60)) * 0.15 * run.noise)
        run.loss += drift
        return run.columns()
    run = Run(rng, n=rng.choice([2500, 4000]), every=1)             # what == 15: a long cool-down, which lowers the loss quickly
    i = np.arange(run.n)
    cool = np.clip((i - 0.8 * run.n) / (0.2 * run.n), 0, 1)
    run.lr = 1e-3 * np.minimum(1, (i + 1) / run.warm) * (1 - cool)
    run.loss -= 0.06 * run.curve * cool
    return run.columns(lr=True)


def outlier(rng, number):
    run = Run(rng)
    events = [('outlier', s) for s in outliers(run, int(rng.integers(1, 4)))]
    return run.columns(), events


def recovered_spike(rng, number):
    run = Run(rng)
    t, ramp = run.at(), int(rng.choice([0, 0, 2, 4]))
    height = run.curve[t] * rng.uniform(0.15, 1.2) + 15 * run.noise
    run.loss += spike(run.n, t, height, rng.uniform(3, 25), ramp)
    lead = int(rng.choice([-2, 0, 1, 4]))
    run.grad *= 1 + spike(run.n, t - lead, 10 ** rng.uniform(1, 3), rng.uniform(2, 6), 2)
    return run.columns(), [('recovered spike', int(run.step[t]))]


def bad_spike(rng, number):
    run = Run(rng, every=1, noise=rng.uniform(0.003, 0.012) * 2)
    t = run.at(.35, .6)
    # more than the curve falls meanwhile: otherwise it would be back at the level of before, and nobody could tell
    offset = run.curve[t] * rng.uniform(0.008, 0.06) + run.noise + 1.2 * (run.curve[t] - run.curve[min(t + 350, run.n - 1)])
    height = offset * rng.uniform(3, 12) + 10 * run.noise
    run.loss += spike(run.n, t, height, rng.uniform(4, 20)) + offset * (np.arange(run.n) >= t)
    run.grad *= 1 + spike(run.n, t, 30, 4)
    if rng.random() < 0.4: run.evals(offset * (np.arange(run.n) >= t))
    return run.columns(), [('bad spike', int(run.step[t]))]


def level_shift(rng, number):
    run = Run(rng)
    t = run.at()
    height = run.curve[t] * (rng.uniform(0.6, 1.8) if number % 3 else rng.uniform(0.05, 0.3)) + 8 * run.noise
    i = np.arange(run.n)
    run.loss += np.where(i >= t, height * np.minimum(1, 0.8 + 0.2 * (i - t) / 3) * np.exp(-(i - t) / run.n * rng.uniform(0, 0.5)), 0)
    if rng.random() < 0.4: run.evals(height * (i >= t))
    if rng.random() < 0.5: run.grad[t:] *= rng.uniform(1.5, 5)
    return run.columns(), [('level shift', int(run.step[t]))]


def slow_divergence(rng, number):
    run = Run(rng, n=rng.choice([1500, 2500, 4000]))
    t, i = run.at(.3, .6), np.arange(run.n)
    total = run.curve[t] * rng.uniform(0.12, 0.8) + 10 * run.noise
    extra = total * np.clip((i - t) / (run.n - t), 0, 1) ** rng.uniform(0.8, 1.6)
    run.loss += extra
    run.grad *= 1 + 3 * np.clip((i - t) / (run.n - t), 0, 1)
    return run.columns(), [('slow divergence', int(run.step[np.argmin(run.curve + extra)]))]      # where the loss is lowest


def warmup_blowup(rng, number):
    run = Run(rng, n=rng.choice([900, 1500, 2500]), every=1)
    run.warm = int(run.n * rng.uniform(0.1, 0.3))
    run.lr = 10 ** rng.uniform(-3, -1.5) * np.minimum(1, (np.arange(run.n) + 1) / run.warm)
    t, i = int(run.warm * rng.uniform(0.4, 0.95)), np.arange(run.n)
    level = rng.uniform(0.25, 0.9) * (run.start - run.curve[t]) + 10 * run.noise
    shape = np.clip((i - t) / rng.choice([1, 10, 40]), 0, 1)
    run.loss += level * shape * (1 - 0.1 * (i - t) / run.n)
    run.loss = np.maximum(run.loss, np.where(i > t + 60, run.curve[t] + 0.8 * level + run.noise * rng.standard_normal(run.n), -9))
    run.grad *= 1 + 20 * shape
    if number % 4 == 3: run.loss[t + 50:], run.grad[t + 50:] = np.inf, np.inf
    return run.columns(lr=True), [('warm-up blow-up', int(run.step[t]))]


def plateau(rng, number):
    run = Run(rng, n=rng.choice([1500, 2500, 4000]), noise=rng.uniform(0.004, 0.015) * 2)
    t = int(run.n * rng.uniform(.08, .25))
    if run.curve[t] - run.curve[-1] < 0.15 * run.curve[t]: run.curve = run.floor + (run.start - run.floor) * (1 + np.arange(run.n) / 30) ** -0.5
    run.curve = np.where(np.arange(run.n) < t, run.curve, run.curve[t])
    run.loss = run.curve + run.batch_noise(run.n)
    run.lr = run.lr.max() * np.minimum(1, (np.arange(run.n) + 1) / run.warm)
    return run.columns(), [('plateau', int(run.step[t]))]


def guard_freeze(rng, number):
    run = Run(rng, every=1)
    t, i = run.at(.3, .7), np.arange(run.n)
    height = run.curve[t] * rng.uniform(1.1, 2.2)
    last = run.n if number % 3 else min(run.n, t + 300)
    run.loss = np.where(i >= t, run.curve[t] + height + 2 * run.noise * rng.standard_normal(run.n), run.loss)
    if number % 5 == 4: run.loss = np.where(i >= t, run.curve[t] + run.noise * rng.standard_normal(run.n), run.curve + run.noise * rng.standard_normal(run.n))   # no step: the gradient guard froze it
    skipped = (i >= t) & (rng.random(run.n) > 0.01)
    columns = run.columns(grad=True)
    columns = {k: np.asarray(v)[:last] for k, v in columns.items()}
    if number % 4 == 1: columns['update_norm'] = np.where(skipped, 0, 0.1 * np.exp(.1 * rng.standard_normal(run.n)))[:last]
    elif number % 4 == 2: columns['decision'] = np.where(skipped, 'skip:loss', 'apply').astype(object)[:last]
    else: columns['skipped'] = skipped[:last].astype(float)
    return columns, [('guard freeze', int(run.step[t]))]


def data_shift(rng, number):
    run = Run(rng, noise=rng.uniform(0.004, 0.02) * 2)
    t, i = run.at(.4, .7), np.arange(run.n)
    sign = 1 if number % 3 else -1
    height = sign * (run.curve[t] * rng.uniform(0.03, 0.5) + 6 * run.noise)
    if sign < 0: height = -min(-height, 0.5 * run.curve[t])
    after = i >= t
    run.loss += height * after
    how = number % 4
    if how in (0, 1): run.evals(0.03 * height * after)
    if how == 1: run.evals(-0.05 * height * after, 'eval/code loss')
    if how == 2:
        run.extra['domains'] = {'code': np.where(after, 12, 4 + rng.integers(-1, 2, run.n)), 'web': np.where(after, 0, 8)}
    if how == 3:
        run.extra['domain_loss'] = {'code': run.curve - run.loss.min() * .1 + height * after + 2 * run.noise * rng.standard_normal(run.n),
                                    'web': run.curve * 1.1 - 0.6 * height * after + 2 * run.noise * rng.standard_normal(run.n)}
    return run.columns(), [('data shift', int(run.step[t]))]


def nan(rng, number):
    run = Run(rng)
    t = run.at(.3, .8)
    last = run.n if number % 2 else t + int(rng.integers(1, 4))
    run.loss[t:last] = np.inf
    run.grad[t:last] = np.inf
    return run.columns(), [('nan', int(run.step[t]))]


MAKERS = dict(zip(KINDS, (outlier, recovered_spike, bad_spike, level_shift, slow_divergence, warmup_blowup, plateau, guard_freeze, data_shift, nan), strict=True))


def synthetic():
    "PER_KIND traces of every kind and as many healthy ones as all of them together."
    out = []
    for k, (kind, make) in enumerate(MAKERS.items()):
        for number in range(PER_KIND):
            columns, events = make(np.random.default_rng([6 + 20 * (number % 2), k, number]), number // 2)    # both halves have every variant
            out.append(Trace(f'{kind} {number}', kind, columns, events, number))
    for number in range(PER_KIND * len(KINDS)):
        columns, events = healthy(np.random.default_rng([7 + 20 * (number % 2), number]), number // 2)
        out.append(Trace(f'healthy {number}', 'healthy', columns, events, number))
    return out


def fresh():
    "Traces from the same makers and other random numbers, drawn after the last change of the rules: nothing was chosen on them."
    out = [Trace(f'fresh {kind} {n}', kind, *make(np.random.default_rng([901, k, n]), n // 2), n) for k, (kind, make) in enumerate(MAKERS.items()) for n in range(PER_KIND)]
    return out + [Trace(f'fresh healthy {n}', 'healthy', *healthy(np.random.default_rng([902, n]), n // 2), n) for n in range(96)]


def recorded():
    "Traces of real runs of our own trainer, each with the cause that was put into it."
    path = HERE / 'recorded.npz'
    if not path.exists(): return []
    data, out = np.load(path), {}
    for key in data.files:
        name, column = key.split('|')
        out.setdefault(name, {})[column] = data[key]
    traces = []
    for number, (name, columns) in enumerate(sorted(out.items())):
        kind, onset = str(columns.pop('kind')), int(columns.pop('onset'))
        nested = {}
        for key in [k for k in columns if '/' in k]: nested.setdefault(key.split('/')[0], {})[key.split('/', 1)[1]] = columns.pop(key)
        events = [] if kind == 'healthy' else [(kind, onset)]
        traces.append(Trace(name, kind, {**columns, **nested}, events, number))
    return traces


def all_traces(): return synthetic() + recorded()


def match(trace, events):
    """(truths found, truths missed, detections that are no truth): a detection is right when it has the kind and its onset is
    within 3 per cent of the run (15 for slow kinds), at least 30 rows. Isolated outliers beyond the planted ones count as
    false only in `outlier`'s own precision."""
    steps = np.asarray(trace.columns['step'])
    run, every = int(steps.max() - steps.min()), max(1, int(np.median(np.diff(np.unique(steps)))))
    found, missed, used = [], [], set()
    for kind, onset in trace.events:
        width = max(30 * every, run * (0.15 if kind in ('slow divergence', 'plateau') else 0.03))
        hit = next((i for i, e in enumerate(events) if e.kind == kind and i not in used and abs(e.onset - onset) <= width), None)
        if hit is None: missed.append((kind, onset))
        else: found.append((kind, onset)); used.add(hit)
    return found, missed, [e for i, e in enumerate(events) if i not in used and e.signal == 'loss' and e.kind not in ('step down', 'rate bump')]


def evaluate(traces, diagnose):
    "Per-kind precision and recall, and what went wrong, by `diagnose(columns) -> events`."
    table, wrong = {k: {'true': 0, 'found': 0, 'false': 0} for k in KINDS}, []
    clean = 0
    for trace in traces:
        events = diagnose(trace.columns)
        found, missed, false = match(trace, events)
        for kind, _ in trace.events: table[kind]['true'] += 1
        for kind, _ in found: table[kind]['found'] += 1
        for e in false: table[e.kind]['false'] += 1
        clean += trace.kind == 'healthy' and not any(e.kind != 'outlier' for e in false)
        if missed or false: wrong.append((trace.name, missed, [(e.kind, e.onset) for e in false]))
    for row in table.values():
        row['recall'] = row['found'] / row['true'] if row['true'] else None
        row['precision'] = row['found'] / (row['found'] + row['false']) if row['found'] + row['false'] else None
    n = sum(t.kind == 'healthy' for t in traces)
    return {'kinds': table, 'healthy': {'traces': n, 'without a false event': clean}}, wrong


# ---------------------------------------------------------------------------------------- real runs
def record(path=HERE / 'recorded.npz', steps=700):
    """Train small models on the text of the standard library, put a cause into each, and keep what the log would hold.

    The kind is what the curve then shows, judged by eye from medians of 20 rows: the cause does not decide it (a learning rate
    forty times too high for four steps was expected to recover, and did not within 300)."""
    import pydoc_data.topics
    import sysconfig

    import torch

    from shohin.guards import make_guards, vote
    from shohin.model import GPT, GPTConfig
    torch.set_num_threads(1)
    lib = Path(sysconfig.get_path('stdlib'))
    text = {'code': b''.join((lib / f'{m}.py').read_bytes() for m in ('argparse', 'ast', 'inspect', 'typing', 'tarfile', 'subprocess', 'doctest')),
            'prose': ''.join(pydoc_data.topics.topics.values()).encode(),
            'numbers': b''.join(b'%d * %d = %d\n' % (a, b, a * b) for a, b in np.random.default_rng(0).integers(2, 999, (30_000, 2)))}
    text = {d: torch.tensor(np.frombuffer(t, np.uint8).astype(np.int64)) for d, t in text.items()}
    T = 64
    out = dict(np.load(path)) if path.exists() else {}              # what is there is not trained again

    def batch(g, mix):
        names = [d for d, n in mix.items() for _ in range(n)]
        starts = [int(torch.randint(0, len(text[d]) * 9 // 10 - T - 1, (1,), generator=g)) for d in names]
        return torch.stack([text[d][s:s + T + 1] for d, s in zip(names, starts, strict=True)])

    @torch.no_grad()
    def probe(model):
        def rows(d):
            n = len(text[d]) * 9 // 10
            return torch.stack([text[d][s:s + T + 1] for s in range(n, n + 24 * T, T)])
        return {d: float(model.loss(rows(d)).ce.mean()) for d in text}

    def run(name, kind, onset, seed, lr=4e-3, mix=None, warm=40, guards=None, at=lambda t, model, x, opt: x, qk=True, n=steps):
        if f'{name}|kind' in out: return
        torch.manual_seed(seed)
        g = torch.Generator().manual_seed(seed)
        model = GPT(GPTConfig(vocab_size=257, n_layer=2, d_model=48, n_head=4, n_kv_head=2, head_dim=12, d_ff=128, seq_len=T, qk_norm=qk))
        opt = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
        guards = make_guards(guards) if guards else None
        blend = lambda t: {'code': 4, 'prose': 4, 'numbers': 4}
        rows = []
        for t in range(n):
            now = lr * min(1, (t + 1) / warm) * (0.1 + 0.45 * (1 + np.cos(np.pi * t / n)))
            for p in opt.param_groups: p['lr'] = now
            domains = (mix or blend)(t)
            x = at(t, model, batch(g, domains), opt)
            opt.zero_grad()
            loss = model.loss(x).ce.mean()
            loss.backward()
            grad = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            apply = vote(guards, loss.item(), grad).apply if guards else True
            before = [p.detach().clone() for p in model.parameters()]
            if apply: opt.step()
            update = float(torch.linalg.vector_norm(torch.stack([(p.detach() - b).norm() for p, b in zip(model.parameters(), before, strict=True)])))
            row = {'step': t, 'loss': loss.item(), 'grad_norm': grad, 'update_norm': update if apply else 0.0, 'lr': opt.param_groups[0]['lr'], 'skipped': float(not apply)}
            if mix: row |= {f'domains/{d}': float(domains.get(d, 0)) for d in text}
            if t % 35 == 34: row |= {f'probes/{d}': v for d, v in probe(model).items()}
            rows.append(row)
        columns = {k for r in rows for k in r} - ({'skipped'} if not guards else set())
        for c in columns: out[f'{name}|{c}'] = np.array([np.inf if c in r and not np.isfinite(r[c]) else r.get(c, np.nan) for r in rows], np.float32)
        out[f'{name}|kind'], out[f'{name}|onset'] = np.array(kind), np.array(onset)
        np.savez_compressed(path, **out)
        print(name, f'{rows[-1]["loss"]:.3f}', flush=True)

    def noise_batch(steps_):
        return lambda t, model, x, opt: torch.randint(0, 257, x.shape) if t in steps_ else x

    def rate(steps_, factor):
        def at(t, model, x, opt):
            if t in steps_:
                for p in opt.param_groups: p['lr'] *= factor
            return x
        return at

    def shake(when, size):
        def at(t, model, x, opt):
            if t == when:
                with torch.no_grad():
                    for p in model.parameters(): p.add_(size * p.std() * torch.randn_like(p)) if p.ndim > 1 else None
            return x
        return at

    def poison(when):
        def at(t, model, x, opt):
            if t == when:
                with torch.no_grad(): next(model.parameters())[0, 0] = float('nan')
            return x
        return at

    blocks = lambda *parts: lambda t: next(m for until, m in parts if t < until)
    code, prose, numbers = {'code': 12}, {'prose': 12}, {'numbers': 12}
    half = steps // 2
    for seed in (1, 2):
        run(f'real healthy {seed}', 'healthy', 0, seed, lr=(4e-3, 1e-3)[seed - 1])
        run(f'real healthy, no qk-norm {seed}', 'healthy', 0, seed + 10, qk=False, lr=2e-3)
        run(f'real noise batch {seed}', 'outlier', half + seed, seed + 20, at=noise_batch({half + seed}))
        run(f'real rate times 40 for four steps {seed}', 'bad spike', half, seed + 30, at=rate(range(half, half + 4), 40))
        run(f'real weights shaken {seed}', 'recovered spike', half + 20 * seed, seed + 40, at=shake(half + 20 * seed, 0.5))
        run(f'real domain boundary {seed}', 'data shift', half, seed + 50, mix=blocks((half, numbers), (steps, code if seed == 1 else prose)))
        run(f'real domain boundary under a guard {seed}', 'guard freeze', half, seed + 60, mix=blocks((half, numbers), (steps, prose if seed == 1 else code)), guards=['loss-ratio'])
        run(f'real learning rate zero {seed}', 'guard freeze', half, seed + 70, at=rate(range(half, steps), 0))
        run(f'real nan weights {seed}', 'nan', half + 50, seed + 80, at=poison(half + 50))
        run(f'real rate far too high {seed}', 'warm-up blow-up', 70, seed + 90, lr=(0.6, 1.5)[seed - 1], warm=200, qk=False)


if __name__ == '__main__': record()
