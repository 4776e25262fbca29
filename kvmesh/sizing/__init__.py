"""How many pipelines and decoders a load needs: pure arithmetic on lengths, rates and targets. docs/sizing.md explains it.

Called by `kvmesh size`; `reuse.py`, on computing KV anew or moving it, is called by docs/recompute-or-move.md alone. Standard
library only; knows no service, no metric and no flag.
"""
