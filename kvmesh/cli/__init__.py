"""The command line: `kvmesh up | chat | status | trace | size`. Talks to services over gRPC, starts processes, no more."""
