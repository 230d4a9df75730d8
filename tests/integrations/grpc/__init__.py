"""gRPC, against real servers on loopback."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when grpc is imported; a server that stops is no news
