"""Our loader beside others, in one run on the same tokens: speed, resume, memory, exactness, and an audit of the real order.

    python benchmarks/peers/run.py                          everything; alone on an idle machine, about 20 minutes
    python benchmarks/peers/run.py --peers shohin,grain --tokens 2_000_000 --batch 8 --steps 60 --length 257

Each peer gets its own environment on top of the running one, because their pins clash; what cannot be installed is
skipped with a message. Every measurement is a process of its own."""
import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import version
from pathlib import Path

import corpus as corpora
import page

from shohin.audit import audit_batches

HERE = Path(__file__).resolve().parent
PEERS = {  # name: what its environment needs beyond the running one; with nothing, the running one is used
    'shohin': [], 'shohin_bin': [],
    'torchdata': ['torchdata==0.11.0'],
    'grain': ['grain==0.2.18'],
    'megatron': ['megatron-core==0.16.1'],
    'litdata': ['litdata==0.2.76'],
    'mosaicml': ['mosaicml-streaming==0.13.0'], 'mosaicml_stratified': ['mosaicml-streaming==0.13.0'],
    'datasets': ['datasets==5.2.0', 'torchdata==0.11.0'],
}


def environment(folder: Path, needs: list[str]) -> Path:
    """The python of an environment with `needs` on top of the packages of the running one (torch is not installed again),
    made once. RuntimeError if it cannot be made."""
    if not needs: return Path(sys.executable)
    home = folder / 'envs' / hashlib.sha256(' '.join(needs).encode()).hexdigest()[:12]
    python, ready = home / 'bin' / 'python', home / 'ready'
    if ready.exists(): return python
    print(f'installing {" ".join(needs)}', file=sys.stderr, flush=True)
    subprocess.run([sys.executable, '-m', 'venv', '--clear', '--without-pip', home], check=True)
    site = Path(subprocess.run([python, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))'], capture_output=True, text=True, check=True).stdout.strip())
    (site / 'running.pth').write_text(sysconfig.get_path('purelib') + '\n')
    (home / 'constraints.txt').write_text(f'torch=={version("torch").split("+")[0]}\n')
    done = subprocess.run([sys.executable, '-m', 'pip', '--python', python, 'install', '-q', '--disable-pip-version-check', '-c', home / 'constraints.txt', *needs],
                          capture_output=True, text=True)
    if done.returncode: raise RuntimeError(f'pip cannot install {" ".join(needs)}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1][:200]}')
    ready.touch()
    return python


def measure(python: Path, folder: Path, peer: str, what: str, workers: int, timeout: int) -> dict:
    "One measurement, or {'error': why}."
    env = os.environ | dict(OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1', SHOHIN_CACHE=str(folder / 'cache'), PYTHONWARNINGS='ignore')
    command = [python, HERE / 'measure.py', peer, what, folder / 'corpus', folder / 'peers' / peer, '--workers', str(workers)]
    try: done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout, cwd=folder)
    except subprocess.TimeoutExpired: return {'error': f'no result after {timeout} s'}
    try: return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError): return {'error': f'ended with status {done.returncode}: {(done.stderr.strip() or "no message").splitlines()[-1][:200]}'}


def speeds(runs: list[dict]) -> dict:
    "Repeated runs as one: the median of each number; or the first failure."
    good = [r for r in runs if 'tokens_per_s' in r]
    if not good: return runs[0]
    return {k: statistics.median(r[k] for r in good) if isinstance(v, int | float) else v for k, v in good[0].items()} | {
        'tokens_per_s_each': [round(r['tokens_per_s']) for r in good]}


def order_of(labels: list, peer: str) -> dict:
    "The audit of the rows' domains as they came, (steps, rows) domain numbers."
    names = list(corpora.DOMAINS)
    result = audit_batches(labels, domain=lambda rows: [names[d] for d in rows], weights=corpora.DOMAINS, source=peer)
    s = result.stats
    return {'verdict': result.verdict, 'dispersion': s['dispersion']['value'], 'prefix_rows': s['prefix']['rows'],
            'run': s['run'], 'mono': s['mono'],
            'findings': [c.finding for c in result.checks if c.level != 'safe']}


def run(folder: Path, peers: list[str], repeats: int, timeout: int) -> dict:
    out, pythons = {p: {} for p in peers}, {}
    say = lambda text: print(text, file=sys.stderr, flush=True)
    for p in peers:
        try: pythons[p] = environment(folder, PEERS[p])
        except (RuntimeError, subprocess.CalledProcessError, OSError) as e: out[p]['skipped'] = str(e); say(f'{p} skipped: {e}'); continue
        shutil.rmtree(folder / 'peers' / p, ignore_errors=True)      # of an earlier run: litdata and mosaicml-streaming refuse to write over it
        out[p]['prepare'] = measure(pythons[p], folder, p, 'prepare', 0, timeout)
        if 'error' in out[p]['prepare']: out[p]['skipped'] = out[p]['prepare']['error']; say(f'{p} skipped: {out[p]["skipped"]}'); del pythons[p]
    for w in (0, 2):
        runs = {p: [] for p in pythons}
        for _ in range(repeats):  # in turn, so that a busy moment hits all
            for p, python in pythons.items(): say(f'{p}: speed, {w} workers'); runs[p].append(measure(python, folder, p, 'speed', w, timeout))
        for p in pythons:
            out[p][f'speed_{w}'] = s = speeds(runs[p])
            if labels := s.pop('labels', None): out[p][f'order_{w}'] = order_of(labels, p)
    for p, python in pythons.items():
        say(f'{p}: resume')
        for w in (0, 2): out[p][f'resume_{w}'] = measure(python, folder, p, 'resume', w, timeout)
        for what in ('elastic', 'mixing'): out[p][what] = measure(python, folder, p, what, 0, timeout)
    return out


def table(peers: dict) -> list[list[str]]:
    "The results in words, a header first."
    def cell(result, f):
        if 'unsupported' in result: return 'n/a'
        return 'failed' if 'error' in result else f(result)
    rows = [['loader', 'Mtok/s', '2 workers', 'first batch', 'resume at 10, 50, 90 %', 'exact', '2 workers', 'elastic', 'PSS', 'own format', 'order', 'prefix error']]
    yes = lambda x: 'yes' if x else 'no'
    for name, r in peers.items():
        if 'skipped' in r: rows.append([name, 'skipped: ' + r['skipped']]); continue
        order = r.get('order_0', {})
        rows.append([name, *(cell(r[f'speed_{w}'], lambda s: f'{s["tokens_per_s"] / 1e6:.1f}') for w in (0, 2)),
                     cell(r['speed_0'], lambda s: f'{1e3 * s["first_batch_s"]:.0f} ms'),
                     cell(r['resume_0'], lambda s: ', '.join(f'{1e3 * p["resume_s"]:.0f}' for p in s['points']) + ' ms'),
                     *(cell(r[f'resume_{w}'], lambda s: yes(s['exact'])) for w in (0, 2)), cell(r['elastic'], lambda s: yes(s['elastic'])),
                     cell(r['speed_0'], lambda s: f'{s["pss_mb"]:.0f} MB'),
                     f'{r["prepare"]["prepare_s"]:.1f} s, {r["prepare"]["bytes"] / 1e6:.0f} MB' if r['prepare']['bytes'] else 'none',
                     order.get('verdict', '-'), f'{order["prefix_rows"]:.1f} rows' if order else '-'])
    return rows


def commit() -> dict:
    "The commit that is measured, and whether the tree differs from it."
    git = lambda *a: subprocess.run(['git', *a], cwd=HERE, capture_output=True, text=True).stdout.strip()
    return {'commit': git('rev-parse', 'HEAD') or 'unknown', 'dirty': bool(git('status', '--porcelain', '--untracked-files=no'))}


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--peers', default=','.join(PEERS))
    for name, default in dict(tokens=36_000_000, batch=64, length=1025, steps=280, repeats=3, timeout=600).items():
        p.add_argument(f'--{name}', type=int, default=default)
    p.add_argument('--folder', type=Path, default=Path('data/bench/peers'), help='corpus, formats and environments')
    p.add_argument('--out', type=Path, help='write the results here as JSON (default: FOLDER/result.json)')
    p.add_argument('--page', type=Path, help='write what `make pages` needs here: reports/benchmarks/peers.json')
    a = p.parse_args()
    peers = a.peers.split(',')
    if unknown := [x for x in peers if x not in PEERS]: p.error(f'no such peer: {unknown[0]} (there are {", ".join(PEERS)})')
    folder = a.folder.resolve()
    start, measured = time.time(), commit()
    corpus = corpora.make(folder / 'corpus', a.tokens, a.batch, a.length, a.steps)
    result = {'benchmark': 'loaders', **measured, 'corpus': {k: v for k, v in vars(corpus).items() if k != 'root'}, 'requirements': {k: PEERS[k] for k in peers},
              'versions': {k: version(k) for k in ('torch', 'numpy')} | {'python': platform.python_version()},
              'machine': {'cores': os.cpu_count(), 'processor': platform.processor() or platform.machine(), 'load_before': os.getloadavg()[0]},
              'peers': run(folder, peers, a.repeats, a.timeout), 'wall_s': 0}
    result['wall_s'] = round(time.time() - start)
    out = a.out or folder / 'result.json'
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + '\n')
    from rich.console import Console
    from rich.table import Table
    rows = table(result['peers'])
    t = Table(*rows[0])
    for r in rows[1:]: t.add_row(*r)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(t)
    for goal, found, met in page.goals(result['peers']): console.print(f'{"met" if met else "not met"}: {goal}: {found}', markup=False)
    if a.page: page.write(result, a.page)


if __name__ == '__main__': main()
