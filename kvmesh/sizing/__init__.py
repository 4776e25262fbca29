"""How many pipelines and decoders a load needs: pure arithmetic on lengths, rates and targets. docs/sizing.md explains it.

Called by `kvmesh size`. Standard library only; knows no service, no metric and no flag.
"""
