"""One measurement of one loader, in its own process and environment: prints one line of JSON.

    python measure.py PEER prepare|speed|resume|elastic|mixing CORPUS FOLDER [--workers N]"""
import argparse
import copy
import gc
import hashlib
import importlib
import itertools
import json
import pickle
import resource
import sys
import time
from pathlib import Path

import corpus as corpora
import numpy as np

CHECKED = 16  # batches compared after a resume


def memory() -> dict:
    "Of this process and its workers, in MB: proportional set size (shared pages count once), and our own peak of resident memory."
    me, pss = Path('/proc/self'), 0
    children = [p for t in me.glob('task/*/children') for p in t.read_text().split()]
    for p in ['self', *children]:
        try: pss += next(int(line.split()[1]) for line in Path(f'/proc/{p}/smaps_rollup').read_text().splitlines() if line.startswith('Pss:'))
        except (OSError, StopIteration): pass
    return {'pss_mb': pss / 1024, 'peak_rss_mb': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def digest(rows) -> bytes: return hashlib.sha256(np.ascontiguousarray(rows, np.int64)).digest()


def prepare(peer, corpus, folder, workers):
    start = time.perf_counter()
    peer.prepare(corpus, folder)
    return {'prepare_s': time.perf_counter() - start, 'bytes': sum(p.stat().st_size for p in folder.rglob('*') if p.is_file())}


def speed(peer, corpus, folder, workers):
    "Tokens a second over the run (and a second of processor time: steadier on a busy machine), the first batch apart; the rows' domains."
    start = time.perf_counter()
    batches = iter(peer.Stream(corpus, folder, workers))
    first = next(batches)
    opened, labels, tokens, seen = time.perf_counter() - start, [first[:, 0] // corpora.STRIDE], 0, 0
    used = memory()
    start, cpu = time.perf_counter(), time.process_time()
    for rows in itertools.islice(batches, corpus.steps - 1):
        labels.append(rows[:, 0] // corpora.STRIDE)
        seen += int(rows[:, -1].sum())  # touch the far end too
        tokens += rows.size
    took, cpu = time.perf_counter() - start, time.process_time() - cpu
    used = {k: max(v, used[k]) for k, v in memory().items()}
    assert all(len(x) == corpus.batch for x in labels), 'a batch of another size'
    return {'first_batch_s': opened, 'tokens_per_s': tokens / took, 'tokens_per_cpu_s': None if workers else tokens / cpu, **used, 'steps': len(labels), 'labels': np.stack(labels).tolist()}


def resume(peer, corpus, folder, workers):
    "Save at 10, 50 and 90 % of the run; then a new stream loads each state: time to its first batch, and are its batches the next ones?"
    points = [corpus.steps * p // 100 for p in (10, 50, 90)]
    stream, seen, states = peer.Stream(corpus, folder, workers), [], {}
    for k, rows in enumerate(itertools.islice(stream, points[-1] + CHECKED), 1):
        seen.append(digest(rows))
        if k in points: states[k] = pickle.dumps(stream.state())
    del stream
    def at(k):
        gc.collect()  # some loaders take seconds to close what was left unread: not part of the next resume
        start = time.perf_counter()
        again = peer.Stream(corpus, folder, workers)
        again.load(pickle.loads(states[k]))
        batches = iter(again)
        first = next(batches)
        took = time.perf_counter() - start
        got = [digest(first), *(digest(r) for r in itertools.islice(batches, CHECKED - 1))]
        return {'step': k, 'resume_s': took, 'same': sum(a == b for a, b in zip(got, seen[k:], strict=False)), 'of': CHECKED,
                'state_bytes': len(states[k])}
    out = [at(k) for k in points]
    return {'points': out, 'exact': all(p['same'] == p['of'] for p in out)}


def elastic(peer, corpus, folder, workers):
    "A state saved by one rank, loaded by two: do they read, together, the rows the one rank would have read next?"
    one = peer.Stream(corpus, folder, workers)
    batches = iter(one)
    for _ in range(5): next(batches)
    state = pickle.dumps(one.state())
    two = [peer.Stream(corpus, folder, workers, rank, 2) for rank in range(2)]
    for s in two: s.load(copy.deepcopy(pickle.loads(state)))
    two = [iter(s) for s in two]
    same = 0
    for _ in range(CHECKED):
        want = sorted(map(digest, next(batches)))
        same += want == sorted(digest(row) for s in two for row in next(s))
    return {'same': same, 'of': CHECKED, 'elastic': same == CHECKED}


def mixing(peer, corpus, folder, workers):
    "100 domains with unequal weights: the largest excess of a domain over its share, in rows. Nothing is read."
    if not hasattr(peer, 'mix'): raise NotImplementedError('domains are drawn at random: see the order that was read')
    w = np.array(list(corpora.MANY.values())) / sum(corpora.MANY.values())
    domain, before = (np.asarray(x, np.int64) for x in peer.mix(corpora.MANY, corpora.PLACES))  # of each place, and how many rows of it came before
    off = np.maximum(abs(before - corpora.PLACES * w[domain]), abs(before + 1 - (corpora.PLACES + 1) * w[domain]))
    return {'domains': len(w), 'prefix_rows': float(off.max()), 'at_row': int(corpora.PLACES[off.argmax()]), 'first_rows': float(off[:10_000].max())}


def main():
    p = argparse.ArgumentParser()
    p.add_argument('peer'); p.add_argument('what', choices=['prepare', 'speed', 'resume', 'elastic', 'mixing'])
    p.add_argument('corpus'); p.add_argument('folder', type=Path); p.add_argument('--workers', type=int, default=0)
    a = p.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    try: out = globals()[a.what](importlib.import_module(f'peer_{a.peer}'), corpora.load(a.corpus), a.folder, a.workers)
    except NotImplementedError as e: out = {'unsupported': str(e)}
    except Exception as e: out = {'error': f'{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ""}'[:300]}
    sys.stdout.flush()
    print('\n' + json.dumps(out))


if __name__ == '__main__': main()
