"""Generated from protos/kvmesh/v1 by `make proto`; only this file is committed."""
