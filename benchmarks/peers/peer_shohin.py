"Ours, on zstd shards."
from pathlib import Path

from corpus import DOMAINS
from torch.utils.data import DataLoader

from shohin.loader import Loader
from shohin.order import InterleavedOrder, Mix, integer_weights
from shohin.shards import Manifest, build_manifest, write_shard

SUFFIX = '.u16.zst'
SHARDS = 4  # of each domain


def prepare(corpus, folder: Path):
    for domain in DOMAINS:
        tokens, per = corpus.read(domain), corpus.tokens // SHARDS // corpus.length * corpus.length
        for i in range(SHARDS): write_shard(folder / domain / f'{i:05d}{SUFFIX}', tokens[i * per:(i + 1) * per])
    build_manifest(folder, 'bytes', 1 << 16, None, list(DOMAINS)).save()


def mix(weights, places): return Mix(integer_weights(weights, tuple(weights))).locate(places)


class Stream:
    def __init__(self, corpus, folder, workers=0, rank=0, world=1):
        manifest = Manifest.load(folder)
        order = InterleavedOrder(manifest, corpus.batch, corpus.length - 1, corpus.seed, {d: round(100 * w) for d, w in DOMAINS.items()})
        self.loader, self.workers, self.step = Loader(order, manifest, rank, world), workers, 0

    def __iter__(self):
        for batch in DataLoader(self.loader, batch_size=None, num_workers=self.workers):
            self.step = batch.step + 1
            yield batch.tokens.numpy()

    def state(self): return self.loader.state_dict(self.step)
    def load(self, state): self.loader.load_state_dict(state)
