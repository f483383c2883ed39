"""A streamed corpus beside the bare `tokenizers` batch encode, both on two cores: `pytest tests/bench_corpus.py -m benchmark -s`.

The corpus build reads, parses, hashes, shuffles, looks for held-out passages, compresses and writes; the bare encode does nothing else.
SHOHIN_BENCH_MB: megabytes of text (60)."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MB = int(os.environ.get('SHOHIN_BENCH_MB', 60))

TRAIN = '''import json
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
tok = Tokenizer(models.BPE()); tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False); tok.decoder = decoders.ByteLevel()
texts = [json.loads(l)["text"] for l in open({text!r}).readlines()[:600]]
tok.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8192, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
tok.save({tok!r})'''

BARE = '''import json, time
from tokenizers import Tokenizer
tok = Tokenizer.from_file({tok!r})
texts = [json.loads(l)["text"] for l in open({text!r})]
t, c = time.time(), time.process_time()
n = sum(len(e.ids) for i in range(0, len(texts), 1000) for e in tok.encode_batch_fast(texts[i:i + 1000], add_special_tokens=False))
print(time.time() - t, time.process_time() - c, n)'''

OURS = '''import resource, time
from shohin.sources import parse_sources, stream_corpus
cpu = lambda: sum(getattr(resource.getrusage(w), f) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN) for f in ("ru_utime", "ru_stime"))
if __name__ == "__main__":
    t, c, at = time.time(), cpu(), []
    m = stream_corpus({out!r}, parse_sources(["code=" + {text!r}]), tokenizer={tok!r}, workers=2, shard_tokens={shard}, say=lambda line: at.append(time.time()))
    n = len(m.shards) - 1                              # from the end of the first shard to the end of the last: without starting and finishing
    print(time.time() - t, cpu() - c, (at[n] - at[0]) / sum(s.tokens for s in m.shards[1:]))'''


def run(folder, code, **names):
    (folder / 'job.py').write_text(code.format(**names))
    env = dict(os.environ, RAYON_NUM_THREADS='2', TOKENIZERS_PARALLELISM='true', OMP_NUM_THREADS='1')
    return [float(x) for x in subprocess.run([sys.executable, folder / 'job.py'], env=env, stdout=subprocess.PIPE, text=True, check=True).stdout.split()]


@pytest.mark.benchmark
def test_tokenising_a_corpus_costs_at_most_a_fifth_more_than_the_bare_encode(tmp_path):
    text, size = tmp_path / 'text.jsonl', 0
    with open(text, 'w') as f:
        while size < MB * 1e6:
            for path in sorted(Path(os.__file__).parent.rglob('*.py')):
                raw = path.read_bytes().decode('utf8', 'ignore')
                for a in range(0, len(raw), 4000):
                    f.write(json.dumps({'text': f'# {size}\n{raw[a:a + 4000]}'}) + '\n')
                    size += len(raw[a:a + 4000])
                if size > MB * 1e6: break
    names = dict(text=str(text), tok=str(tmp_path / 'tok.json'), out=str(tmp_path / 'out'))
    run(tmp_path, TRAIN, **names)
    bare_wall, bare_cpu, tokens = run(tmp_path, BARE, **names)
    wall, cpu, a_token = run(tmp_path, OURS, **names, shard=int(tokens / 8))
    ratio = a_token * tokens / bare_wall
    print(f'\n{size / 1e6:.0f} MB of text, two cores: bare encode {size / bare_wall / 1e6:.2f} MB/s; a corpus takes {ratio:.2f} of its time, '
          f'{wall / bare_wall:.2f} with starting and finishing, and {cpu / bare_cpu:.2f} of its processor time')
    assert ratio < 1.2
