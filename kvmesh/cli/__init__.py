"""The command line: `kvmesh up | chat | status`. Talks to the services over gRPC and starts them as processes, no more."""
