"""gRPC, against real servers on loopback."""
