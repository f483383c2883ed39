"""scan: each fault is found where it is, and nothing else is; counts are those of plain loops over the tokens."""
import io
import json
import os
import subprocess
import sys
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from shard_files import FORMATS, token_sample, write
from test_shard_faults import mutate, mutations

import shohin.scan as S
from shohin.scan import Lengths, ScanResult, count_tokens, js_divergence, long_runs, periodic_runs, scan
from shohin.shards import Manifest, UserError, build_manifest, open_shard, write_shard

few = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
EOS, VOCAB = 4999, 5000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv('SHOHIN_CACHE', str(tmp_path / 'cache'))


def domain_text(domain, seed, n=60_000):
    "Zipf-like text of a domain (its own permutation of the vocabulary) in documents of about 200 tokens."
    rng = np.random.default_rng(seed)
    x = np.random.default_rng(len(domain)).permutation(EOS)[rng.zipf(1.3, n) % EOS]
    x[rng.random(n) < 0.005] = EOS
    return x.astype(np.uint16)


@pytest.fixture
def corpus(tmp_path):
    root = tmp_path / 'corpus'
    for domain in ('code', 'maths'):
        for i in range(4): write_shard(root / domain / f'{i}.u16.zst', domain_text(domain, i))
    return root


def found(result, level='problem'): return sorted((f.kind, Path(f.path).name) for f in result.findings if f.level == level)


# ---- runs -------------------------------------------------------------------------------------------------------

def brute_runs(mask, least):
    at, out = 0, []
    for value, group in groupby(mask):
        n = len(list(group))
        if value and n >= least: out.append([at, at + n])
        at += n
    return out


@few
@given(lengths=st.lists(st.integers(1, 60), max_size=30), first=st.booleans(), least=st.integers(15, 40))
def test_long_runs(lengths, first, least):
    mask = np.array([first ^ (i % 2 == 1) for i, n in enumerate(lengths) for _ in range(n)], bool)
    assert long_runs(mask, least).tolist() == brute_runs(mask.tolist(), least)


loops = st.lists(st.tuples(st.integers(1, 13), st.integers(28, 40), st.integers(0, 12), st.integers(0, 90)), max_size=6)


def with_loops(loops, seed, alphabet):
    "Random text between loops of (period, times, a few tokens more)."
    rng, parts = np.random.default_rng(seed), []
    for period, times, more, gap in loops:
        parts += [rng.integers(0, alphabet, gap), np.resize(rng.integers(0, alphabet, period), period * times + more % period)]
    return np.concatenate([*parts, rng.integers(0, alphabet, 5)]).astype(np.uint16)


@few
@given(loops=loops, seed=st.integers(0, 99), alphabet=st.sampled_from([2, 5, 1000]))
def test_periodic_runs_are_those_of_the_definition(loops, seed, alphabet):
    x = with_loops(loops, seed, alphabet)
    want = sorted((a, b + p, p) for p in range(1, 14) for a, b in brute_runs((x[p:] == x[:-p]).tolist(), 31 * p))
    assert [tuple(r) for r in periodic_runs(x).tolist()] == want


@few
@given(loops=loops, seed=st.integers(0, 99), zeros=st.lists(st.tuples(st.integers(0, 3000), st.integers(20, 700)), max_size=3), block=st.sampled_from([37, 416, 500, 1 << 18]))
def test_runs_do_not_depend_on_where_blocks_end(tmp_path, loops, seed, zeros, block):
    x = np.concatenate([with_loops(loops, seed, 900) + 1, np.random.default_rng(seed).integers(1, 900, 3000)]).astype(np.uint16)
    for a, n in zeros: x[a:a + n] = 0
    write_shard(tmp_path / 'x.bin', x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S, 'BLOCK', block)
        c = count_tokens(open_shard(tmp_path / 'x.bin'), 1000)
    runs = brute_runs((x == 0).tolist(), 32)
    assert (c.zeros.count, c.zeros.tokens) == (len(runs), sum(b - a for a, b in runs))
    assert c.zeros.longest[1] - c.zeros.longest[0] == max((b - a for a, b in runs), default=0)
    inside = np.zeros(len(x), bool)
    for a, b, _ in periodic_runs(x).tolist(): inside[a:b] = True
    assert c.repeats.tokens == inside.sum()
    assert np.array_equal(c.hist[:-1], np.bincount(x, minlength=1000)) and c.hist[-1] == 0


# ---- counts -----------------------------------------------------------------------------------------------------

@few
@given(tokens=st.lists(st.integers(0, 6), min_size=1, max_size=400), block=st.sampled_from([16, 100, 1 << 18]))
def test_document_lengths(tmp_path, tokens, block):
    write_shard(tmp_path / 'x.u16.zst', tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S, 'BLOCK', block)
        got = count_tokens(open_shard(tmp_path / 'x.u16.zst'), 7, 3).lengths
    ends = [i + 1 for i, t in enumerate(tokens) if t == 3]
    lengths = [b - a for a, b in pairwise([0, *ends, len(tokens)]) if b > a]
    assert (got.n, got.total, got.least, got.most) == (len(lengths), sum(lengths), min(lengths), max(lengths))


def test_document_lengths_from_an_index(tmp_path):
    path = write('megatron', tmp_path, token_sample(1000), lengths=[10, 290, 700])
    assert count_tokens(open_shard(path)).lengths.to_dict() | {'median': 0, 'p99': 0} == dict(documents=3, mean=333.3, least=10, median=0, p99=0, most=700)


@few
@given(lengths=st.lists(st.integers(1, 10**6), min_size=1, max_size=200), q=st.floats(0.01, 1))
def test_quantiles_are_within_three_per_cent(lengths, q):
    d = Lengths()
    d.add(np.array(lengths))
    exact = sorted(lengths)[max(0, int(np.ceil(q * len(lengths) - 1e-9)) - 1)]
    assert abs(d.quantile(q) - exact) <= 0.03 * exact + 0.5


@pytest.mark.parametrize('kind', FORMATS)
def test_the_same_tokens_measure_the_same_in_every_format(tmp_path, kind):
    tokens = (token_sample(40_000, wide=FORMATS[kind].wide) % 256).astype('uint32' if FORMATS[kind].wide else 'uint16')
    report, = scan(write(kind, tmp_path, tokens), vocab_size=256, eos=9, dtype=FORMATS[kind].dtype).shards
    p = np.bincount(tokens) / len(tokens)
    p = p[p > 0]
    assert (report.tokens, report.largest, report.distinct, report.eos) == (40_000, 255, len(p), (tokens == 9).sum())
    assert report.entropy == pytest.approx(-(p * np.log2(p)).sum(), abs=1e-3)
    assert report.format == FORMATS[kind].format


@few
@given(p=st.lists(st.integers(0, 50), min_size=4, max_size=4), q=st.lists(st.integers(0, 50), min_size=4, max_size=4))
def test_js_divergence(p, q):
    p, q = np.array(p) + np.eye(4, dtype=int)[0], np.array(q) + np.eye(4, dtype=int)[1]
    d = js_divergence(p, q)
    assert -1e-12 <= d <= 1 + 1e-12 and d == pytest.approx(js_divergence(q, p)) and js_divergence(p, 7 * p) == pytest.approx(0, abs=1e-12)
    a, b, m = p / p.sum(), q / q.sum(), (p / p.sum() + q / q.sum()) / 2
    kl = lambda x: sum(u * np.log2(u / v) for u, v in zip(x, m, strict=True) if u > 0)
    assert d == pytest.approx((kl(a) + kl(b)) / 2, abs=1e-9)


# ---- faults, one at a time --------------------------------------------------------------------------------------

def test_a_clean_corpus_has_no_findings(corpus):
    result = scan(corpus, vocab_size=VOCAB, eos=EOS)
    assert result.findings == () and result.exit_status == 0 and isinstance(result, ScanResult)
    assert result.between[('code', 'maths')] > 0.3 > 0.1 > max(s.divergence for s in result.shards)
    assert {d: x['shards'] for d, x in result.domains.items()} == {'code': 4, 'maths': 4}


def change(corpus, f, name='code/1.u16.zst'):
    x = open_shard(corpus / name).read(0, 60_000)
    f(x)
    write_shard(corpus / name, x)


@pytest.mark.parametrize('fault, kind', [
    (lambda x: x.__setitem__(slice(20_000, 24_096), 0), 'hole'),
    (lambda x: x.__setitem__(slice(20_000, 24_096), 77), 'repeats'),
    (lambda x: x.__setitem__(slice(20_000, 27_000), np.resize(np.arange(13), 7000)), 'repeats'),
    (lambda x: x.__setitem__(59_999, VOCAB), 'vocabulary'),
    (lambda x: x.__setitem__(slice(None), np.where(x == EOS, EOS, domain_text('maths', 99))), 'domain'),
    (lambda x: x.__setitem__(slice(None), domain_text('code', 2)), 'duplicate')])
def test_one_fault_gives_one_problem(corpus, fault, kind):
    change(corpus, fault)
    result = scan(corpus, vocab_size=VOCAB, eos=EOS)
    name = '2.u16.zst' if kind == 'duplicate' else '1.u16.zst'            # of two copies the later one is named
    assert found(result) == [(kind, name)] and result.exit_status == 1


def test_a_link_to_a_shard_is_a_copy_but_a_name_given_twice_is_not(corpus):
    (corpus / 'maths/copy.u16.zst').symlink_to('0.u16.zst')
    assert found(scan(corpus, vocab_size=VOCAB, eos=EOS)) == [('duplicate', 'copy.u16.zst')]
    one = corpus / 'maths/0.u16.zst'
    assert found(scan([one, corpus / 'maths/../maths/0.u16.zst'], vocab_size=VOCAB, eos=EOS)) == []


@pytest.mark.parametrize('fault, kind', [
    (lambda x: x.__setitem__(slice(20_000, 22_000), 77), 'repeats'), (lambda x: x.__setitem__(x == EOS, 5), 'eos'),
    (lambda x: x.__setitem__(slice(None), np.where(x == EOS, EOS, x.astype(int) * 7 % EOS)), 'domain')])
def test_what_is_odd_but_not_wrong_is_a_note(corpus, fault, kind):
    change(corpus, fault)
    result = scan(corpus, vocab_size=VOCAB, eos=EOS)
    assert found(result) == [] and (kind, '1.u16.zst') in found(result, 'note') and result.exit_status == 0


def test_positions_are_exact(corpus):
    x = domain_text('code', 5)
    x[31_000:36_000] = 0; x[50_123] = 5001
    write_shard(corpus / 'code/x.bin', x)
    result = scan(corpus, vocab_size=VOCAB, eos=EOS)
    at = {f.kind: (f.token, f.byte) for f in result.problems}
    assert at == {'hole': (31_000, 1024 + 62_000), 'vocabulary': (50_123, 1024 + 100_246)}


def test_no_eos_anywhere_in_a_domain(corpus):
    for domain in ('code', 'maths'):
        for i in range(4): change(corpus, lambda x: x.__setitem__(x == EOS, 5), f'{domain}/{i}.u16.zst')
    assert [k for k, _ in found(scan(corpus, vocab_size=VOCAB, eos=EOS))] == ['eos', 'eos']


def test_random_and_constant_data(tmp_path):
    write_shard(tmp_path / 'r/random.u16.zst', np.random.default_rng(0).integers(0, 257, 50_000))
    write_shard(tmp_path / 'c/constant.u16.zst', np.r_[np.tile([1, 1, 1, 2], 10_000)])
    assert {k for k, _ in found(scan(tmp_path / 'r', vocab_size=257))} == {'entropy'}
    assert {k for k, _ in found(scan(tmp_path / 'c', vocab_size=257))} == {'entropy', 'repeats'}


def test_huge_token_numbers_cost_no_memory(tmp_path):
    x = token_sample(50_000, wide=True); x[777] = 2**32 - 1
    write_shard(tmp_path / 'x.u32.zst', x)
    for vocab in (100_000, None):
        result = scan(tmp_path / 'x.u32.zst', vocab_size=vocab)
        assert result.shards[0].largest == 2**32 - 1
        assert [f.token for f in result.problems if f.kind == 'vocabulary'] == ([777] if vocab else [])


def test_one_unreadable_shard_does_not_stop_the_scan(corpus):
    raw = bytearray((corpus / 'code/1.u16.zst').read_bytes()); raw[len(raw) // 2] ^= 1
    (corpus / 'code/1.u16.zst').write_bytes(raw)
    (corpus / 'maths/3.bin').write_bytes(b'')
    os.mkfifo(corpus / 'maths/4.bin')                                     # not a regular file: passed over in a folder
    result = scan(corpus, vocab_size=VOCAB, eos=EOS)
    assert found(result) == [('unreadable', '1.u16.zst'), ('unreadable', '3.bin')] and len(result.shards) == 7
    assert found(scan([corpus / 'maths/4.bin', corpus / 'maths/0.u16.zst'])) == [('unreadable', '4.bin')]


def test_what_cannot_be_seen_is_said(tmp_path):
    path = write('llmc', tmp_path, token_sample(40_000))
    assert ('blind', path.name) in found(scan(path), 'note')
    build_manifest(tmp_path, 'bytes', 50_000, None).save()
    assert found(scan(tmp_path), 'note') == []
    raw = write('raw16', tmp_path, token_sample(40_000))
    assert ('guess', raw.name) in found(scan(raw), 'note')


# ---- manifests --------------------------------------------------------------------------------------------------

@pytest.fixture
def listed(corpus):
    manifest = build_manifest(corpus, 'bytes', VOCAB, EOS)
    manifest.save()
    return manifest


def test_a_manifest_brings_vocabulary_and_eos(listed):
    result = scan(listed.root)
    assert result.findings == () and all(s.eos > 100 for s in result.shards) and not any(s.verified for s in result.shards)
    assert all(s.verified for s in scan(Manifest.load(listed.root), verify=True).shards)
    assert scan(listed.root / 'manifest.json').to_dict() == result.to_dict()


def test_differences_from_the_manifest(listed):
    root = listed.root
    before = {p: p.stat() for p in root.rglob('*.zst')}
    change(root, lambda x: x.__setitem__(5, 1), 'code/0.u16.zst')          # in a sampled block
    change(root, lambda x: x.__setitem__(15_000, x[15_000] ^ 1), 'code/1.u16.zst')   # between them
    write_shard(root / 'maths/0.u16.zst', domain_text('maths', 0, 59_999))
    (root / 'maths/1.u16.zst').unlink()
    (root / 'maths/2.u16.zst').write_bytes((root / 'maths/2.u16.zst').read_bytes() + b'\0')
    write_shard(root / 'maths/extra.u16.zst', domain_text('maths', 77))
    result = scan(root)
    assert found(result) == [('manifest', '0.u16.zst'), ('manifest', '0.u16.zst'), ('manifest', '1.u16.zst'), ('unreadable', '1.u16.zst'), ('unreadable', '2.u16.zst')]
    assert found(result, 'note') == [('unlisted', 'extra.u16.zst')]
    path = root / 'code/1.u16.zst'                                        # the time put back: the sampled blocks agree, the hash does not
    os.utime(path, ns=(0, before[path].st_mtime_ns))
    if path.stat().st_size == before[path].st_size:
        assert ('manifest', '1.u16.zst') in found(scan(root, verify=True))


def test_a_sampled_block_betrays_a_change_whose_time_was_put_back(tmp_path):
    path = write('llmc', tmp_path, token_sample(40_000))
    build_manifest(tmp_path, 'bytes', 50_000, None).save()
    at, raw = path.stat(), bytearray(path.read_bytes())
    raw[1024 + 40_000] ^= 1                                               # the middle token
    path.write_bytes(raw); os.utime(path, ns=(0, at.st_mtime_ns))
    assert [f.message[:15] for f in scan(tmp_path).problems] == ['a sampled block']


def test_a_time_that_moved_is_hashed(listed):
    os.utime(listed.root / 'code/2.u16.zst')
    assert [Path(s.path).name for s in scan(listed.root).shards if s.verified] == ['2.u16.zst']


@settings(few, max_examples=40)
@given(kind=st.sampled_from(sorted(FORMATS)), m=mutations, manifest=st.booleans())
def test_damaged_files_are_findings_never_exceptions(tmp_path, kind, m, manifest):
    for p in tmp_path.glob('*'):
        if p.is_file(): p.unlink()
    path = write(kind, tmp_path, token_sample(3000, FORMATS[kind].wide))
    if manifest: build_manifest(tmp_path, 'bytes', 1 << 20, 0, dtype=FORMATS[kind].dtype).save()
    dtype = FORMATS[kind].dtype
    def tokens(): return np.concatenate(list(open_shard(path, dtype=dtype).blocks()))
    raw, before = path.read_bytes(), tokens()
    path.write_bytes(mutate(raw, m))
    result = scan(tmp_path if manifest else path, vocab_size=1 << 20, eos=0, dtype=dtype, verify=True)
    json.dumps(result.to_dict(), allow_nan=False)
    if manifest and not result.problems: assert np.array_equal(tokens(), before)


# ---- what the user sees -----------------------------------------------------------------------------------------

def test_paths(corpus, tmp_path):
    write('megatron', tmp_path / 'corpus' / 'code', token_sample(5000))
    files = sorted((corpus / 'code').iterdir())                           # what a shell makes of code/*: the index too
    assert scan(files).files == 5 and scan([*files, corpus / 'code']).files == 5
    with pytest.raises(UserError, match='No such file or folder'): scan(tmp_path / 'nothing')
    (tmp_path / 'empty').mkdir()
    with pytest.raises(UserError, match='no shards in this folder'): scan(tmp_path / 'empty')
    with pytest.raises(UserError, match='no shards to scan'): scan([])
    for wrong in (dict(format='mds'), dict(dtype='float32'), dict(vocab_size=0), dict(eos=-1), dict(vocab_size=10, eos=10)):
        with pytest.raises(UserError): scan(corpus, **wrong)
    (tmp_path / 'empty/manifest.json').write_text('{')
    with pytest.raises(UserError, match='not a manifest'): scan(tmp_path / 'empty')


def test_json_and_table(corpus):
    change(corpus, lambda x: x.__setitem__(slice(20_000, 26_000), 0))
    evil = corpus / 'code' / 'a\x1b[31m\n[bold]x.bin'
    write_shard(evil, domain_text('code', 9))
    result = scan(corpus, vocab_size=VOCAB, eos=EOS)
    doc = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert doc['exit_status'] == 1 and doc['tokens'] == 9 * 60_000 and len(doc['shards']) == 9 and doc['between'][0][:2] == ['code', 'maths']
    out = io.StringIO()
    Console(file=out, width=150).print(result.render())
    text = out.getvalue()
    assert '\x1b' not in text and r'a\x1b[31m\n[bold]x.bin' in text
    assert 'problem: code/1.u16.zst: byte 0: 6,000 zeros in a row from token 20,000 on' in text and '9 shards, 540,000 tokens: 1 problem' in text
    Console(file=out, width=40).print(result.render(rows=2))
    assert '... and 7 more' in out.getvalue()


def test_progress_counts_bytes_to_the_end(corpus):
    (corpus / 'code/0.u16.zst').write_bytes(b'broken')
    told = []
    scan(corpus, progress=lambda done, total, path: told.append((done, total, path)))
    total = sum(p.stat().st_size for p in corpus.rglob('*.zst'))
    assert [d for d, _, _ in told] == sorted(d for d, _, _ in told) and told[-1][0] == total and {t for _, t, _ in told} == {total}
    assert len({p for _, _, p in told}) == 8


def test_bounded_memory_and_no_torch(tmp_path):
    "160 MB of tokens in 60 MB more than the interpreter with its imports has."
    with open(tmp_path / 'x.bin', 'wb') as f:
        f.write(np.array([20240520, 1, 80_000_000] + [0] * 253, '<i4').tobytes())
        piece = token_sample(1_000_000).tobytes()
        for _ in range(80): f.write(piece)
    code = '''if True:
        import resource, sys
        from shohin.scan import scan
        assert not {'torch', 'pandas', 'matplotlib', 'rich'} & set(sys.modules)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(scan(sys.argv[1]).shards[0].tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)'''
    out = subprocess.run([sys.executable, '-c', code, tmp_path / 'x.bin'], capture_output=True, text=True, check=True)
    tokens, grown_kb = map(int, out.stdout.split())
    assert tokens == 80_000_000 and grown_kb < 60_000
