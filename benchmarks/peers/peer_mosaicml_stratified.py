"mosaicml-streaming with `batching_method='stratified'`: the same counts in every batch."
import peer_mosaicml

peer_mosaicml.METHOD = 'stratified'
prepare, Stream = peer_mosaicml.prepare, peer_mosaicml.Stream
