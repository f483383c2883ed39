"sources: a stream gives the corpus that its text says, whatever kills it, and bad input ends in one line."
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zstandard

from shohin import sources as S
from shohin.corpus import EOS_TEXT, MAX_OVERLAP, decode, ngrams
from shohin.shards import Manifest, UserError, open_shard
from shohin.sources import Files, Hub, parse_sources, pieces, read_file, stream_corpus


def one_line(error) -> str:
    text = str(error.value)
    assert text and '\n' not in text and 'Traceback' not in text
    return text

def text_of(kind, i):
    if kind == 'sums': return f'{i} times {i} is {i * i}, and with {i % 13} more it is {i * i + i % 13}; ' * (1 + i % 9)
    return f'def f_{i}(x):\n    # number {i * 7919 % 1009}\n    return x ** {i % 5} + {i}\n' * (1 + i % 7)

@pytest.fixture(scope='module')
def files(tmp_path_factory):
    "Two domains in four files of four kinds."
    d = tmp_path_factory.mktemp('text')
    rows = {k: [json.dumps({'text': text_of(k, i), 'id': i // 2}) for i in range(1500)] for k in ('sums', 'code')}
    (d / 'a.jsonl').write_text('\n'.join(rows['sums'][:700]))
    (d / 'b.jsonl.gz').write_bytes(gzip.compress('\n'.join(rows['sums'][700:]).encode()))
    (d / 'c.jsonl.zst').write_bytes(zstandard.compress('\n'.join(rows['code'][:800]).encode()) + zstandard.compress(('\n' + '\n'.join(rows['code'][800:])).encode()))
    return d

SMALL = dict(vocab_size=400, shard_tokens=20_000, probe_bytes=3_000)

def two(d): return parse_sources([f'sums={d}/a.jsonl', f'sums={d}/b.jsonl.gz', f'code={d}/c.jsonl.zst'])

@pytest.fixture(scope='module')
def corpus(files, tmp_path_factory): return stream_corpus(tmp_path_factory.mktemp('one') / 'corpus', two(files), workers=1, **SMALL)

def all_tokens(manifest, domain): return np.concatenate([manifest.read(i, 0, s.tokens) for i, s in enumerate(manifest.shards) if s.domain == domain])

def contents(folder):
    "Every file's bytes but the manifest's, and the manifest without the times of files."
    doc = json.loads((folder / 'manifest.json').read_text())
    for s in doc['shards']: del s['mtime_ns']
    return doc, {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file() and p.name != 'manifest.json'}


# ---- what comes out

def test_every_document_once_and_the_probes_not(corpus, files):
    m = corpus
    assert m.domains == ('sums', 'code') and Manifest.load(m.root, verify='full').hash == m.hash
    for kind in m.domains:
        got = decode(m, all_tokens(m, kind)).split(EOS_TEXT)
        every = {text_of(kind, i) for i in range(1500)}
        f, p = m.meta['domains'][kind], m.meta['probes'][kind]
        assert f['docs'] + f['held_out'] == 1500 and f['empty'] == f['bad'] == 0
        whole = got[:-1]
        assert set(whole) <= every and len(set(whole)) == len(whole) >= f['docs'] - 200
        assert f['tokens'] - sum(s.tokens for s in m.shards if s.domain == kind) < 65_536
        tokens = open_shard(m.root / p['path']).read(0, p['tokens'])
        probe = decode(m, tokens[:-1]).split(EOS_TEXT)
        assert len(probe) == p['docs'] and not set(probe) & set(whole) and all(any(x in d for d in every) for x in probe)
    assert [s.tokens for s in m.shards if s.domain == 'sums'][:-1] == [20_000] * (sum(s.domain == 'sums' for s in m.shards) - 1)
    files_ = {p.relative_to(m.root).as_posix() for p in m.root.rglob('*') if p.is_file()}
    assert files_ == {'manifest.json', 'tokenizer.json'} | {s.path for s in m.shards} | {p['path'] for p in m.meta['probes'].values()}

def test_the_overlap_is_the_one_that_can_be_counted(corpus):
    m = corpus
    trained = set()
    for d in m.domains:
        for text in decode(m, all_tokens(m, d)).split(EOS_TEXT):
            raw = np.frombuffer(text.encode(), np.uint8)
            trained |= set(ngrams(raw, np.array([len(raw)]))[0].tolist())
    for d in m.domains:
        p = m.meta['probes'][d]
        grams = np.concatenate([ngrams(np.frombuffer(t.encode(), np.uint8), np.array([len(t.encode())]))[0]
                                for t in decode(m, open_shard(m.root / p['path']).read(0, p['tokens'])[:-1]).split(EOS_TEXT)])
        assert np.mean([g in trained for g in grams.tolist()]) == pytest.approx(p['ngram_overlap'])

def test_a_copied_document_is_held_out_everywhere_and_passages_are_counted(tmp_path):
    rng = np.random.default_rng(0)
    fresh = lambda: ' '.join(f'w{x}' for x in rng.integers(0, 10**6, 60))
    docs = [fresh() for _ in range(400)]
    (tmp_path / 'a.jsonl').write_text('\n'.join(json.dumps({'text': t}) for t in docs))
    (tmp_path / 'b.jsonl').write_text('\n'.join(json.dumps({'text': t}) for t in [*docs[:200], *(fresh() for _ in range(200)), *(f'{docs[i]} and {fresh()}' for i in range(200, 400))]))
    m = stream_corpus(tmp_path / 'out', parse_sources([f'a={tmp_path}/a.jsonl', f'b={tmp_path}/b.jsonl']), tokenizer='bytes', shard_tokens=50_000, probe_bytes=400, workers=1)
    read = {d: set(decode(m, all_tokens(m, d)).split(EOS_TEXT)) for d in m.domains}
    a = m.meta['probes']['a']
    probe = decode(m, open_shard(m.root / a['path']).read(0, a['tokens'])[:-1]).split(EOS_TEXT)
    assert probe and not set(probe) & (read['a'] | read['b'])              # copies of it are gone from b too
    assert a['ngram_overlap'] < MAX_OVERLAP and set(probe) <= set(docs[:200])      # those quoted in b were not taken

@pytest.mark.parametrize('how', ['two workers', 'hub', 'parquet'])
def test_other_ways_to_the_same_documents(how, files, corpus, tmp_path):
    "The number of workers changes nothing; the same rows through `datasets` or Parquet are the same text."
    if how == 'two workers':
        m = stream_corpus(tmp_path / 'out', two(files), workers=2, **SMALL)
        assert contents(m.root) == contents(corpus.root)
        return
    rows = [json.dumps({'text': text_of('sums', i), 'id': i // 2}) for i in range(1500)]
    (tmp_path / 'x.jsonl').write_text('\n'.join(rows))
    a = stream_corpus(tmp_path / 'a', parse_sources([f'sums={tmp_path}/x.jsonl']), workers=1, **SMALL)
    if how == 'hub':
        pytest.importorskip('datasets')
        source = Hub('json', data_files=[str(tmp_path / 'x.jsonl')])
    else:
        pa = pytest.importorskip('pyarrow')
        import pyarrow.parquet as pq
        pq.write_table(pa.Table.from_pylist([json.loads(r) for r in rows]), tmp_path / 'x.parquet', row_group_size=200)
        source = Files((tmp_path / 'x.parquet',))
    b = stream_corpus(tmp_path / 'b', {'sums': source}, workers=1, **SMALL)
    assert b.hash == a.hash and str(tmp_path) not in json.dumps(b.meta)

@pytest.mark.parametrize('kind', ['jsonl', 'jsonl.gz', 'jsonl.zst', 'txt', 'parquet', 'hub'])
def test_from_any_place_on_it_reads_what_is_left(kind, tmp_path):
    rows = [json.dumps({'text': f'é {i} ' * 50}) for i in range(400)]
    raw = ('\ufeff' + '\n'.join(rows)).encode()
    path = tmp_path / f'x.{kind}'
    if kind == 'parquet':
        pa = pytest.importorskip('pyarrow')
        import pyarrow.parquet as pq
        pq.write_table(pa.Table.from_pylist([json.loads(r) for r in rows]), path, row_group_size=70)
    elif kind == 'hub': (path := tmp_path / 'x.jsonl').write_text('\n'.join(rows)); pytest.importorskip('datasets')
    else: path.write_bytes(gzip.compress(raw) if kind.endswith('gz') else zstandard.compress(raw) if kind.endswith('zst') else raw)
    source = Hub('json', data_files=str(path)) if kind == 'hub' else Files((path, path))
    reader = source.open()
    places, texts = [json.dumps(reader.place)], []
    for r in reader:
        assert not r.problem
        texts.append(r.text)
        places.append(json.dumps(reader.place))
    if kind != 'txt': assert texts == [json.loads(r)['text'].encode() for r in rows] * (1 if kind == 'hub' else 2)
    else: assert b''.join(texts) == raw[3:] * 2 and len(texts) > 2
    for i in {0, 1, len(texts) // 3, len(texts) - 1, len(texts)}:
        assert [r.text for r in source.open(json.loads(places[i]))] == texts[i:]

def test_doc_seed_changes_the_order_and_nothing_else(files, corpus, tmp_path):
    m = stream_corpus(tmp_path / 'out', two(files), workers=1, doc_seed=1, **SMALL)
    assert m.hash != corpus.hash and m.meta['probes'] == corpus.meta['probes'] and m.meta['domains'] == corpus.meta['domains']
    assert (m.root / 'tokenizer.json').read_bytes() == (corpus.root / 'tokenizer.json').read_bytes()

def test_max_shards(files, corpus, tmp_path):
    m = stream_corpus(tmp_path / 'out', two(files), workers=1, max_shards=2, **SMALL)
    assert [s.path for s in m.shards] == ['sums/shard_00000.u16.zst', 'sums/shard_00001.u16.zst', 'code/shard_00000.u16.zst', 'code/shard_00001.u16.zst']
    assert {s.sha256 for s in m.shards} <= {s.sha256 for s in corpus.shards}
    for d, f in m.meta['domains'].items():
        ends = int((all_tokens(m, d) == m.eos).sum())
        assert f['docs'] == ends and 0 <= 40_000 - f['tokens'] < 1000

def test_large_documents_go_in_pieces():
    for text in (b'x' * 3_000_000, 'é'.encode() * 1_500_000, b'line\n' * 600_000, b''):
        parts = list(pieces(text))
        assert b''.join(p for p, _ in parts) == text and [last for _, last in parts] == [False] * (len(parts) - 1) + [True]
        for p, _ in parts: assert len(p) <= S.BATCH and p.decode() is not None


# ---- killed

BUILD = ('import sys, time\nfrom pathlib import Path\nfrom shohin.sources import *\n'
         'if __name__ == "__main__":\n    m = stream_corpus({out!r}, parse_sources({specs!r}), workers={workers}, vocab_size=400, shard_tokens=20_000, probe_bytes=3_000)\n    print(m.hash)\n')

def start(tmp_path, files, out, workers):
    specs = [f'sums={files}/a.jsonl', f'sums={files}/b.jsonl.gz', f'code={files}/c.jsonl.zst']
    (tmp_path / 'build.py').write_text(BUILD.format(out=str(out), specs=specs, workers=workers))
    return subprocess.Popen([sys.executable, str(tmp_path / 'build.py')], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

@pytest.mark.parametrize('workers', [1, 2])
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(workers, files, corpus, tmp_path):
    out, partial = tmp_path / 'corpus', tmp_path / '.corpus.partial'
    count = lambda: len(list(partial.glob('*/shard_*')))
    for stop in (0, 1, 2, 5, 9) if workers == 1 else (3,):
        p = start(tmp_path, files, out, workers)
        deadline = time.time() + 60
        while count() <= stop and not out.exists() and time.time() < deadline and p.poll() is None: time.sleep(.001)
        os.kill(p.pid, signal.SIGKILL)
        p.communicate()
    assert not out.exists() and partial.is_dir()
    p = start(tmp_path, files, out, workers)
    said, err = p.communicate(timeout=120)
    assert said.strip() == corpus.hash, err
    assert contents(out) == contents(corpus.root)
    assert sorted(x.name for x in tmp_path.iterdir()) == ['build.py', 'corpus']

CREW = ("""import time, numpy as np
from shohin.sources import *
if __name__ == "__main__":
    crew = Workers(None, np.zeros(0, np.uint64), 2)
    list(crew.in_order((i, next(batches([Record(b"text")]))) for i in range(9)))
    print(*crew.pool._processes, flush=True)
    time.sleep(100)
""")

def test_workers_end_with_their_parent(tmp_path):
    (tmp_path / 'crew.py').write_text(CREW)
    p = subprocess.Popen([sys.executable, str(tmp_path / 'crew.py')], stdout=subprocess.PIPE, text=True)
    pids = [int(x) for x in p.stdout.readline().split()]
    os.kill(p.pid, signal.SIGKILL)
    p.wait()
    def alive(pid):
        try: os.kill(pid, 0)
        except ProcessLookupError: return False
        return not (Path(f'/proc/{pid}/stat').exists() and Path(f'/proc/{pid}/stat').read_text().split()[2] == 'Z')
    deadline = time.time() + 60
    while any(map(alive, pids)) and time.time() < deadline: time.sleep(.05)
    assert pids and not any(map(alive, pids))

@pytest.mark.parametrize('when', ['sample', 'state', 'manifest', 'rename'])
def test_every_crash_between_two_writes(when, files, corpus, tmp_path, monkeypatch):
    "The gaps: no vocabulary yet, shard written but not its state, all shards but no manifest, manifest but not the last rename."
    out = tmp_path / 'corpus'
    with monkeypatch.context() as m:
        calls = []
        def crash(*a, real=S._write_state):
            calls.append(a)
            if a[0].name == 'domain-code.json' and len(calls) > 8: raise KeyboardInterrupt
            real(*a)
        if when == 'state': m.setattr(S, '_write_state', crash)
        elif when == 'sample': m.setattr(S, 'train_bpe', lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        elif when == 'manifest': m.setattr(S, '_finish', lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        else: m.setattr(S.os, 'rename', lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt): stream_corpus(out, two(files), workers=1, **SMALL)
    assert not out.exists()
    assert contents(stream_corpus(out, two(files), workers=1, **SMALL).root) == contents(corpus.root)
    assert [p.name for p in tmp_path.iterdir()] == ['corpus']

def test_other_settings_do_not_go_on_from_finished_shards(files, tmp_path, monkeypatch):
    out = tmp_path / 'corpus'
    with monkeypatch.context() as m:
        m.setattr(S, '_finish', lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt): stream_corpus(out, two(files), workers=1, **SMALL)
    with pytest.raises(UserError) as e: stream_corpus(out, two(files), workers=1, **{**SMALL, 'vocab_size': 500})
    assert 'other settings' in one_line(e) and len(list((tmp_path / '.corpus.partial').glob('*/shard_*'))) > 5
    assert stream_corpus(out, two(files), workers=1, **SMALL).root == out
    with pytest.raises(UserError) as e: stream_corpus(out, two(files), workers=1, **{**SMALL, 'doc_seed': 4})
    assert 'corpus' in one_line(e)

def test_two_at_once_are_refused(files, tmp_path):
    partial = tmp_path / '.corpus.partial'
    partial.mkdir()
    import fcntl
    with open(partial / 'lock', 'w') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(UserError) as e: stream_corpus(tmp_path / 'corpus', two(files), workers=1, **SMALL)
    assert 'another process' in one_line(e)


# ---- input that cannot be used

GOOD = b''.join(json.dumps({'text': f'document {i} with the square {i * i} and some more words to make thirteen of them'}).encode() + b'\n' for i in range(40))
BAD = {'broken.jsonl': (GOOD + b'{"text": \n', 'line 41'), 'field.jsonl': (GOOD + b'{"body": "b"}\n', 'line 41'), 'list.jsonl': (b'["a"]\n' + GOOD, 'line 1'),
       'number.jsonl': (b'{"text": 3}\n', 'line 1'), 'null.jsonl': (GOOD + b'{"text": null}', 'line 41'), 'latin.jsonl': (GOOD + '{"text": "é"}'.encode('latin-1'), 'line 41'),
       'deep.jsonl': (b'[' * 100_000, 'line 1'), 'half.jsonl': (GOOD + b'{"text": "\\ud800"}', 'line 41'), 'digits.jsonl': (GOOD + b'{"text": ' + b'9' * 5000 + b'}', 'line 41'),
       'long.jsonl': (GOOD + b'{"text": "' + b'x' * 2_000_000 + b'"}\n' + GOOD, 'line 41'), 'long.txt.gz': (gzip.compress(b'\xff' + b'x' * 200_000), 'line 1'),
       'latin.txt': ('one\ntwo\ncafé\n'.encode('latin-1'), 'line 3'), 'cut.jsonl.gz': (gzip.compress(GOOD)[:-20], 'line'), 'cut.jsonl.zst': (zstandard.compress(GOOD) + zstandard.compress(GOOD)[:-6], 'line'),
       'not.jsonl.gz': (b'plain', 'line 1'), 'not.jsonl.zst': (b'plain', 'line 1'), 'flip.jsonl.gz': (gzip.compress(os.urandom(99))[:30] + b'\xff' * 50, 'line 1'),
       'not.parquet': (b'PAR1 it is not', 'row 1'), 'empty.jsonl': (b'', 'no documents'), 'blank.txt': (b' \n ', 'no documents'), 'blank.jsonl': (b'{"text": " "}\n' * 9, 'no documents'),
       'one.jsonl': (b'{"text": "short"}\n', 'held out')}

@pytest.mark.parametrize('name', BAD)
@pytest.mark.parametrize('late', [False, True])
def test_bad_text_is_one_line_and_leaves_nothing(name, late, tmp_path, monkeypatch):
    "Seen in the sample, or only when the sample is long past."
    monkeypatch.setattr(S, 'MAX_DOC', 1_000_000)
    raw, says = BAD[name]
    if late and (says in ('no documents', 'held out') or 'parquet' in name): pytest.skip('nothing to come to')
    (tmp_path / name).write_bytes(raw)
    (tmp_path / 'first.jsonl').write_bytes(GOOD)
    paths = ([tmp_path / 'first.jsonl'] if late else []) + [tmp_path / name]
    with pytest.raises(UserError) as e: stream_corpus(tmp_path / 'out', {'mine': Files(tuple(paths))}, workers=1, tokenizer='bytes', sample_bytes=1000 if late else 10**6)
    line = one_line(e)
    assert says in line and (name in line or 'mine' in line), line
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(['first.jsonl', name])

@pytest.mark.parametrize('name', ['broken.jsonl', 'latin.jsonl', 'long.jsonl', 'cut.jsonl.zst', 'cut.jsonl.gz'])
def test_bad_records_can_be_left_out_and_are_counted(name, tmp_path, monkeypatch):
    monkeypatch.setattr(S, 'MAX_DOC', 1_000_000)
    (tmp_path / name).write_bytes(BAD[name][0])
    m = stream_corpus(tmp_path / 'out', {'mine': Files((tmp_path / name,))}, workers=1, tokenizer='bytes', skip_bad=True)
    f = m.meta['domains']['mine']
    assert f['bad'] == 1 and (f['docs'] + f['held_out'] >= 40 or name.startswith('cut'))

def test_finished_shards_are_kept(files, tmp_path, monkeypatch):
    monkeypatch.setattr(S, 'WINDOW', 20_000)
    monkeypatch.setattr(S.windows, '__defaults__', (None, False, 20_000))
    (tmp_path / 'x.jsonl').write_bytes((files / 'a.jsonl').read_bytes() + b'\n{"text"\n')
    build = lambda **kw: stream_corpus(tmp_path / 'out', {'sums': Files((tmp_path / 'x.jsonl', files / 'b.jsonl.gz'))}, workers=1, sample_bytes=50_000, tokenizer='bytes', shard_tokens=10_000, **kw)
    with pytest.raises(UserError) as e: build()
    assert 'line 701' in one_line(e) and 'finished shards are kept' in str(e.value)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / '.out.partial').glob('sums/*')}
    m = build(skip_bad=True)
    assert m.meta['domains']['sums']['bad'] == 1 and len(before) > 3
    assert all((m.root / 'sums' / n).stat().st_mtime_ns == t for n, t in before.items())

def test_a_hub_that_cannot_be_read_is_one_line(tmp_path):
    pytest.importorskip('datasets')
    (tmp_path / 'x.jsonl').write_bytes(GOOD + b'{"text": \n')
    with pytest.raises(UserError) as e: stream_corpus(tmp_path / 'out', {'mine': Hub('json', data_files=str(tmp_path / 'x.jsonl'))}, workers=1, tokenizer='bytes')
    assert 'json, document' in one_line(e)
    with pytest.raises(UserError) as e: stream_corpus(tmp_path / 'out', {'mine': Hub('json', data_files=str(tmp_path / 'x.jsonl'))}, workers=1, tokenizer='bytes', skip_bad=True)
    assert 'json, document' in one_line(e)                       # a stream that breaks off is never taken for its end
    (tmp_path / 'x.jsonl').write_bytes(GOOD)
    with pytest.raises(UserError) as e: stream_corpus(tmp_path / 'out', {'mine': Hub('json', field='body', data_files=str(tmp_path / 'x.jsonl'))}, workers=1, tokenizer='bytes')
    assert "no text in field \"body\"; there are 'text'" in one_line(e)
    with pytest.raises(UserError) as e: stream_corpus(tmp_path / 'out', {'mine': Hub('json', data_files=str(tmp_path / 'none.jsonl'))}, workers=1, tokenizer='bytes')
    one_line(e)
    assert [p.name for p in tmp_path.iterdir()] == ['x.jsonl']

def test_a_parquet_without_the_column(tmp_path):
    pa = pytest.importorskip('pyarrow')
    import pyarrow.parquet as pq
    pq.write_table(pa.table({'body': ['a', 'b']}), tmp_path / 'x.parquet')
    with pytest.raises(UserError) as e: stream_corpus(tmp_path / 'out', {'mine': Files((tmp_path / 'x.parquet',))}, workers=1, tokenizer='bytes')
    assert "x.parquet: no column \"text\"; there are 'body'" in one_line(e)
    pq.write_table(pa.table({'text': ['a', None]}), tmp_path / 'x.parquet')
    assert [r.problem for r, _ in read_file(tmp_path / 'x.parquet')][1].endswith("row 2: no text in field \"text\"; there are 'text'")

@pytest.mark.parametrize('call, says', [(dict(shard_tokens=0), 'shard_tokens'), (dict(tokenizer='gpt5'), 'gpt5'), (dict(sources={}), 'no sources'), (dict(workers=0), 'workers'),
                                        (dict(sources={'../up': Files(('a',))}), 'domain'), (dict(sources={'probes': Files(('a',))}), 'domain'), (dict(sources={'a': Files(('none.txt',))}), 'none.txt')])
def test_bad_settings_are_one_line_and_leave_nothing(call, says, files, tmp_path):
    with pytest.raises(UserError) as e: stream_corpus(tmp_path / 'out', **{'sources': two(files), 'workers': 1, **SMALL, **call})
    assert says in one_line(e) and not list(tmp_path.iterdir())

def test_other_files_are_not_overwritten(files, tmp_path):
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out/thesis.txt').write_text('mine')
    with pytest.raises(UserError) as e: stream_corpus(tmp_path / 'out', two(files), workers=1, **SMALL)
    one_line(e)
    assert [p.name for p in tmp_path.rglob('*')] == ['out', 'thesis.txt']

def test_a_full_disk_is_one_line(files, tmp_path):
    "The limit on a file's size is a full disk that a test may make."
    code = ('import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (15_000, 15_000))\nfrom shohin.sources import *\nfrom shohin.shards import UserError\n'
            f'try: stream_corpus({str(tmp_path / "out")!r}, parse_sources({[f"sums={files}/a.jsonl"]!r}), tokenizer="bytes", workers=1)\nexcept UserError as e: print("said", e)')
    p = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert p.stdout.startswith('said ') and p.stdout.count('\n') == 1 and 'File too large' in p.stdout, (p.stdout, p.stderr)
    assert not list(tmp_path.iterdir())

def test_memory_stays_bounded(tmp_path):
    "60 MB of text through a build whose window is 16 MB: the process grows by far less than the text."
    with open(tmp_path / 'x.jsonl', 'w') as f:
        for i in range(1500): f.write(json.dumps({'text': f'{i} {i * i} ' * 3000}) + '\n')
    code = ('import resource\nfrom shohin.sources import *\nfrom shohin.corpus import Tokenizer\n'
            'peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\nt = Tokenizer(); before = peak()\n'
            f'stream_corpus({str(tmp_path / "out")!r}, parse_sources({[f"a={tmp_path}/x.jsonl"]!r}), tokenizer="bytes", shard_tokens=10_000_000, sample_bytes=2_000_000, workers=1)\nprint(peak() - before)')
    p = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert (tmp_path / 'x.jsonl').stat().st_size > 50e6 and float(p.stdout) < 150, p.stdout
