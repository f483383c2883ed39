"""The benchmark's page: what run.py measured, in the shape from which `make pages` makes reports/bench-peers.html.

    python benchmarks/peers/page.py RESULT.json [reports/benchmarks/peers.json]"""
import json
import sys
from pathlib import Path

OURS, STREAMING = ('shohin', 'shohin_bin'), ('litdata', 'mosaicml', 'mosaicml_stratified', 'datasets')
NAMES = {'shohin': 'shohin (zstd)', 'shohin_bin': 'shohin (llm.c)', 'torchdata': 'torchdata nodes', 'megatron': 'megatron-core', 'mosaicml': 'mosaicml-streaming',
         'mosaicml_stratified': 'mosaicml-streaming (stratified)', 'datasets': 'datasets (streaming)'}
BOUNDED = 1.5  # rows
SEEK = {  # reached without a saved state? read in their code and documentation, not measured
    'shohin': ('yes', 'the batch of a step is computed from its number'), 'grain': ('yes', 'an element is computed from its number'),
    'megatron': ('by index', 'looked up in an index over the whole run, made before it starts'),
    'torchdata': ('no', 'only through a saved state'), 'litdata': ('no', 'the draws before it are made again'),
    'mosaicml': ('no', 'the order of the whole epoch is made again'), 'datasets': ('no', 'only through a saved state, or by reading up to it')}
NOTES = [
    'shohin is measured on zstd shards and on llm.c shards. A measurement is a process of its own, everything in the page cache; the peers take turns, and a speed is the median of three runs.',
    'The streaming loaders read a local folder here, without a network. They do more than this: remote storage, other kinds of records, tokenisation on the way. megatron-core is its indexed dataset and its blending index without the trainer around them.',
    'A zstd shard that is read at random is decompressed frame by frame at first and from the raw cache later; over as few tokens as here the first part costs most. llm.c shards are not compressed.',
    'Ten times the fastest streaming loader is a batch in about 60 µs, and 64 reads by position take 47 µs of that. With mapped files ours came to 6.6 times; but a mapped file that becomes shorter ends the process without a message, so rows stay reads.',
    'Memory is the proportional set size of the process and its workers after the run. Those that import torch spend most of it on that.',
    'Exact: the next 16 batches after a resume in a new loader are the ones that the interrupted run would have read. Elastic: a state of one rank, loaded by two, gives the same 16 global batches. A loader whose ranks are processes of torch.distributed was not asked (mosaicml-streaming documents that it is elastic).',
    'The last goal rests on two definitions: constant time means without an index that grows with the run, and bounded means for 100 domains. Of the four domains above grain keeps the mix as closely as ours, and megatron-core, by its index, reaches any step at once.',
    'How a step is reached without a saved state was read in their code and documentation, not measured.',
    f'Bounded: no domain is ever more than {BOUNDED} rows from its share, of 100 domains with weights like 1/(k+3)^1.2, at any of 10,000 rows from the start and from the millionth on. Loaders that draw domains at random are judged by the order that they really produced.',
    'Rows read, the domain of each, are those of the speed run without workers; shohin audit judges them like any other order.']


def name(peer): return NAMES.get(peer, peer)


def value(result, key):
    "A measured number, or None; what was not asked or failed has none."
    return (result or {}).get(key)


def bounded(r):
    "(largest distance from the mix in rows, is it bounded) of a peer."
    rows = value(r.get('mixing'), 'prefix_rows')
    if rows is None: rows = value(r.get('order_0'), 'prefix_rows')
    return rows, None if rows is None else rows <= BOUNDED


def traits(peer, r):
    "The four that a data order needs, each True, False or None (not known)."
    exact = [value(r.get(f'resume_{w}'), 'exact') for w in (0, 2)]
    return {'exact': None if exact[0] is None else all(e for e in exact if e is not None), 'elastic': value(r.get('elastic'), 'elastic'),
            'seek': SEEK[peer.partition('_')[0]][0] == 'yes', 'bounded': bounded(r)[1]}


def goals(peers):
    "[(goal, measured, met)]: how far from what was set out for."
    speed = {p: v for p, r in peers.items() if (v := value(r.get('speed_0'), 'tokens_per_s'))}
    ours, others, out = max((speed[p] for p in OURS if p in speed), default=None), {p: v for p, v in speed.items() if p not in OURS}, []
    if ours and others:
        best = max(others, key=others.get)
        out.append(('at least 0.7 times the tokens a second of the fastest peer', f'{ours / others[best]:.2f} times {name(best)}', ours >= .7 * others[best]))
        slow = {p: ours / others[p] for p in STREAMING if p in others}
        if slow: out.append(('10 times those of every streaming loader', ', '.join(f'{x:.1f} times {name(p)}' for p, x in slow.items()), min(slow.values()) >= 10))
    full = {p for p, r in peers.items() if 'skipped' not in r and all(traits(p, r).values())}
    near = {p: [k for k, v in traits(p, r).items() if v is False] for p, r in peers.items() if 'skipped' not in r and p not in OURS}
    last = {'exact': 'exact resume', 'elastic': 'elastic ranks', 'seek': 'a step in constant time without an index', 'bounded': 'a bounded mix of 100 domains'}
    said = [f'{name(p)} lacks only {last[lacks[0]]}' for p, lacks in near.items() if len(lacks) == 1 and None not in traits(p, peers[p]).values()]
    out.append(('the only one with all of: exact resume, elastic, a step in constant time, bounded mixing', '; '.join([f'all four: {", ".join(map(name, sorted(full))) or "none"}', *said]),
                bool(full & set(OURS)) and full <= set(OURS)))
    return out


def page(result):
    "The JSON of the page: the result as it is, and what is shown of it."
    peers, speed = result['peers'], {p: v for p, r in result['peers'].items() if (v := value(r.get('speed_0'), 'tokens_per_s'))}
    there = {p: r for p, r in peers.items() if 'skipped' not in r}
    ms = lambda r, w: ', '.join(f'{1e3 * x["resume_s"]:.0f}' for x in value(r.get(f'resume_{w}'), 'points') or ()) or None
    mega = lambda x: None if x is None else round(x / 1e6, 1)
    c, met = result['corpus'], goals(peers)
    rows = f'{c["batch"]} rows of {c["length"]:,} tokens a step, {c["steps"]} steps'
    seek = lambda p: SEEK[p.partition('_')[0]]
    tables = [
        dict(title='Speed', text=f'Four domains mixed 4 : 3 : 2 : 1, {rows}; tokens as int64, one process.', caption='Tokens a second, and the time from nothing open to the first batch',
             columns={'loader': 'loader', 'speed': 'million tokens/s', 'share': '% of the fastest', 'workers': 'with 2 workers', 'first': 'first batch, ms'},
             rows=[{'loader': name(p), 'speed': mega(speed.get(p)), 'share': round(100 * speed[p] / max(speed.values())) if p in speed else None, 'workers': mega(value(r.get('speed_2'), 'tokens_per_s')),
                    'first': None if p not in speed else round(1e3 * r['speed_0']['first_batch_s'])} for p, r in there.items()]),
        dict(title='Memory and format', caption='Memory of the process, and what it takes to write the tokens in the loader\'s own format; without one, the flat files are read as they are', columns={'loader': 'loader', 'memory': 'memory, MB', 'write': 'to write, s', 'bytes': 'format, MB'},
             rows=[{'loader': name(p), 'memory': None if p not in speed else round(r['speed_0']['pss_mb']), 'write': round(r['prepare']['prepare_s'], 1) if r['prepare']['bytes'] else None,
                    'bytes': round(r['prepare']['bytes'] / 1e6) if r['prepare']['bytes'] else None} for p, r in there.items()]),
        dict(title='Resume', text='From a saved state to the next batch, in a new loader; then whether its batches are the right ones, and whether two ranks can go on where one stopped.', caption='Time to resume, exactness, elastic ranks',
             columns={'loader': 'loader', 'ms': 'at 10, 50, 90 %, ms', 'exact': 'exact', 'exact_2': '2 workers', 'elastic': 'elastic'},
             rows=[{'loader': name(p), 'ms': ms(r, 0), 'exact': value(r.get('resume_0'), 'exact'), 'exact_2': value(r.get('resume_2'), 'exact'), 'elastic': value(r.get('elastic'), 'elastic')} for p, r in there.items()]),
        dict(title='A step without a saved state', caption='Is any step reached in constant time, without an index?', columns={'loader': 'loader', 'seek': 'constant', 'how': 'how it is reached'}, rows=[{'loader': name(p), 'seek': seek(p)[0], 'how': seek(p)[1]} for p in there]),
        dict(title='The order that was read', text='shohin audit over the domains of the rows as they came, and how far the mix of 100 unequal domains is from its weights where domains are not drawn at random.', caption='The audit of each order, and how many rows a domain is off its share',
             columns={'loader': 'loader', 'verdict': 'audit', 'read': 'off, 4 domains', 'many': 'off, 100 domains', 'bounded': 'bounded', 'run': 'longest run'},
             rows=[{'loader': name(p), 'verdict': value(r.get('order_0'), 'verdict'), 'read': _round(value(r.get('order_0'), 'prefix_rows')), 'many': _round(value(r.get('mixing'), 'prefix_rows')), 'bounded': bounded(r)[1],
                    'run': value(value(r.get('order_0'), 'run'), 'rows')} for p, r in there.items()]),
        dict(title='The goals', text='Set before anything was measured.', caption='What was set out for, what was measured, and whether it was met', columns={'goal': 'goal', 'measured': 'measured', 'met': 'met'}, rows=[dict(goal=g, measured=m, met=yes) for g, m, yes in met])]
    found = [f'The audit of {name(p)}: {f}.' for p, r in there.items() for f in value(r.get('order_0'), 'findings') or ()]
    gone = [f'{name(p)} was skipped: {r["skipped"]}' for p, r in peers.items() if 'skipped' in r]
    failed = [f'{name(p)}, {k.replace("_", " with ")}{" workers" if k[-1].isdigit() else ""}: {v["error"]}' for p, r in there.items() for k, v in r.items() if 'error' in v]
    needs = ', '.join(dict.fromkeys(x for p in there for x in result['requirements'].get(p, ())))
    return {'benchmark': 'peers', 'title': 'Our loader beside others', 'summary': 'Tokens a second, resume, memory and the order that is really read, on the same tokens in one run: ours beside six loaders that people train with.',
            'command': 'make bench', 'machine': f'{result["machine"]["cores"]} cores, {result["machine"]["processor"]}', 'commit': result['commit'], 'dirty': result.get('dirty', False),
            'versions': result['versions'], 'wall_s': result['wall_s'], 'answers': [f'{"Met" if yes else "Not met"}: {g}. Measured: {m}.' for g, m, yes in met], 'tables': tables,
            'notes': NOTES + [f'Versions of the others: {needs}.'] * bool(needs) + list(result.get('notes', ())) + found + gone + failed, **{k: result[k] for k in ('corpus', 'requirements')},
            'peers': {p: {k: {a: b for a, b in v.items() if a != 'labels'} if isinstance(v, dict) else v for k, v in r.items()} for p, r in peers.items()}}


def _round(x): return None if x is None else round(x, 1)


def write(result, out):
    "Write the page's JSON whole or not at all."
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_name(f'.{out.name}.tmp')
    new.write_text(json.dumps(page(result), indent=1) + '\n')
    new.replace(out)


if __name__ == '__main__': write(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2] if sys.argv[2:] else Path(__file__).resolve().parents[2] / 'reports/benchmarks/peers.json')
