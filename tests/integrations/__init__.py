"""Each integration against the real library, and a real server where there is one."""
