"torchdata's nodes: a weighted sampler over one shuffled node a domain, rows read from the flat files."
import torch
from corpus import DOMAINS
from torch.utils.data import RandomSampler
from torchdata.nodes import Batcher, Loader, Mapper, MultiNodeWeightedSampler, ParallelMapper, SamplerWrapper


def prepare(corpus, folder): pass  # reads the flat files as they are


class Stream:
    def __init__(self, corpus, folder, workers=0, rank=0, world=1):
        rows = {d: corpus.rows(d) for d in DOMAINS}
        def node(domain, seed):
            sampler = RandomSampler(range(len(rows[domain])), generator=torch.Generator().manual_seed(seed))
            return Mapper(SamplerWrapper(sampler), lambda i: (domain, i))
        nodes = {d: node(d, corpus.seed + k + 1000 * rank) for k, d in enumerate(DOMAINS)}
        mixed = MultiNodeWeightedSampler(nodes, dict(DOMAINS), seed=corpus.seed, rank=rank, world_size=world)
        batched = Batcher(mixed, corpus.batch // world)
        def read(batch):
            out = torch.empty((len(batch), corpus.length), dtype=torch.int64)
            for row, (d, i) in zip(out, batch, strict=True): row[:] = torch.from_numpy(rows[d][i].astype('int64'))
            return out
        self.loader = Loader(ParallelMapper(batched, read, num_workers=workers, method='thread') if workers else Mapper(batched, read))

    def __iter__(self):
        for batch in self.loader: yield batch.numpy()

    def state(self): return self.loader.state_dict()
    def load(self, state): self.loader.load_state_dict(state)
