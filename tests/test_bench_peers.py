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
    for name in ('corpus', 'measure', 'peer_shohin', 'run', 'page'): sys.modules.pop(name, None)
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
    assert audit['verdict'] == 'dangerous' and "'web', 'papers' are never read" in audit['findings']


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
    (_, text, met), (_, alone, only) = run.page.goals(peers)
    assert text == '2.00 times grain' and met and alone.startswith('all four: grain, shohin (zstd)') and not only


def test_the_mix_of_many_domains(bench):
    _, measure, ours, _ = bench
    assert measure.mixing(ours, None, None, 0)['prefix_rows'] < 1.5
    def drawn(weights, places):
        w = np.array(list(weights.values())) / sum(weights.values())
        domain = np.random.default_rng(0).choice(len(w), places.max() + 1, p=w)
        before = np.zeros(len(domain), int)
        for d in range(len(w)): before[domain == d] = np.arange((domain == d).sum())
        return domain[places], before[places]
    assert measure.mixing(type('peer', (), {'mix': staticmethod(drawn)}), None, None, 0)['prefix_rows'] > 100
    with pytest.raises(NotImplementedError): measure.mixing(type('peer', (), {}), None, None, 0)


def test_the_page_is_what_make_pages_reads(bench, tmp_path):
    from shohin.report import build_site
    run = bench[3]
    speed, point = {'tokens_per_s': 2e8, 'first_batch_s': .01, 'pss_mb': 200.}, {'points': [{'resume_s': .001}] * 3, 'exact': True}
    one = {'prepare': {'prepare_s': 1., 'bytes': 10**6}, 'speed_0': speed, 'speed_2': {'error': 'x'}, 'resume_0': point, 'resume_2': {'unsupported': 'x'}, 'elastic': {'elastic': True},
           'mixing': {'prefix_rows': .9}, 'order_0': {'verdict': 'safe', 'prefix_rows': .6, 'run': {'rows': 1}, 'findings': []}}
    result = {'corpus': dict(batch=64, length=1025, steps=280), 'machine': {'cores': 2, 'processor': 'x86_64'}, 'commit': 'a' * 40, 'dirty': True, 'versions': {'numpy': '2'}, 'wall_s': 9,
              'requirements': {'grain': ['grain==0.2.18']}, 'peers': {'shohin': one, 'shohin_bin': one, 'grain': one | {'mixing': {'prefix_rows': 99.9}, 'speed_0': speed | {'tokens_per_s': 3e8}}, 'megatron': one,
              'litdata': {'skipped': 'pip cannot install it'}, 'mosaicml_stratified': one | {'elastic': {'unsupported': 'x'}, 'mixing': {'unsupported': 'x'}}}}
    run.page.write(result, tmp_path / 'benchmarks/peers.json')
    doc = json.loads((tmp_path / 'benchmarks/peers.json').read_text())
    assert doc['answers'][0] == 'Not met: at least 0.7 times the tokens a second of the fastest peer. Measured: 0.67 times grain.' and doc['dirty']
    assert doc['answers'][2].startswith('Met: the only one') and 'grain lacks only a bounded mix of 100 domains; megatron-core lacks only a step in constant time without an index' in doc['answers'][2]
    assert 'litdata was skipped: pip cannot install it' in doc['notes'] and 'shohin (zstd), speed with 2 workers: x' in doc['notes']
    build_site([], tmp_path, tmp_path)
    text = (tmp_path / 'bench-peers.html').read_text()
    assert 'mosaicml-streaming (stratified)' in text and 'lacks only a bounded mix' in text


def test_what_cannot_be_installed_is_said(bench, tmp_path):
    with pytest.raises(RuntimeError, match='pip cannot install shohin-no-such'):
        bench[3].environment(tmp_path, ['shohin-no-such==0.0.1', '--no-index'])
