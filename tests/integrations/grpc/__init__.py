"""gRPC, against real servers on loopback."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when grpc is imported; it would report each server that stops
