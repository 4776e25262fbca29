"""How services of the mesh serve and call each other. Knows gRPC; knows no room, page or model.

Importing this package sets gRPC's environment, which its core reads once, when the first channel or server is made.
"""

import os

# What gRPC logs on stderr by itself names addresses and is not one of our lines; each fault reaches us as a status.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# No fork happens inside a call: the hooks would only print warnings and hold the interpreter when a child is started.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
