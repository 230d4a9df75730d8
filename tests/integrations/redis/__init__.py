"""redis-py under policies, against a server that is killed, frozen and started again."""
