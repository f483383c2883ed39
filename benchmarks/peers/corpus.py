"""The tokens that every loader reads: D domains of equal size as flat uint16 files, mixed with unequal weights.

A token says which domain it belongs to (token // STRIDE), so that the order a loader really produced can be read off its
batches. Within a domain tokens follow Zipf's law, so that compression has its usual work. Only numpy is needed."""
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

STRIDE = 15_000
DOMAINS = {'code': .4, 'math': .3, 'web': .2, 'papers': .1}
MANY = {f'd{i}': 1 / (i + 3)**1.2 for i in range(100)}  # weights of 100 domains, the least a sixtieth of the largest
PLACES = np.concatenate([np.arange(10_000), 10**6 + np.arange(10_000)])  # rows at which a mix is looked at


@dataclass(frozen=True)
class Corpus:
    root: str
    tokens: int     # of each domain
    batch: int      # rows in a global batch
    length: int     # tokens in a row; rows do not overlap
    steps: int      # in a measured run
    seed: int = 0

    def read(self, domain: str) -> np.ndarray: return np.memmap(f'{self.root}/{domain}.u16', np.uint16, 'r')

    def rows(self, domain: str) -> np.ndarray:
        "(rows, length), a view of the file."
        n = self.tokens // self.length
        return self.read(domain)[:n * self.length].reshape(n, self.length)


def make(root: Path, tokens: int, batch: int, length: int, steps: int) -> Corpus:
    "Write the corpus, unless it is there."
    each = tokens // len(DOMAINS)
    need = int((steps + 40) * batch * max(DOMAINS.values()) * 1.05) * length  # a resume reads a little further
    if need > each: raise SystemExit(f'{steps} steps read a domain more than once: at least {need * len(DOMAINS):,} tokens are needed')
    corpus = Corpus(str(root), each, batch, length, steps)
    root.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for d, name in enumerate(DOMAINS):
        path = root / f'{name}.u16'
        if path.exists() and path.stat().st_size == 2 * each: continue
        with open(path, 'wb') as f:
            for at in range(0, each, 1 << 22):
                ids = np.minimum(rng.zipf(1.3, min(1 << 22, each - at)), STRIDE) - 1
                f.write((ids + d * STRIDE).astype(np.uint16).tobytes())
    (root / 'corpus.json').write_text(json.dumps(asdict(corpus)))
    return corpus


def load(root) -> Corpus: return Corpus(**json.loads((Path(root) / 'corpus.json').read_text()))
