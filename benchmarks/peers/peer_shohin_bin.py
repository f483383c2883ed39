"Ours, on llm.c shards, which are not compressed."
import peer_shohin

peer_shohin.SUFFIX = '.bin'
prepare, Stream, mix = peer_shohin.prepare, peer_shohin.Stream, peer_shohin.mix
