"The benchmark beside other loaders: its measurements find what they are there to find."
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parents[1] / 'benchmarks' / 'peers'


@pytest.fixture(scope='module')
def bench():
    sys.path.insert(0, str(HERE))
    import corpus
    import measure
    import peer_shohin
    import run
    yield corpus, measure, peer_shohin, run
    sys.path.remove(str(HERE))


@pytest.fixture(scope='module')
def small(bench, tmp_path_factory):
    root = tmp_path_factory.mktemp('bench')
    c = bench[0].make(root / 'corpus', 400_000, 8, 65, 50)
    bench[1].prepare(bench[2], c, root / 'ours', 0)
    return c, root / 'ours'


def test_ours_is_exact_elastic_and_safe(bench, small):
    _, measure, ours, run = bench
    speed = measure.speed(ours, *small, 0)
    assert speed['steps'] == 50 and speed['tokens_per_s'] > 0 and speed['pss_mb'] > 1
    audit = run.order_of(speed['labels'], 'shohin')
    assert audit['verdict'] == 'safe' and audit['prefix_rows'] < 1.5
    assert measure.resume(ours, *small, 0)['exact'] and measure.elastic(ours, *small, 0)['elastic']


class Forgetful:
    "A stream with the defects to be found: one domain at a time, and a state that loses its place."
    block = 12
    def __init__(self, corpus, folder, workers=0, rank=0, world=1): self.corpus, self.at = corpus, 0

    def __iter__(self):
        while True:
            rows = self.corpus.rows(['code', 'math', 'web', 'papers'][self.at // self.block % 4])
            yield np.array(rows[self.at * 8 % 500:][:8], np.int64)
            self.at += 1

    def state(self): return self.at // 10
    def load(self, state): self.at = state


def test_a_bad_loader_is_found_out(bench, small):
    _, measure, _, run = bench
    peer = type('peer', (), {'Stream': Forgetful})
    audit = run.order_of(measure.speed(peer, *small, 0)['labels'], 'forgetful')
    assert audit['verdict'] == 'dangerous' and audit['prefix_rows'] > 50 and audit['findings']
    found = measure.resume(peer, *small, 0)
    assert not found['exact'] and found['points'][-1]['same'] == 0
    assert not measure.elastic(peer, *small, 0)['elastic']
    peer.Stream = type('Narrow', (Forgetful,), {'block': 25})
    audit = run.order_of(measure.speed(peer, *small, 0)['labels'], 'narrow')
    assert audit['verdict'] == 'dangerous' and 'web is never read' in audit['findings']


def test_the_corpus_is_the_same_for_all(bench, small):
    "Every row of every step comes from the corpus, in its domain, whole."
    corpus, _, ours, _ = bench
    c, folder = small
    known = {d: {r.tobytes() for r in np.asarray(c.rows(d))} for d in corpus.DOMAINS}
    for rows in itertools.islice(ours.Stream(c, folder), 20):
        for row in rows.astype(np.uint16): assert row.tobytes() in known[list(corpus.DOMAINS)[row[0] // corpus.STRIDE]]


def test_results_in_words(bench):
    *_, run = bench
    speed = {'tokens_per_s': 2e8, 'first_batch_s': .01, 'pss_mb': 200.}
    point = {'points': [{'resume_s': .001}] * 3, 'exact': True}
    ours = {'prepare': {'prepare_s': 1., 'bytes': 10**6}, 'speed_0': speed, 'speed_2': {'error': 'x'}, 'resume_0': point,
            'resume_2': {'unsupported': 'x'}, 'elastic': {'elastic': True}, 'order_0': {'verdict': 'safe', 'prefix_rows': .6}}
    peers = {'shohin': ours, 'grain': ours | {'speed_0': speed | {'tokens_per_s': 1e8}}, 'litdata': {'skipped': 'pip cannot install it'}}
    rows = run.table(json.loads(json.dumps(peers)))
    assert rows[1][:6] == ['shohin', '200.0', 'failed', '10 ms', '1, 1, 1 ms', 'yes'] and rows[1][6] == 'n/a'
    assert rows[3] == ['litdata', 'skipped: pip cannot install it']
    assert run.targets(peers) == ['2.00 x the fastest peer (grain); the goal is 0.7']


def test_what_cannot_be_installed_is_said(bench, tmp_path):
    with pytest.raises(RuntimeError, match='pip cannot install shohin-no-such'):
        bench[3].environment(tmp_path, ['shohin-no-such==0.0.1', '--no-index'])
