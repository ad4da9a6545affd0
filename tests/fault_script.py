"""Lines for a config file that make a function fail on rank 1; how soon all must have ended."""

LIMIT_S = 10  # from the failure until every rank has ended
FAULT = """
import os, time
def boom(*args, **kwargs):
    open("struck", "w").write(str(time.time()))
    raise OSError("disk on fire")
if os.environ["RANK"] == "1":
    import {module}
    {module}.{name} = boom
"""
